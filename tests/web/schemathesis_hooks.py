"""What schemathesis cannot know of our schemas: pictures, work in proportion, and that a deadline may pass."""

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
    """A choice has few tokens. Deadlines are far away: a 504 is no fault, and when it comes depends on the machine."""
    body = case.body
    if not isinstance(body, dict):
        return
    limit = body.get("deadline_ms")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < 60_000:
        body["deadline_ms"] = 60_000
    for name, few in {"n": 2, "max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3}.items():
        value = body.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > few and float(value).is_integer():
            body[name] = few
    limit_of = {"/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}.get(case.path)
    if limit_of is not None and body.get(limit_of) is None and body.get("max_tokens") is None:
        body[limit_of] = 3
