"""What schemathesis cannot know of our schemas: pictures, and that a deadline may pass on a busy machine."""

from __future__ import annotations

import base64
import io
from typing import Any

import PIL.Image
import schemathesis
from hypothesis import strategies as st


def _picture(width: int, height: int, form: str) -> str:
    data = io.BytesIO()
    PIL.Image.new("RGB", (width, height), "teal").save(data, form)
    return base64.b64encode(data.getvalue()).decode()


_PICTURES = [_picture(6, 4, "PNG"), _picture(64, 48, "JPEG")]
schemathesis.openapi.format("image", st.sampled_from([*_PICTURES, f"data:image/png;base64,{_PICTURES[0]}"]))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """What JSON Schema cannot say of fields together, and work in proportion; what is wrong by itself stays wrong.

    Deadlines are far away: a 504 is no fault, and when it comes depends on the machine. A choice has few tokens.
    """
    body = case.body
    if not isinstance(body, dict):
        return
    limit = body.get("deadline_ms")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < 60_000:
        body["deadline_ms"] = 60_000
    _few(body, "n", 128, 1 if isinstance(body.get("prompt"), list) else 2)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        _few(body, name, 8191, 3)
        if _given(case, name) and body.get(name) is None:
            body[name] = 3
    if isinstance(body.get("min_tokens"), int | float) and body["min_tokens"] <= 8191:
        body["min_tokens"] = min(1, body["min_tokens"])
    if body.get("max_tokens") == 0 and "prompt" in body:
        body["echo"] = True
    for name in {"response_format", "structured_outputs"} & body.keys():
        body[name] = _form(body[name])
    if body.get("structured_outputs") is not None and body.get("response_format") is not None:
        body["response_format"] = None
    if body.get("structured_outputs") is not None and isinstance(body.get("text"), dict):
        body["text"].pop("format", None)
    if isinstance(messages := body.get("messages"), list) and 100 < len(messages) <= 10_000:
        body["messages"] = messages[:3]  # all of them are more than the model's context holds
    if isinstance(items := body.get("input"), list) and 100 < len(items) <= 10_000:
        body["input"] = items[:3]
    for message in messages if isinstance(messages, list) else ():
        for call in _list(message, "tool_calls"):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = "{}"  # JSON inside of a text
    for name in ("prompt", "tokens", "input", "stop_token_ids"):
        if isinstance(body.get(name), list):
            body[name] = _plain(body[name])
    if _within(body.get("best_of"), 128):
        body["best_of"] = body["n"] if _within(body.get("n"), 128) else 1
    if isinstance(body.get("stream_options"), dict) and body.get("stream") in (None, False):
        body["stream"] = True
    if body.get("prompt_logprobs") is not None and body.get("stream") is True:
        body["stream"] = None
        body.pop("stream_options", None)
    if isinstance(body.get("top_logprobs"), int | float) and body.get("logprobs") in (None, False):
        body["logprobs"] = True


def _given(case: Any, name: str) -> bool:
    """Whether the endpoint has the field, and has no small default of its own."""
    return {
        "/v1/chat/completions": name != "max_output_tokens", "/v1/responses": name == "max_output_tokens"
    }.get(case.path, False)  # fmt: skip


def _list(value: Any, name: str) -> list[Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _form(said: Any) -> Any:
    """A schema, an expression or a grammar in place of one that is none; whatever is wrong besides stays."""
    if isinstance(said, dict) and isinstance(said.get("json_schema"), dict):
        schema = said["json_schema"]
        return said | {"json_schema": schema | ({"schema": {}} if isinstance(schema.get("schema"), dict) else {})}
    if not isinstance(said, dict):
        return said
    plain = {"json": (dict, {}), "regex": (str, "[a-z]+"), "grammar": (str, 'start: "yes"')}
    return said | {name: to for name, (of, to) in plain.items() if isinstance(said.get(name), of) and said[name] != ""}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _within(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= most


def _few(body: dict[str, Any], name: str, most: int, few: int) -> None:
    if _within(body.get(name), most) and float(body[name]).is_integer():
        body[name] = few
