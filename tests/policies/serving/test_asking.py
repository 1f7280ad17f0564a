"""The way of a request without HTTP: what a wire of its own calls, and what happens inside for it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from policies.tiny import HEIGHT, WIDTH, write_export
from reflex_runtime.core.errors import Expired, ReflexError
from reflex_runtime.core.request import Priority
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer, Array, Question
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.wire_names import ACT
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import CallerLeft, ClientError, InvalidRequest, TooManyRequests
from serving.exports import expected
from serving.harness import PATIENCE, STATE
from serving.in_process import Caller, with_app

Result = ActAnswer | ReflexError


class Robot:
    """One that asks in this process. results: what its requests were settled with."""

    def __init__(self, asking: Asking) -> None:
        self.asking = asking
        self.results: asyncio.Queue[Result] = asyncio.Queue()

    def begin(self, started: float | None = None) -> Ask:
        ask = Ask(ACT, "made-here", ("robot", 1), self.results.put_nowait, started)
        self.asking.enter(ask)
        return ask

    async def asks(self, question: Question) -> Result:
        self.asking.ask(self.begin(), question)
        return await self.settled()

    async def settled(self) -> Result:
        """The next result; each request has one."""
        found = await self.results.get()
        assert self.results.empty()
        return found


def _counted(runtime: PolicyRuntime, outcome: str) -> float:
    labels = f'outcome="{outcome}",policy_slot="prod",wire="act"}} '
    page = runtime.metrics.render().decode().splitlines()
    (line,) = [line for line in page if line.startswith("reflex_requests_total") and labels in line]
    return float(line.partition(labels)[2])


def test_a_question_is_answered_counted_and_recorded_without_http(tiny: Path, tmp_path: Path) -> None:
    sent = np.array(STATE, np.float64)
    packed = Array("<f8", [len(STATE)], sent.tobytes())

    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        for state in (STATE, sent, packed):
            answer = await robot.asks(Question(state=state, seed=7, request_id="mine", robot_id="arm-1"))
            assert isinstance(answer, ActAnswer)
            assert answer.request_id == "mine"
            np.testing.assert_allclose(answer.actions, expected(STATE, 7), atol=1e-5)
        answer = await robot.asks(Question(state=STATE, priority=Priority.URGENT))
        assert isinstance(answer, ActAnswer)
        assert answer.request_id == "made-here"
        assert _counted(runtime, "ok") == 4.0
        assert robot.asking.runtime.active == 0

    with_app(tiny, check, record=str(tmp_path), record_no_gzip=True)
    (file,) = tmp_path.iterdir()
    kept = [line for line in map(json.loads, file.read_text().splitlines()) if line["kind"] == "request"]
    assert [line["request"]["state"] for line in kept] == [STATE] * 4
    assert kept[0]["request"]["robot_id"] == "arm-1"


def test_what_is_wrong_with_a_question_is_said_when_it_is_made_or_settled_once(tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"deadline_ms=-1.0: must be in \(0, 600000\]"):
        Question(deadline_ms=-1.0)

    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        wrong = await robot.asks(Question(state=np.zeros((2, 2))))
        assert isinstance(wrong, InvalidRequest)
        assert "state: has shape [2, 2]" in wrong.message
        unread = robot.begin()
        robot.asking.fail(unread, ClientError("this is no frame"))
        robot.asking.ask(unread, Question(state=STATE))  # too late: it is settled
        assert isinstance(await robot.settled(), ClientError)
        broken = robot.begin()
        robot.asking.fail(broken, RuntimeError("secret"))
        hidden = await robot.settled()
        assert isinstance(hidden, ReflexError)
        assert (hidden.http_status, "secret" in hidden.message) == (500, False)
        assert _counted(runtime, "client_error") == 2.0
        assert _counted(runtime, "failed") == 1.0
        assert runtime.batcher.scheduler.unsettled("prod") == robot.asking.runtime.active == 0

    with_app(tiny, check)


def test_what_comes_in_one_turn_is_queued_together_and_a_wrong_one_alone_is_refused(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        for state in (STATE, [1.0], STATE, None, STATE):
            robot.asking.ask(robot.begin(), Question(state=state, seed=7))
        gone = robot.begin()
        robot.asking.ask(gone, Question(state=STATE))
        robot.asking.leave(gone)
        assert runtime.batcher.scheduler.unsettled("prod") == 0
        assert robot.results.empty()
        results = [await robot.results.get() for _ in range(6)]
        assert [type(result) for result in results[:3]] == [InvalidRequest, InvalidRequest, CallerLeft]
        for answer in results[3:]:
            assert isinstance(answer, ActAnswer)
            np.testing.assert_allclose(answer.actions, expected(STATE, 7), atol=1e-5)
        assert runtime.active == 0
        assert runtime.policies["default"].slots["prod"].version.users == 0

    with_app(tiny, check)


def test_one_that_cannot_be_told_its_end_does_not_touch_the_others_of_its_turn(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(result: Result) -> None:
        raise OSError("nobody is there")

    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        for state in ([1.0], STATE):  # refused, and answered
            broken = Ask(ACT, "broken", ("robot", 2), breaks)
            robot.asking.enter(broken)
            robot.asking.ask(broken, Question(state=state))
            robot.asking.ask(robot.begin(), Question(state=STATE))
        async with asyncio.timeout(PATIENCE):
            results = [await robot.results.get() for _ in range(2)]
        assert [type(result) for result in results] == [ActAnswer, ActAnswer]
        assert runtime.active == 0
        assert runtime.policies["default"].slots["prod"].version.users == 0

    with_app(tiny, check)
    assert caplog.text.count("request broken: its error could not be delivered") == 2


def test_one_that_leaves_because_another_of_its_turn_fails_is_not_queued(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        rows: list[Ask] = []
        wrong = Ask(ACT, "wrong", ("robot", 2), lambda result: [robot.asking.leave(row) for row in rows])
        robot.asking.enter(wrong)
        robot.asking.ask(wrong, Question(state=[1.0]))
        rows.append(robot.begin())
        robot.asking.ask(rows[0], Question(state=STATE))
        assert isinstance(await robot.settled(), CallerLeft)
        assert rows[0].ticket is None
        assert runtime.batcher.scheduler.snapshot()["admitted"] == runtime.active == 0

    with_app(tiny, check)


def test_one_that_cannot_be_made_of_its_decoded_pictures_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (WIDTH, HEIGHT)).save(file, "PNG")
    body = {"state": [0.0, 0.0], "instruction": "go", "image": base64.b64encode(file.getvalue()).decode()}

    async def check(app: App, runtime: PolicyRuntime) -> None:
        policy = runtime.policies["default"].slots["prod"].version.policy
        monkeypatch.setattr(type(policy), "request", lambda *given, **more: [][0])
        caller = Caller(app)
        caller.say(json.dumps(body).encode())
        async with asyncio.timeout(PATIENCE):
            assert (await caller.answer()).status == 500
        assert runtime.batcher.scheduler.unsettled("prod") == runtime.active == 0

    with_app(write_export(tmp_path / "export"), check)


def test_a_deadline_counts_from_when_the_request_arrived(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        robot.asking.ask(robot.begin(started=1e-9), Question(state=STATE, deadline_ms=1000.0))
        assert isinstance(await robot.settled(), Expired)

    with_app(tiny, check)


def test_a_caller_that_leaves_takes_its_request_back_before_or_after_it_is_queued(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        early = robot.begin()
        robot.asking.leave(early)
        robot.asking.ask(early, Question(state=STATE))
        assert isinstance(await robot.settled(), CallerLeft)
        running, waiting = robot.begin(), robot.begin()
        for ask in (running, waiting):
            robot.asking.ask(ask, Question(state=STATE))
        robot.asking.leave(waiting)
        results = [await robot.results.get() for _ in range(2)]
        assert [type(result) is ActAnswer for result in results].count(True) == 1
        assert _counted(runtime, "cancelled") == 2.0
        assert robot.asking.runtime.active == 0

    with_app(tiny, check, inject_latency_ms=100.0)


def test_all_wires_share_one_bound_and_one_end(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(Asking(runtime))
        first = robot.begin()
        second = robot.begin()
        assert isinstance(await robot.settled(), TooManyRequests)
        assert second.ended
        robot.asking.ask(first, Question(state=STATE))
        assert isinstance(await robot.settled(), ActAnswer)
        runtime.drain()
        robot.begin()
        late = await robot.settled()
        assert isinstance(late, ReflexError)
        assert late.code == "shutting_down"

    with_app(tiny, check, max_concurrent=1)
