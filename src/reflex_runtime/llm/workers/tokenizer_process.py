"""Tokenises long prompts in a process of its own.

A tokenizer holds the interpreter for tens of milliseconds over a megabyte: in the server's process every stream would
wait that long for its next token, in a model's process every step. It is a runtime process with the model's
tokenizer alone. While it is not ready, the server tokenises itself.
"""

from __future__ import annotations

from reflex_runtime.core.errors import ConfigError, ReflexError, TooLarge
from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.client_config import ClientConfig
from reflex_runtime.ipc.messages import LOAD, TOKENIZE, LoadModel, Tokenize
from reflex_runtime.ipc.spawn import Opener
from reflex_runtime.llm.engine.tokenizer import Conversation


class TokenizerProcess:
    """See the module. name: of the model. path: of its directory."""

    def __init__(self, open: Opener, config: ClientConfig, name: str, path: str) -> None:
        self._load = LoadModel(name, path, only="tokenizer")
        self.client = RuntimeClient(open, config, name="tokenizer", prepare=self._prepare)

    async def _prepare(self, client: RuntimeClient) -> None:
        await client.request(LOAD, self._load)

    async def tokenize(self, what: str | Conversation, most: int) -> list[int] | None:
        """The tokens of a text or a conversation; None when the process does not answer. Raises ConfigError for
        what cannot be tokenised, TooLarge for more than `most` tokens."""
        said = Tokenize(self._load.model_id, most=most)
        if isinstance(what, str):
            said.text = what
        else:
            said.messages, said.tools, said.template_kwargs = what.messages, what.tools, what.more
        if not self.client.ready:
            return None
        try:
            answer = await self.client.request(TOKENIZE, said, dict[str, list[int]])
        except ConfigError:
            raise
        except TooLarge as error:
            tokens = error.details.get("tokens")
            why = "and the prompt has more" if tokens is None else f"not {tokens} prompt tokens"
            raise TooLarge(f"the model's context holds {most} tokens, {why}", max_model_len=most) from None
        except ReflexError:  # it died, hangs, or is too busy
            return None
        found: list[int] = answer["token_ids"]
        return found
