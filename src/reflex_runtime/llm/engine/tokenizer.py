"""From text to token ids: the interface of tokenizers, the tokenizer of a model directory, and threads for long texts.

The library `tokenizers` normalises and merges; chat templates are Jinja programs of the model, run in a sandbox. Both
libraries are imported only when a directory is loaded.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from reflex_runtime.core.errors import ConfigError, TooLarge
from reflex_runtime.extras import needed_by
from reflex_runtime.ipc.messages import Constraint
from reflex_runtime.llm.engine.chat_template import SETTINGS_FILE, TEMPLATE_FILE, ChatTemplate
from reflex_runtime.llm.engine.detokenizer import CoreDetokenizer, Detokenizer
from reflex_runtime.llm.engine.output_parsers import ANSWER, MARKS, THOUGHT, TRIED, ToolForm, form_of
from reflex_runtime.llm.runners.checkpoint import CONFIG_FILE, GENERATION_FILE, token_ids
from reflex_runtime.run.model_files import JsonObject, read_file, read_object
from reflex_runtime.run.processor import WALL, Panic

TOKENIZER_FILE: Final = "tokenizer.json"
_LIKELY: Final = 8  # characters per token; a text with more for each token that is allowed hardly ever fits
_PIECE: Final = 4096  # characters that are at least tokenised at once to count tokens
_TAIL: Final = 16  # tokens at the end of a prompt in which a thought may begin
_PER_CUT: Final = 64  # most tokens that a cut through a text may add
_HELLO: Final = {"role": "user", "content": "Hello"}
_MARK: Final = re.compile(r"[<\[]\S{1,99}[>\]]")
_LAST_MARK: Final = re.compile(r"([<\[][^<\[\s]{1,99}[>\]])\s*$")
_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
TRIAL_S: Final = 5.0  # seconds for the trial with a few words, on a very busy machine
MOST_GROWTH: Final = 64  # most characters that a normaliser or decoder may make of one
_NO_TEMPLATE: Final = f"the model has no chat template in {SETTINGS_FILE} (chat_template) or {TEMPLATE_FILE}"
log = logging.getLogger("reflex.server")
T = TypeVar("T")
LONG_TEXT = 2000  # characters; longer texts are tokenised in a thread
MESSAGE = 20  # characters that each field of a message counts in addition, for the template's work


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template. tools: functions that the model may call, in the form of the OpenAI API. more:
    further variables of this template, such as `enable_thinking`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


class Tokenizer(Detokenizer, Protocol):
    """Ids run from 0 to vocab_size - 1; any of eos_token_ids ends an answer. tool_format: the form of the model's
    calls, None if it calls no tools. reasons: whether its template marks thoughts. thought: these marks. takes_effort:
    whether the template uses `reasoning_effort`."""

    eos_token_ids: frozenset[int]
    vocab_size: int
    tool_format: ToolForm | None
    reasons: bool
    thought: tuple[str, str] = THOUGHT, ANSWER
    takes_effort: bool = False

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """The ids of a prompt, with the token that begins a text if the model has one.

        most: raise TooLarge, before the whole text is tokenised, if it certainly has more tokens.
        """

    def chat(self, conversation: Conversation, most: int | None = None) -> list[int]:
        """The ids of a conversation and the beginning of the answer. Raises ConfigError if the model has no template.
        most: see `encode`."""

    def split(self, text: str) -> list[int]:
        """The ids of a text in the middle of another."""

    def vocabulary(self) -> Any:
        """All tokens as an `llguidance.LLTokenizer`, for output of a given form. Raises ConfigError if the model has no
        end token."""
        import llguidance

        ends = sorted(self.eos_token_ids)
        if not ends:
            raise ConfigError("the model's tokenizer has no end token, so no output can have a given form")
        own = _Vocabulary(self, ends)
        known = llguidance.TokenizerWrapper(own)
        found = llguidance.LLTokenizer(known, eos_token=ends)
        known.tokens = own.tokens = []  # it has copied them
        return found


def in_thought(tokenizer: Tokenizer, prompt: Seq[int]) -> bool:
    """Whether the prompt ends with the beginning of a thought."""
    return "".join(map(tokenizer.token, prompt[-_TAIL:])).rstrip().endswith(tokenizer.thought[0])


class HFTokenizer(CoreDetokenizer, Tokenizer):
    """The tokenizer of a Hugging Face model directory. One may serve many threads."""

    def __init__(
        self, core: Any, file: Path, settings: Mapping[str, Any], template: ChatTemplate | None, eos: frozenset[int]
    ) -> None:
        """core: a `tokenizers.Tokenizer`. Use `load`."""
        super().__init__(core)
        self._file, self._template = file, template
        self.tool_format: ToolForm | None = None  # set by `_try_tools`
        self._in_parts: frozenset[str] = frozenset()  # roles whose content may have parts
        self._arguments_as_text = False  # of calls in a conversation: some templates write no JSON of them
        source = "" if template is None else template.source
        self.reasons, self.takes_effort = ANSWER in source, "reasoning_effort" in source
        self._special = {key: text for key in _SPECIAL if (text := _text(settings.get(key))) is not None}
        self._bos = core.token_to_id(self._special["bos_token"]) if "bos_token" in self._special else None
        self._add_bos: bool | None = settings.get("add_bos_token")
        ending = core.token_to_id(self._special["eos_token"]) if "eos_token" in self._special else None
        self.eos_token_ids = eos | ({ending} if ending is not None else frozenset())
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, directory: Path | str, quiet: bool = False) -> HFTokenizer:
        """Read tokenizer.json and the files beside it, and try them out. Raises ConfigError that names a missing or
        wrong file. quiet: do not log why messages or tools are refused."""
        root = Path(directory)
        settings = _optional(root / SETTINGS_FILE)
        flag = settings.get("add_bos_token")
        if flag is not None and type(flag) is not bool:
            JsonObject(root / SETTINGS_FILE, settings).wrong("add_bos_token", "true or false")
        eos: frozenset[int] = frozenset()
        for name in (CONFIG_FILE, GENERATION_FILE):  # the second wins
            eos = token_ids(JsonObject(root / name, _optional(root / name)), "eos_token_id") or eos
        core = _read_core(root / TOKENIZER_FILE)
        tokenizer = cls(core, root / TOKENIZER_FILE, settings, ChatTemplate.read(root, settings), eos)
        if (why := tokenizer._try_out()) and not quiet:
            log.info("%s: %s", root, why)
        return tokenizer

    def _try_out(self) -> str:
        """Try the tokenizer and the template; returns what the model does not take, or "". Raises ConfigError if the
        tokenizer cannot read a few words, or either takes too long."""
        failed, whys = list[ConfigError](), [f"messages are refused: {_NO_TEMPLATE}"]

        def run() -> None:
            try:
                self._encode("Hello world! 1234\n" + "a" * 64 + " " * 64 + "\u00e4\u4e2d" * 32, special=True)
            except ConfigError as error:
                failed.append(error)
                return
            except Exception:  # the tokenizer may not know these characters
                pass
            if self._template is not None:
                with suppress(SystemExit):
                    with suppress(Exception):  # a template may need a system prompt, or refuse one
                        self.chat(Conversation([_HELLO]))
                    self._try_parts()
                    with suppress(Exception):
                        self._try_thoughts()
                    why = self._try_tools()
                    whys[0] = why and f"tools are refused: {why}"

        thread = threading.Thread(target=run, name="reflex-try-tokenizer", daemon=True)
        thread.start()
        thread.join(TRIAL_S)
        if failed:
            raise ConfigError(f"{self._file}: of a short text: {failed[0].message}")
        if thread.is_alive():
            stop = ctypes.pythonapi.PyThreadState_SetAsyncExc  # it ends a template, but not a regular expression
            stop(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            raise ConfigError(
                f"{self._file.parent}: its tokenizer or chat template takes over {TRIAL_S:g} s for one short message; "
                f"look for loops in the template, and for nested repetitions in the patterns of {TOKENIZER_FILE}"
            )
        return whys[0]

    def _try_parts(self) -> None:
        """Find the roles for which the template writes content in parts as it would write their text."""
        parts = [{"type": "text", "text": text} for text in ("one", "two")]
        around: dict[str, tuple[list[Any], list[Any]]] = {"user": ([], []), "system": ([], [_HELLO])}
        for role, (before, after) in (around | {"assistant": ([_HELLO], [_HELLO])}).items():
            known, written = self._in_parts, list[str]()
            self._in_parts = known | {role}
            with suppress(Exception):  # a template is a program of the model's author
                for content in (parts, "onetwo", "one\ntwo", "one two"):
                    written.append(self._written(Conversation([*before, {"role": role, "content": content}, *after])))
            if not (written and written[0] in written[1:]):
                self._in_parts = known

    def _try_thoughts(self) -> None:
        """Find the marks that the template writes before and after a thought; marks have no spaces."""
        if self.reasons:  # most templates use the usual marks
            return
        said = {"role": "assistant", "content": "1answer1"} | dict.fromkeys(("reasoning_content", "thinking"), "1why1")
        begun = self._written(Conversation([_HELLO]))
        text = self._written(Conversation([_HELLO, said]), begin_answer=False)
        behind, why, rest = (text if text.startswith(begun) else "").partition("1why1")
        close, answer, _ = rest.partition("1answer1")
        last = _LAST_MARK.search(begun)  # where the prompt begins a thought
        marks = behind[len(begun) :].strip() or (last[1] if last else ""), close.strip()
        if not (why and answer and all(map(_MARK.fullmatch, marks))):
            return
        self.reasons, self.thought = True, marks
        for id, hidden in self._added.items():  # the marks become text, because parsers read them
            if hidden and id not in self.eos_token_ids and self.token(id) in "".join(marks):
                self._added[id] = False
        self._pieces.clear()

    def _try_tools(self) -> str:
        """Set the form in which the template writes calls; returns why it has none, or ""."""
        function = {"name": TRIED.name, "description": "Try", "parameters": TRIED.parameters}
        shown = [{"type": "function", "function": function}]
        special = sorted((self.token(id) for id, hidden in self._added.items() if hidden), key=len, reverse=True)

        def written(calls: list[dict[str, Any]]) -> str:
            """What the template writes for these calls, without the conversation before, and as a parser gets it."""
            made = [{"id": f"reflex{i:03}", "type": "function", "function": call} for i, call in enumerate(calls)]
            said = {"role": "assistant", "content": "", "tool_calls": made}
            text = self._written(Conversation([_HELLO, said], shown), begin_answer=False)
            text = text[next((len(before) for before in (begun, asked) if text.startswith(before)), 0) :]
            for token in special:
                text = text.replace(token, "")
            return text

        whys, failed = list[str](), dict[bool, str]()
        for self._arguments_as_text in (False, True):
            try:
                begun, asked = (self._written(Conversation([_HELLO], shown), begin) for begin in (True, False))
                found, call = form_of(written), written([{"name": TRIED.name, "arguments": {"text": "x"}}])
                if TRIED.name in begun and found is not None:
                    self.tool_format = found
                    return ""
                how = f"writes a call as {call[:200]!r}, a form that is not known here"
                how = how if TRIED.name in call else "leaves calls out of a conversation"
                whys.append(how if TRIED.name in begun else "does not show them to the model")
            except Exception as error:  # a template is a program of the model's author
                failed[self._arguments_as_text] = f"does not write a call: {error}"
        self._arguments_as_text = [*failed] == [False]
        return f"the chat template {[*whys, *failed.values()][0]}"

    def encode(self, text: str, most: int | None = None) -> list[int]:
        self._check_length(text, most)
        ids = self._encode(text, special=self._add_bos is not False)
        if self._add_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def chat(self, conversation: Conversation, most: int | None = None) -> list[int]:
        text = self._written(conversation)
        self._check_length(text, most)
        return self._encode(text, special=False)  # a template writes its own special tokens

    def _written(self, conversation: Conversation, begin_answer: bool = True) -> str:
        if self._template is None:
            raise ConfigError(f"{self._file.parent}: {_NO_TEMPLATE}; /v1/completions takes a prompt")
        given: dict[str, Any] = {**conversation.more, **self._special}
        if conversation.tools:
            given["tools"] = conversation.tools
        known = self._in_parts, self._arguments_as_text
        try:
            given["messages"] = [_message(i, message, *known) for i, message in enumerate(conversation.messages)]
            return self._template.render(given, begin_answer)
        except ConfigError:
            raise
        except Exception as error:  # a template is a program of the model's author
            raise ConfigError(f"{self._file.parent}: chat template: {type(error).__name__}: {error}") from error

    def vocabulary(self) -> Any:
        found = super().vocabulary()
        self._pieces.clear()  # of all tokens, which take 20 MB
        return found

    def split(self, text: str) -> list[int]:
        """See `Tokenizer.split`. If the tokenizer adds a space to the first word of a text, the text is encoded after a
        line end, which is dropped again."""
        marks = sorted((text.index(mark), mark) for mark in MARKS if mark in text and self._core.token_to_id(mark))
        if marks:
            before, mark, after = text.partition(marks[0][1])
            return [*self.split(before), self._core.token_to_id(mark), *self.split(after)]
        for line in ("", "\n"):
            ids, at, data = self._encode(line + text, special=False), 0, text.encode()
            pieces = [self.piece(id) for id in ids]
            while at < len(ids) and sum(map(len, pieces[at:])) > len(data):
                at += 1
            if b"".join(pieces[at:]) == data:
                return ids[at:]
        return [id for character in text for id in self.split(character)] if len(text) > 1 else []

    def _check_length(self, text: str, most: int | None) -> None:
        """Raise TooLarge if pieces of the text have too many tokens, without those that cuts may have added."""
        if most is None or len(text) <= _LIKELY * most:
            return
        piece = max(_PIECE, _LIKELY * most)
        counted = 0
        for at in range(0, len(text), piece):
            counted += len(self._encode(text[at : at + piece], special=False)) - _PER_CUT
            if counted > most:
                raise TooLarge(f"the model's context holds {most} tokens, and the prompt has more", max_model_len=most)

    def _encode(self, text: str, special: bool) -> list[int]:
        # as a batch of one, because only that call releases the GIL and does not compute offsets
        try:
            with WALL:
                ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except Panic as panic:
            raise ConfigError(f"the tokenizer cannot read this text: {panic}") from None
        return ids


class _Vocabulary:
    """All tokens with the bytes that they add to a text, in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, ends: Seq[int]) -> None:
        self.eos_token_id, self._split = ends[0], tokenizer.split
        pieces = [(tokenizer.piece(id), tokenizer.token(id)) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = [id for id, (piece, name) in enumerate(pieces) if id in ends or (name and not piece)]
        special = frozenset(self.special_token_ids)
        self.tokens = [name.encode() if id in special else piece for id, (piece, name) in enumerate(pieces)]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(text)
        return self._split(text)


# -- reading -----------------------------------------------------------------------------------------------------------


def _optional(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _read_core(file: Path) -> Any:
    with needed_by(f"{file}:"):
        import tokenizers
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: not found, expected the directory of a model")
    if not file.is_file():
        how = "copy it, too, or write it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers"
        raise ConfigError(f"{file}: not found, expected the model's tokenizer; {how}")
    data = read_file(file)
    try:
        core = tokenizers.Tokenizer.from_buffer(data)
        if any(token.special and token.content in MARKS for token in core.get_added_tokens_decoder().values()):
            whole = json.loads(data)
            for token in whole["added_tokens"]:
                token["special"] &= token["content"] not in MARKS
            core = tokenizers.Tokenizer.from_str(json.dumps(whole))
    except Exception as error:  # the library raises bare Exception for a file it cannot use
        raise ConfigError(f"{file}: is not a tokenizer: {error}") from error
    for name in ("normalizer", "decoder"):
        part = getattr(core, name)
        if part is not None and _growth(json.loads(part.__getstate__())) > MOST_GROWTH:
            raise ConfigError(f"{file}: {name}: makes over {MOST_GROWTH} characters of one")
    core.no_truncation()  # a limit that was stored for training would cut prompts silently
    core.no_padding()
    return core


def _growth(part: Mapping[str, Any]) -> int:
    """Most characters that the replacements of a normaliser or decoder make of one."""
    if part.get("type") == "Sequence":
        return prod(map(_growth, part.get("normalizers") or part.get("decoders") or ()))
    return max(1, len(part.get("content", ""))) if part.get("type") == "Replace" else 1


def _message(place: int, message: Any, in_parts: frozenset[str], arguments_as_text: bool) -> dict[str, Any]:
    """The message for the template: its content as one text if the template takes no parts. Raises ConfigError."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or not role:
        raise ConfigError(f"messages[{place}].role={role!r}: must be a text such as 'user'")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) < len(content) or not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"messages[{place}].content: every part must be {{'type': 'text', 'text': …}}")
        content = content if role in in_parts else "\n".join(map(str, parts))
    if content is not None and not isinstance(content, str | list):
        raise ConfigError(f"messages[{place}].content: must be a text or a list of text parts")
    if arguments_as_text and message.get("tool_calls"):
        calls = [call | {"function": dict(call["function"])} for call in message["tool_calls"]]
        for call in calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        message = {**message, "tool_calls": calls}
    return {**message, "content": content}


def _text(value: Any) -> str | None:
    """A special token of a settings file: a text, or {"content": …} in older ones."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


class Texts:
    """Tokenises for one event loop. most: see `Tokenizer.encode`."""

    def __init__(self, tokenizer: Tokenizer, most: int | None = None) -> None:
        self.tokenizer, self.most = tokenizer, most
        self._beside = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reflex-tokenise")
        self._forms = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reflex-forms")

    async def encode(self, texts: Seq[str]) -> list[list[int]]:
        """The tokens of each text."""
        encode = partial(self.tokenizer.encode, most=self.most)
        length = sum(map(len, texts))
        return await self.run(length, lambda texts: [encode(text) for text in texts], texts)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation by the model's chat template. Raises ConfigError if it has none."""
        length = sum(MESSAGE + len(str(part)) for message in conversation.messages for part in message.values())
        length += sum(MESSAGE + len(str(part)) for part in (*conversation.tools, *conversation.more.values()))
        return await self.run(length, partial(self.tokenizer.chat, most=self.most), conversation)

    def close(self) -> None:
        """Drop texts and forms that wait for a thread."""
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._forms.shutdown(wait=False, cancel_futures=True)

    async def run(self, length: int, function: Callable[[Any], T], argument: Any) -> T:
        """The function's result for texts of `length` characters: computed in a thread, unless they are short."""
        if length <= LONG_TEXT:
            return function(argument)
        return await asyncio.get_running_loop().run_in_executor(self._beside, function, argument)

    async def compiled(self, function: Callable[[Constraint], T], constraint: Constraint) -> T:
        """The function's result for the form of an output. It can take seconds: texts have other threads."""
        return await asyncio.get_running_loop().run_in_executor(self._forms, function, constraint)
