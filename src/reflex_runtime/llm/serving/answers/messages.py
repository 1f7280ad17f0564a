"""Answers and errors of POST /v1/messages, in the shapes that clients of the Anthropic API expect."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.llm.engine.tools import ToolCall
from reflex_runtime.llm.serving.answers.errors import told
from reflex_runtime.llm.serving.answers.part_writer import Kind, PartWriter
from reflex_runtime.llm.serving.answers.replies import Answering
from reflex_runtime.web.form import JSON, ErrorForm, Refusal
from reflex_runtime.web.json import encode

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DELTAS: Final = {"thought": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class MessageAnswer(PartWriter):
    """The answer to one request. See `Writer`."""

    def __init__(self, reply: Answering) -> None:
        super().__init__(reply)
        self.id = f"msg_{reply.id}"
        self._content: list[dict[str, Any]] = []

    def end(self) -> bytes:
        about = {"stop_reason": self._reason(), "stop_sequence": self._stopped}
        ended = self._event("message_delta", delta=about, usage=self._usage())
        return ended + self._event("message_stop")

    def failed(self, error: ReflexError) -> bytes:
        return b"event: error\ndata: " + _error(error, self._reply.id) + b"\n\n"

    def whole(self) -> bytes:
        return encode(self._message(self._content, self._reason()))

    def _message(self, content: list[Any], reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": self._stopped,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Tokens of the prompt that were computed, that the cache had, and of the answer."""
        usage = self._reply.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }

    def _reason(self) -> str | None:
        if self._finish == "length":
            return "max_tokens"
        if self._reader.called:
            return "tool_use"
        return "stop_sequence" if self._stopped is not None else "end_turn"

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        return self._event("message_start", message=self._message([], None))

    def _opened(self, kind: Kind) -> bytes:
        return self._event("content_block_start", index=len(self._content), content_block=_block(kind, ""))

    def _said(self, kind: Kind, text: str) -> bytes:
        type, name = _DELTAS[kind]
        return self._event("content_block_delta", index=len(self._content), delta={"type": type, name: text})

    def _closed(self, kind: Kind, text: str) -> bytes:
        return self._add(_block(kind, text))

    def _called(self, call: ToolCall) -> bytes:
        block, index = {"type": "tool_use", "id": call.id, "name": call.name}, len(self._content)
        begun = self._event("content_block_start", index=index, content_block={**block, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        said = self._event("content_block_delta", index=index, delta=delta)
        return begun + said + self._add({**block, "input": msgspec.Raw(call.arguments.encode())})

    def _add(self, block: dict[str, Any]) -> bytes:
        self._content.append(block)
        return self._event("content_block_stop", index=len(self._content) - 1)


def _block(kind: Kind, text: str) -> dict[str, Any]:
    """signature: of a thought; there is none that could be checked."""
    return {"type": "text", "text": text} if kind == "text" else {"type": "thinking", "thinking": text, "signature": ""}


def _error(error: ReflexError, request_id: str) -> bytes:
    found = told(error)
    kind = _TYPES.get(found.status, "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": found.message}, "request_id": request_id})


def _refuse(error: ReflexError, request_id: str, packed: bool) -> Refusal:
    retry = (b"x-should-retry", b"true" if error.retry_safe else b"false")
    return Refusal(told(error).status, _error(error, request_id), JSON, [retry])


FORM: Final = ErrorForm(_refuse, keeps_id=True)
