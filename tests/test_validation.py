"""Ranges that stand at the fields of a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import again, flag, headed, option, seconds, validate, whole


@dataclass(frozen=True)
class Base:
    port: int = option(80, "the port", (0, 99), group="listening")
    size: int = option(1, "a size", (1, 9))


@dataclass(frozen=True)
class Both(Base):
    name: str = option("", "a name", group="first")
    size: int = again(Base, "size", 5, group="listening")
    wait: float | None = option(None, "a time", (0, 60, "seconds"), above=True, group="last")


def test_a_value_outside_its_range_or_of_another_type_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"size": 10}, r"Both\.size=10: must be in \[1, 9\]"),
        ({"size": True}, r"Both\.size=True: must be a whole number in \[1, 9\]"),
        ({"size": 2.0}, r"Both\.size=2\.0: must be a whole number in"),
        ({"wait": 0.0}, r"Both\.wait=0\.0: must be in \(0, 60\] seconds"),
        ({"wait": float("nan")}, r"Both\.wait=nan: must be in"),
        ({"wait": "soon"}, r"Both\.wait='soon': must be a number in"),
        ({"port": None}, r"Both\.port=None: must be a whole number"),
    ]
    for given, says in cases:
        with pytest.raises(ConfigError, match=says):
            validate(Both(**given), "Both")


def test_what_is_none_by_default_may_be_none() -> None:
    validate(Both(), "Both")
    validate(Both(wait=60), "Both")


def test_headings_stand_in_the_order_of_the_class_itself() -> None:
    found = {heading: [flag(f.name) for f in options] for heading, options in headed(Both).items()}
    assert found == {"first": ["--name"], "listening": ["--port", "--size"], "last": ["--wait"]}
    assert list(found) == ["first", "listening", "last"]
    assert Both().size == 5


def test_a_whole_number_of_a_flag() -> None:
    assert whole("--n", "7", 1, 9) == 7
    for text, high in (("x", 9), ("0", 9), ("10", 9), ("1.5", 9)):
        with pytest.raises(ConfigError, match=rf"--n={text}: must be a whole number in \[1, 9\]"):
            whole("--n", text, 1, high)
    with pytest.raises(ConfigError, match="--n=0: must be a whole number >= 1"):
        whole("--n", "0", 1)


def test_seconds_of_a_text() -> None:
    assert [seconds(text, "ms", "s") for text in ("150ms", " 1.5s ", ".5s")] == [0.15, 1.5, 0.5]
    assert [seconds(text, "s", "m", "h") for text in ("90s", "10m", "1.5h")] == [90.0, 600.0, 5400.0]
    assert [seconds(text, "ms", "s") for text in ("", "150", "1h", "-1s", "1 s", "1.s", "nans", "1s,")] == [0.0] * 8
