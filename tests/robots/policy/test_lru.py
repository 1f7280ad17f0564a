"""What is kept of many callers is bounded, and those who come often stay."""

from __future__ import annotations

from reflex_runtime.robots.policy.episodes import Lru


def test_what_was_set_or_used_least_recently_is_forgotten() -> None:
    gone: list[str] = []
    table: Lru[int, str] = Lru(2, gone.append)
    table[1], table[2] = "one", "two"
    assert table.use(1, lambda: "another") == "one"
    assert table.use(3, lambda: "three") == "three"
    assert (dict(table), gone) == ({1: "one", 3: "three"}, ["two"])
    table[1] = "again"
    table[4] = "four"
    assert (dict(table), gone) == ({1: "again", 4: "four"}, ["two", "three"])
