"""The front's end of one runtime process: its client, what waits for the model there, and its streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError, ReflexError, TooLarge
from reflex_runtime.ipc.client import ClientConfig, RuntimeClient
from reflex_runtime.ipc.generate_batcher import GenerateBatcher, GenerateBatcherConfig
from reflex_runtime.ipc.messages import LOAD, TOKENIZE, LoadModel, Tokenize
from reflex_runtime.ipc.registry import StreamRegistry
from reflex_runtime.ipc.spawn import Opener
from reflex_runtime.llm.engine.generation_options import Limits
from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.llm.server.model_host import Opening
from reflex_runtime.observe.live import LiveProcess, live_process
from reflex_runtime.settings import LLMServeConfig

ASKED_WITHIN: Final = 2.0  # seconds for an answer for /status or /metrics; a process that takes longer is left out


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """count: processes. spawn: starts one, by its number. options: settings of `reflex serve MODEL_DIR` for the model's
    copy in a process, by the number of the process and its restarts. batcher, client: settings of each line."""

    count: int
    spawn: Callable[[int], Opener]
    options: Callable[[LLMServeConfig, int, int], dict[str, Any]]
    batcher: GenerateBatcherConfig = field(default_factory=GenerateBatcherConfig)
    client: ClientConfig = field(default_factory=ClientConfig)


def one_bound(config: LLMServeConfig, batcher: GenerateBatcherConfig) -> tuple[LLMServeConfig, GenerateBatcherConfig]:
    """Bounds of a queue stand in two places; the smaller one holds, and is the one shown everywhere."""
    requests = min(config.max_queue, batcher.max_pending)
    tokens = min(config.max_queued_tokens, batcher.max_pending_tokens)
    return (
        replace(config, max_queue=requests, max_queued_tokens=tokens),
        replace(batcher, max_pending=requests, max_pending_tokens=tokens),
    )


class Line:
    """One runtime process with its client. limits, about: what the process has answered when the model was loaded;
    None, and empty, before."""

    def __init__(self, number: int, config: WorkersConfig, opening: Opening) -> None:
        self.name = f"worker-{number}"
        self.limits: Limits | None = None
        self.about: dict[str, Any] = {}
        self._plan, self._options, self._number = opening.plan, config.options, number
        batcher = one_bound(opening.plan.config, config.batcher)[1]
        self.registry = StreamRegistry(batcher.stream_limit)
        self.client = RuntimeClient(
            config.spawn(number), config.client, name=self.name, prepare=self._prepare,
            on_note=self.registry.note, on_lost=self.registry.lost,
        )  # fmt: skip
        self.batcher = GenerateBatcher(self.client, self.registry, batcher, registry_of_series=opening.registry)

    async def _prepare(self, client: RuntimeClient) -> None:
        """Load the model: after every start of the process."""
        plan = self._plan
        options = self._options(plan.config, self._number, client.restarts)
        asked = LoadModel(plan.name, str(plan.directory.resolve()), options)
        about = await client.request(LOAD, asked, timeout=None)
        self.limits = Limits(**{name: about.pop(name) for name in Limits.__dataclass_fields__})
        self.about = about

    @property
    def unfinished(self) -> int:
        """Its requests that have not ended."""
        return self.registry.unfinished

    @property
    def running(self) -> int:
        """Those that hold a place."""
        return self.registry.active_count()

    # -- what is asked of it -------------------------------------------------------------------------------------------

    async def ask(self, method: str) -> Any:
        """The result of a call without params; None when the process does not answer."""
        try:
            return await self.client.request(method, {}, timeout=ASKED_WITHIN) if self.client.ready else None
        except ReflexError:
            return None

    def health(self) -> dict[str, Any]:
        client = self.client
        found = {"name": self.name, "state": client.state, "pid": client.pid, "restarts": client.restarts}
        found |= {"running": self.running, "waiting": self.unfinished - self.running}
        return found | ({"last_error": client.last_error} if client.last_error else {})

    def process(self) -> LiveProcess:
        client, running = self.client, self.running
        state, why = client.state, client.last_error or ""
        return live_process(self.name, client.pid, state, client.restarts, running, self.unfinished - running, why)


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
