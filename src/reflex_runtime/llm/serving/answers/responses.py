"""Answers of POST /v1/responses: a list of items, whole or as the events in which they come."""

from __future__ import annotations

import time
from typing import Any, Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.llm.engine.tools import ToolCall
from reflex_runtime.llm.serving.answers.errors import told
from reflex_runtime.llm.serving.answers.part_writer import Kind, PartWriter
from reflex_runtime.llm.serving.answers.replies import Answering
from reflex_runtime.web.json import encode

_EVENTS: Final = {"thought": "response.reasoning_text", "text": "response.output_text"}


class ResponseAnswer(PartWriter):
    """The answer to one request. See `Writer`."""

    def __init__(self, reply: Answering) -> None:
        super().__init__(reply)
        self.id = f"resp_{reply.id}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._number = 0

    def end(self) -> bytes:
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status))

    def failed(self, error: ReflexError) -> bytes:
        found = told(error)
        return self._event("error", code=found.code, message=found.message, param=found.param)

    def whole(self) -> bytes:
        return encode(self._response(self._status()))

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        begun = status == "in_progress"
        asked = self._reply.asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": asked.model,
            "output": [] if begun else self._items,
            "usage": None if begun else self._usage(),
            **asked.said,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reply.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": usage.total_tokens,
        }

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _opened(self, kind: Kind) -> bytes:
        item = self._item(kind, "in_progress", [])
        begun = self._event("response.output_item.added", output_index=len(self._items), item=item)
        return begun + self._of_part("response.content_part.added", part=_part(kind, ""))

    def _said(self, kind: Kind, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        return self._of_part(f"{_EVENTS[kind]}.delta", delta=text, **more)

    def _closed(self, kind: Kind, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        done = self._of_part(f"{_EVENTS[kind]}.done", text=text, **more)
        done += self._of_part("response.content_part.done", part=_part(kind, text))
        cut = kind == "text" and self._finish == "length"
        return done + self._add(self._item(kind, "incomplete" if cut else "completed", [_part(kind, text)]))

    def _called(self, call: ToolCall) -> bytes:
        index, id = len(self._items), f"fc_{self._reply.id}_{len(self._items)}"
        item = {"id": id, "type": "function_call", "call_id": call.id, "name": call.name}
        of = {"item_id": id, "output_index": index}
        begun = self._event(
            "response.output_item.added", output_index=index, item=item | {"arguments": "", "status": "in_progress"}
        )
        name = "response.function_call_arguments"
        said = self._event(f"{name}.delta", **of, delta=call.arguments)
        said += self._event(f"{name}.done", **of, name=call.name, arguments=call.arguments)
        return begun + said + self._add(item | {"arguments": call.arguments, "status": "completed"})

    def _add(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _id(self) -> str:
        return f"item_{self._reply.id}_{len(self._items)}"

    def _item(self, kind: Kind, status: str, content: list[Any]) -> dict[str, Any]:
        if kind == "thought":
            return {"id": self._id(), "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self._id(), "type": "message", "role": "assistant", "content": content, "status": status}

    def _of_part(self, type: str, **fields: Any) -> bytes:
        return self._event(type, item_id=self._id(), output_index=len(self._items), content_index=0, **fields)

    def _event(self, type: str, **fields: Any) -> bytes:
        self._number += 1
        return super()._event(type, sequence_number=self._number - 1, **fields)


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
