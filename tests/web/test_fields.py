"""Fields that several products have."""

from __future__ import annotations

import pytest

from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.fields import check_id


@pytest.mark.parametrize("value", ["", "arm 1", "a" * 256, "é" * 128, "\u2028"])
def test_h3_an_id_is_any_text_up_to_256_bytes(value: str) -> None:
    check_id("robot_id", value)


@pytest.mark.parametrize("value", ["a" * 257, "é" * 129, "a\x7f", "a\n", "é\x85", "\ud800"])
def test_h3_an_id_that_is_longer_or_holds_control_characters_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^robot_id: ") as caught:
        check_id("robot_id", value)
    assert caught.value.details["field"] == "robot_id"
