"""Fields that several products have."""

from __future__ import annotations

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
    parts: list[_Part] | None = None
    names: dict[str, int] | None = None


def refused(body: bytes) -> msgspec.ValidationError:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=_Body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        (b'{"instuction": "x"}', "; did you mean instruction?"),
        (b'{"parts": [{}, {"roel": "user"}]}', "; did you mean role?"),
        (b'{"parts": [{"role": "sytem"}]}', "; must be one of user, system; did you mean system?"),
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


def test_x9_a_value_from_outside_is_shown_in_a_few_parts_however_large_it_is() -> None:
    """`str` of the last would make 2 to the 60th texts."""
    shared: list[object] = ["x"]
    for _ in range(60):
        shared = [shared, shared]
    for value in (list(range(10**6)), {"a": shared}, "x" * 10**6, memoryview(b"x" * 10**6), dict.fromkeys(range(99))):
        assert len(brief(value)) < 300
    for large in (b"x" * 10**6, bytearray(10**6), memoryview(b"x" * 10**6)):
        assert brief([large]) == f"[{bytes(large[:40])!r}]"
    assert brief("raw") == "'raw'"
    assert brief([1, 2]) == "[1, 2]"


def test_a_value_from_outside_is_shown_without_a_look_at_all_of_it() -> None:
    """Of a dictionary or set its parts would be sorted, and an array of objects printed whole."""

    class Part:
        seen = 0

        def __lt__(self, other: object) -> bool:
            Part.seen += 1
            return True

        def __repr__(self) -> str:
            Part.seen += 1
            return "x" * 100_000

    array = np.empty(300, object)
    array[:] = [Part() for _ in range(300)]
    shared = np.empty((), object)
    shared[()] = array
    parts = [Part() for _ in range(300)]
    told = {brief(value) for value in (dict.fromkeys(parts), set(parts), frozenset(parts), array, shared)}
    assert {"<set of 300>", "<frozenset of 300>", "<ndarray of (300,)>", "<ndarray of ()>"} < told
    assert Part.seen < 30
    assert brief({"b": 1, "a": 2}) == "{'a': 2, 'b': 1}"
    assert brief({i: i for i in range(9, 0, -1)}) == "{6: 6, 7: 7, 8: 8, 9: 9, ...}"
    assert [brief(value) for value in (np.float32(1.5), None, {}, np.str_("a"))] == [
        "np.float32(1.5)",
        "None",
        "{}",
        "<str_ of ()>",
    ]
