"""When a process is given up and started again, without a process and without a clock."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.spawn import beat
from reflex_runtime.pacing import Restarts


def restarts(**given: Any) -> Restarts:
    defaults: dict[str, Any] = {"first": 0.2, "longest": 10.0, "steady": 30.0, "most": 5, "rest": 60.0}
    return Restarts(**{**defaults, "jitter": lambda: 0.0, **given})


def test_g14_each_failure_in_a_row_doubles_the_wait_up_to_the_longest() -> None:
    one = restarts(most=100)
    waits = []
    for _ in range(8):
        one.failed()
        waits.append(one.wait())
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


def test_g14_a_thousand_failures_are_no_overflow() -> None:
    one = restarts(most=2000, first=1e-3)
    for _ in range(1500):
        one.failed()
    assert one.wait() == 10.0


def test_g14_a_short_life_is_a_failure_and_a_steady_one_starts_anew() -> None:
    one = restarts(most=100)
    for lived, wait in ((29.9, 0.2), (29.9, 0.4), (30.0, 0.2), (1e9, 0.2), (0.0, 0.2), (0.0, 0.4)):
        one.lived(lived)
        assert one.wait() == pytest.approx(wait), lived


def test_g14_jitter_shortens_a_wait_by_up_to_half_and_never_the_rest() -> None:
    given = [0.0, 0.5, 1.0]
    one = restarts(jitter=lambda: given.pop(0), most=3)
    one.failed()
    assert [one.wait() for _ in range(3)] == pytest.approx([0.2, 0.15, 0.1])
    one.failed()
    one.failed()
    assert one.wait() == 60.0  # and the jitter was not asked


def test_g14_the_breaker_opens_after_the_most_failures_and_a_steady_trial_closes_it() -> None:
    one = restarts(most=3)
    for kind in (one.failed, lambda: one.lived(5.0)):
        kind()
        assert not one.open
    one.failed()
    assert one.open
    assert one.wait() == 60.0
    one.failed()  # the trial
    assert one.open
    assert one.wait() == 60.0
    one.lived(2.0)  # a trial that became ready and did not stay
    assert one.open
    one.lived(31.0)
    assert not one.open
    assert one.wait() == pytest.approx(0.2)


class Silence:
    """A peer at whose end nobody may be. answers: whether it has answered, at each look; late: seconds by which a look
    comes late. waits: between looks. given_up: whether it was."""

    def __init__(self, answers: list[bool], late: list[float] | None = None) -> None:
        self.answers, self.late, self.waits, self.given_up = list(answers), list(late or []), list[float](), False
        self.now, self._asked = 100.0, list[asyncio.Future[Any]]()

    def call(self, method: str, params: Any) -> asyncio.Future[Any]:
        self._asked.append(asyncio.get_running_loop().create_future())
        return self._asked[-1]

    def abort(self, error: Exception) -> None:
        self.given_up = True

    async def sleep(self, seconds: float) -> None:
        if not self.answers:
            raise asyncio.CancelledError
        self.waits.append(round(seconds, 6))
        self.now += seconds + (self.late.pop(0) if self.late else 0.0)
        if self.answers.pop(0):
            self._asked[-1].set_exception(ReflexError("an answer, too"))

    def listens(self, every: float, limit: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], bool]:
        async def main() -> None:
            asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]
            monkeypatch.setattr(asyncio, "sleep", self.sleep)
            with contextlib.suppress(asyncio.CancelledError):
                await beat(self, every, limit)  # type: ignore[arg-type]

        asyncio.run(main())
        return self.waits, self.given_up


def test_g14_who_answers_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Silence([True] * 9).listens(5, 20, monkeypatch) == ([5] * 9, False)


def test_g14_who_answers_nothing_is_given_up_at_the_limit_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Silence([True, *[False] * 9]).listens(5, 12, monkeypatch) == ([5, 5, 5, 2], True)
    waits, given_up = Silence([False] * 9).listens(0.1, 0.3, monkeypatch)
    assert (sum(waits), given_up) == (pytest.approx(0.3), True)  # whatever floats add up to


def test_g14_an_answer_starts_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True, *[False] * 9]
    assert Silence(answers).listens(5, 12, monkeypatch) == ([5, 5, 2, 5, 5, 2], True)


@pytest.mark.parametrize(
    ("limit", "late", "waits"),
    [(5, [5.1], [5, 5]), (5, [4.9], [5]), (10.001, [0.1, 0.1, 0.1], [5, 5, 0.001])],  # a little is usual
)
def test_g14_the_time_that_this_process_stood_still_is_not_counted(
    limit: float, late: list[float], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Silence([False] * 9, late).listens(5, limit, monkeypatch) == (waits, True)
