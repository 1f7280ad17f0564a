"""Fields that several products have."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
import numpy as np
import pytest

from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.fields import brief, check_id, invalid_field, suggestion


@pytest.mark.parametrize("value", ["", "arm 1", "a" * 256, "é" * 128, "\u2028"])
def test_h3_an_id_is_any_text_up_to_256_bytes(value: str) -> None:
    check_id("robot_id", value)


@pytest.mark.parametrize("value", ["a" * 257, "é" * 129, "a\x7f", "a\n", "é\x85", "\ud800"])
def test_h3_an_id_that_is_longer_or_holds_control_characters_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^robot_id: ") as caught:
        check_id("robot_id", value)
    assert caught.value.details["field"] == "robot_id"


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "system"] = "user"


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    instruction: str | None = None
    role: Literal["user", "system"] | None = None
    parts: list[_Part] | None = None
    names: dict[str, int] | None = None
    min_tokens: int = 0
    max_output_tokens: int = 0


def refused(body: bytes) -> msgspec.ValidationError:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=_Body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        (b'{"instuction": "x"}', "; did you mean instruction?"),
        (b'{"role": "sytem"}', "; must be one of user, system; did you mean system?"),
        (b'{"parts": [{}, {"roel": "user"}]}', "; did you mean role?"),
        (b'{"parts": [{"role": "sytem"}]}', "; must be one of user, system; did you mean system?"),
        (b'{"max_tokens": 1}', "; did you mean max_output_tokens?"),
        (b'{"min_token": 1}', "; did you mean min_tokens?"),
        (b'{"zzz": 1}', ""),
        (b'{"instruction": 1}', ""),
        (b'{"names": {"a": "b"}}', ""),
        (b'{"' + b"instruction" * 10_000 + b'": 1}', ""),  # a search for what is near would take seconds
    ],
)
def test_h3_an_unknown_field_or_value_is_told_the_nearest(body: bytes, meant: str) -> None:
    error = refused(body)
    assert suggestion(str(error), _Body) == meant
    assert invalid_field(error, _Body).message.endswith(meant)
    assert "did you mean" not in invalid_field(error).message


class _Needed(msgspec.Struct):
    max_tokens: int


@pytest.mark.parametrize("piece", [" - at `$", "unknown field `", "Invalid enum value '"])
def test_h3_a_long_name_that_looks_like_an_error_takes_no_time(piece: str) -> None:
    error = refused(msgspec.json.encode({f"{piece * 4000}\n": 1}))
    began = time.thread_time()
    assert len(invalid_field(error, _Body).message) == 300
    assert time.thread_time() - began < 1.0  # 3 to 30 seconds if patterns get all of it


def test_h3_a_missing_field_is_named_once() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b"{}", type=_Needed)
    assert invalid_field(caught.value, _Needed).message == "max_tokens: is missing"


def test_x9_a_value_from_outside_is_shown_in_a_few_letters_however_large_it_is() -> None:
    for value in ("x" * 10**6, b"x" * 10**6):
        assert brief(value) == repr(value[:80])
    for large in ([0] * 10**6, {"a": 1}, memoryview(b"x"), bytearray(9), np.zeros(9), 10**5000):
        assert brief(large) == f"<{type(large).__name__}>"
    assert [brief(value) for value in ("raw", None, 1, 1.5, True)] == ["'raw'", "None", "1", "1.5", "True"]
