"""The way of a request without HTTP: what a wire of its own calls, and what happens inside for it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from reflex_runtime.core.errors import Closed, Expired, ReflexError
from reflex_runtime.robots.serving.handler import PendingRequest, RequestHandler
from reflex_runtime.robots.serving.question import ACT, ActAnswer, Array, Question
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import ClientError, InvalidRequest, Reported, TooManyRequests
from robots.tiny import HEIGHT, WIDTH, write_export
from serving.exports import expected
from serving.harness import PATIENCE, STATE
from serving.in_process import Caller, with_app


class Robot:
    """One that asks in this process."""

    def __init__(self, runtime: PolicyRuntime) -> None:
        self.handler = RequestHandler(runtime)

    async def asks(self, question: Question, started: float | None = None) -> ActAnswer:
        pending = PendingRequest(ACT, "made-here", ("robot", 1), started)
        with self.handler.admit(pending):
            return await self.handler.infer(pending, question)

    def begins(self, question: Question) -> asyncio.Task[ActAnswer]:
        return asyncio.ensure_future(self.asks(question))


def _counted(runtime: PolicyRuntime, outcome: str) -> float:
    labels = f'outcome="{outcome}",policy_slot="prod",wire="act"}} '
    page = runtime.metrics.render().decode().splitlines()
    (line,) = [line for line in page if line.startswith("reflex_requests_total") and labels in line]
    return float(line.partition(labels)[2])


def _nothing_is_left(runtime: PolicyRuntime) -> bool:
    users = runtime.policies["default"].slots["prod"].version.users
    return (runtime.active, users, runtime.batcher.scheduler.unsettled("prod")) == (0, 0, 0)


def test_a_question_is_answered_counted_and_recorded_without_http(tiny: Path, tmp_path: Path) -> None:
    sent = np.array(STATE, np.float64)
    packed = Array("<f8", [len(STATE)], sent.tobytes())

    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(runtime)
        for state in (STATE, sent, packed):
            answer = await robot.asks(Question(state=state, seed=7, request_id="mine", robot_id="arm-1"))
            assert answer.request_id == "mine"
            np.testing.assert_allclose(answer.actions, expected(STATE, 7), atol=1e-5)
        answer = await robot.asks(Question(state=STATE, priority="urgent"))
        assert answer.request_id == "made-here"
        assert _counted(runtime, "ok") == 4.0
        assert _nothing_is_left(runtime)

    with_app(tiny, check, record=str(tmp_path), record_no_gzip=True)
    (file,) = tmp_path.iterdir()
    kept = [line for line in map(json.loads, file.read_text().splitlines()) if line["kind"] == "request"]
    assert [line["request"]["state"] for line in kept] == [STATE] * 4
    assert kept[0]["request"]["robot_id"] == "arm-1"


def test_what_is_wrong_with_a_question_is_said_when_it_is_made_or_asked(tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"deadline_ms=-1.0: must be in \(0, 600000\]"):
        Question(deadline_ms=-1.0)

    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(runtime)
        with pytest.raises(InvalidRequest, match=r"state: has shape \[2, 2\]"):
            await robot.asks(Question(state=np.zeros((2, 2))))
        unread = PendingRequest(ACT, "unread", "")
        with pytest.raises(ClientError), robot.handler.admit(unread):
            raise ClientError("this is no frame")
        broken = PendingRequest(ACT, "broken", "")
        with pytest.raises(ReflexError) as hidden, robot.handler.admit(broken):
            raise RuntimeError("secret")
        assert (hidden.value.http_status, "secret" in hidden.value.message) == (500, False)
        assert _counted(runtime, "client_error") == 2.0
        assert _counted(runtime, "failed") == 1.0
        assert _nothing_is_left(runtime)

    with_app(tiny, check)


def test_what_comes_in_one_turn_shares_a_batch_and_a_wrong_one_alone_is_refused(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(runtime)
        tasks = [robot.begins(Question(state=state, seed=7)) for state in (STATE, [1.0], STATE, None, STATE)]
        gone = robot.begins(Question(state=STATE))
        gone.cancel()
        assert runtime.batcher.scheduler.unsettled("prod") == 0
        results = await asyncio.gather(*tasks, gone, return_exceptions=True)
        assert [type(results[place]) for place in (1, 3, 5)] == [InvalidRequest, InvalidRequest, asyncio.CancelledError]
        answers = [result for result in results if isinstance(result, ActAnswer)]
        for answer in answers:
            np.testing.assert_allclose(answer.actions, expected(STATE, 7), atol=1e-5)
        assert {answer.batch["id"] for answer in answers} == {answers[0].batch["id"]}
        assert answers[0].batch["size"] == 3
        assert _nothing_is_left(runtime)

    with_app(tiny, check, brief_ms=0.0)


def test_rows_that_came_together_are_answered_together_or_not_at_all(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        handler = RequestHandler(runtime)

        async def asks(*states: Any) -> list[ActAnswer]:
            message = PendingRequest(ACT, "message", "robot")
            return await handler.infer_all(message, [Question(state=state, seed=7) for state in states])

        for answer in await asks(STATE, STATE):
            np.testing.assert_allclose(answer.actions, expected(STATE, 7), atol=1e-5)
        with pytest.raises(Reported) as wrong:
            await asks(STATE, [1.0], STATE)
        assert isinstance(wrong.value.error, InvalidRequest)
        assert wrong.value.request_id == "message.1"
        assert wrong.value.error.details["row"] == 1
        assert (_counted(runtime, "ok"), _counted(runtime, "client_error"), _counted(runtime, "cancelled")) == (2, 1, 2)
        assert runtime.active == 0

    with_app(tiny, check, inject_latency_ms=100.0)


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
        assert _nothing_is_left(runtime)

    with_app(write_export(tmp_path / "export"), check)


def test_a_deadline_counts_from_when_the_request_arrived(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        with pytest.raises(Expired):
            await Robot(runtime).asks(Question(state=STATE, deadline_ms=1000.0), started=1e-9)

    with_app(tiny, check)


def test_a_caller_that_leaves_takes_its_request_back_before_or_after_it_is_queued(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(runtime)
        running, waiting = robot.begins(Question(state=STATE)), robot.begins(Question(state=STATE))
        await asyncio.sleep(0)
        assert runtime.batcher.scheduler.unsettled("prod") == 2
        waiting.cancel()
        await asyncio.wait({running, waiting})
        assert isinstance(running.result(), ActAnswer)
        assert waiting.cancelled()
        assert _counted(runtime, "cancelled") == 1.0
        assert _nothing_is_left(runtime)

    with_app(tiny, check, inject_latency_ms=100.0)


def test_all_wires_share_one_bound_and_one_end(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        robot = Robot(runtime)
        first = robot.begins(Question(state=STATE))
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests):
            await robot.asks(Question(state=STATE))
        assert isinstance(await first, ActAnswer)
        runtime.drain()
        with pytest.raises(Closed):
            await robot.asks(Question(state=STATE))
        assert runtime.active == 0

    with_app(tiny, check, max_concurrent=1)
