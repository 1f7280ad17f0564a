"""vla-eval's websocket: the stock client and the stock runner of episodes, unmodified, against a real server."""

from __future__ import annotations

import ast
import base64
import io
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.connection import Connection
from vla_eval.protocol.messages import MessageType
from vla_eval.protocol.numpy_codec import set_image_format
from vla_eval.runners import SyncEpisodeRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from reflex_runtime.robots.wires.vla_eval import PATH, EvalMessage, decode, encode
from serving.exports import ACTIONS, CHUNK, expected, write_tiny
from serving.harness import PATIENCE, STATE, Server
from serving.pair import Pair, rollout, two
from serving.requests import WAITING, busy, calm, loads_after, marked, recorded

PICTURE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


class Robot:
    """The stock client, called from a test that is no coroutine."""

    def __init__(self, portal: BlockingPortal, server: Server, query: str = "") -> None:
        self._portal = portal
        url = f"ws://127.0.0.1:{server.port}/vla-eval{query}"
        self.connection = Connection(url, timeout=PATIENCE, max_retries=1)
        self._do(self.connection.connect)

    def _do(self, function: Callable[..., Any], *given: Any, **more: Any) -> Any:
        return self._portal.call(partial(function, *given, **more))

    def begin(self, **said: Any) -> None:
        self._do(self.connection.start_episode, {"task": {"name": "t"}} | said)

    def end(self, **result: Any) -> None:
        self._do(self.connection.end_episode, result)

    def act(self, observation: Any) -> Any:
        return self._do(self.connection.act, observation)["actions"]

    def asks(self, observation: Any) -> Future[Any]:
        return self._portal.start_task_soon(self.connection.act, observation)

    def say(self, kind: MessageType, payload: Any) -> Any:
        """Any message, and the next one that comes, with the number of the first."""
        return self._do(self.connection.send, kind, payload), self._do(self.connection.recv, timeout=PATIENCE)

    def socket(self, method: str, *given: Any) -> Any:
        return self._do(getattr(self.connection._ws, method), *given)

    def close(self) -> None:
        self._do(self.connection.close)


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@contextmanager
def robot(portal: BlockingPortal, server: Server, query: str = "") -> Iterator[Robot]:
    client = Robot(portal, server, query)
    try:
        yield client
    finally:
        client.close()


def seen(i: int = 0, **more: Any) -> dict[str, Any]:
    """What robot i sees, and what it asks for."""
    own = {f"reflex/{name}": value for name, value in more.items()}
    return {"states": np.array([0.1 * i, -0.1 * i]), "task_description": "go", "reflex/seed": i} | own


def right(action: Any, i: int = 0, step: int = 0) -> bool:
    return bool(np.allclose(action, expected([0.1 * i, -0.1 * i], i)[step], atol=1e-5))


def refused(ask: Callable[[], Any]) -> Any:
    """The error out of the exception that the stock client raises."""
    with pytest.raises(RuntimeError, match="Server error: ") as info:
        ask()
    return ast.literal_eval(str(info.value).removeprefix("Server error: "))


@pytest.mark.parametrize("form", ["png", "jpeg", "raw"])
def test_w20_each_observation_gets_the_next_action_of_the_chunk_of_act(
    portal: BlockingPortal, tmp_path: Path, form: Any
) -> None:
    block = {"images": {"image": "images/agentview"}, "metadata": {"observation_params": {"absolute_action": True}}}
    export = write_tiny(tmp_path / "export", cameras=("image", "wrist"), wires={"vla-eval": block})
    set_image_format(form)
    with Server(export) as server, robot(portal, server) as client:
        body = {"state": STATE, "seed": 3, "image": _png(), "images": {"wrist": _png()}}
        plain = server.post(body).json["actions"]
        told = client.connection.server_info
        assert (told["protocol_version"], told["model_server"], told["capabilities"]) == (1, "tiny", {})
        assert told["observation_params"] == {"absolute_action": True}
        observation = {"images": {"agentview": PICTURE, "wrist": PICTURE}, "states": np.array(STATE), "reflex/seed": 3}
        client.begin()
        actions = [client.act(observation) for _ in range(CHUNK)]
        assert {(action.dtype, action.shape) for action in actions} == {(np.dtype(np.float32), (ACTIONS,))}
        assert np.stack(actions).tolist() == np.float32(plain).tolist()
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="vla-eval") == 1
        seq, message = client.say(MessageType.OBSERVATION, observation | {"reflex/seed": 4})
        assert (message.type, message.seq) == (MessageType.ACTION, seq)
        assert np.allclose(message.payload["actions"], expected(STATE, 4)[0], atol=1e-5)
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="vla-eval") == 2
        assert server.get("/health").status == 200
        assert server.get("/vla-eval").status == 404


def _png() -> str:
    file = io.BytesIO()
    PIL.Image.fromarray(PICTURE).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(autouse=True)
def _png_again() -> Iterator[None]:
    yield
    set_image_format("png")


def test_w20_a_new_episode_drops_the_rest_of_the_chunk(portal: BlockingPortal, tiny: Path) -> None:
    with Server(tiny) as server, robot(portal, server) as first, robot(portal, server) as second:
        for client in (first, second):
            client.begin()
            assert right(client.act(seen(1)), 1)
        first.end(success=True)
        first.begin()
        assert right(first.act(seen(2)), 2, step=0)
        assert right(second.act(seen(2)), 1, step=1)


def test_w54_a_new_instruction_ends_the_chunk_of_the_old_one(
    portal: BlockingPortal, tiny: Path, tmp_path: Path
) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server:
        with robot(portal, server) as client:
            for task in ("open", "open", "close", "close"):
                client.act(seen() | {"task_description": task})
        server.stop()
    first, second = recorded(tmp_path)
    assert (first.executed, second.executed) == (None, 2)


def test_w20_the_export_says_how_much_of_a_chunk_is_executed(portal: BlockingPortal, tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", wires={"vla-eval": {"execute": 2}})
    record = tmp_path / "record"
    with Server(export, "--record", str(record)) as server, robot(portal, server) as client:
        client.begin()
        assert right(client.act(seen(1)), 1, step=0)
        assert right(client.act(seen(2)), 1, step=1)
        assert right(client.act(seen(3)), 3, step=0)
        client.begin()
        assert right(client.act(seen(4)), 4, step=0)
        server.stop()
    assert [asked.executed for asked in recorded(record)] == [None, 2, None]


def test_w20_a_socket_is_a_robot_and_episodes_begin_and_end(
    portal: BlockingPortal, tmp_path: Path, tiny: Path
) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server:
        with robot(portal, server) as client, robot(portal, server, "?robot_id=arm&priority=urgent") as named:
            client.act(seen())
            client.begin()
            client.act(seen())
            client.begin(recording={"sid": "s", "eid": "e7", "eval_id": "v", "db_path": ""})
            client.act(seen())
            named.begin()
            named.act(seen(request_id="mine"))
        server.stop()
    found = recorded(tmp_path)
    own = found[0].robot_id
    assert own.startswith("ws-")
    assert [asked.episode_id for asked in found[:3]] == [own, f"{own}#1", "e7"]
    assert found[3].robot_id == "arm"
    assert found[3].episode_id.endswith("#1")
    assert found[3].episode_id != f"{own}#1"


def test_w20_hello_is_answered_when_the_policy_is_ready(portal: BlockingPortal, tiny: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        for fails in (False, True):
            gate = tmp_path / f"gate{fails}"
            os.mkfifo(gate)
            wait = loads_after(gate, fails)
            with Server(tiny, before=wait, until="http://") as server:

                def meet(server: Server = server) -> Any:
                    with robot(portal, server) as client:
                        return client.act(seen(1))

                answer = pool.submit(meet)
                server.reach(lambda m: True)
                assert not answer.done()
                gate.write_text("go")
                if fails:
                    with pytest.raises(ConnectionClosed) as info:
                        answer.result()
                    assert info.value.rcvd is not None
                    assert info.value.rcvd.code == 1011
                else:
                    assert right(answer.result(), 1)


class Stub(StepBenchmark):
    """Two steps, then it has succeeded or not."""

    def __init__(self, succeeds: bool) -> None:
        super().__init__()
        self.succeeds, self.actions = succeeds, []  # type: ignore[var-annotated]

    def get_tasks(self) -> list[Any]:
        return [{"name": "t"}]

    def reset(self, task: Any) -> Any:
        self.actions.clear()

    def step(self, action: Any) -> StepResult:
        self.actions.append(action["actions"])
        return StepResult(obs=None, reward=0.0, done=len(self.actions) == 2, info={})

    def make_obs(self, raw_obs: Any, task: Any) -> Any:
        return seen(5)

    def check_done(self, step_result: StepResult) -> bool:
        return step_result.done

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": self.succeeds}


def test_w23_episodes_of_the_stock_runner_count_for_a_against_b(portal: BlockingPortal, pair: Pair) -> None:
    with two(pair) as server, robot(portal, server, "?robot_id=arm&episode_id=e") as client:  # names choose the slots
        for i in range(12):
            stub = Stub(succeeds=i % 3 == 0)
            result = portal.call(SyncEpisodeRunner().run_episode, stub, {"name": "t"}, client.connection)
            assert (result["steps"], len(stub.actions)) == (2, 2)
        client.begin()
        client.end(success=True)  # nothing was asked in it
        client.begin(recording={"eid": "unclear"})
        client.act(seen())
        for unclear in ("yes", 0.5, None):
            client.end(metrics={"success": unclear})
        client.act(seen())  # all before it is dealt with
        outcomes = rollout(server)["outcomes"]
        assert min(outcomes[slot]["episodes"] for slot in "ab") > 0
        assert sum(outcomes[slot]["episodes"] for slot in "ab") == 12
        assert sum(outcomes[slot]["successes"] for slot in "ab") == 4


def test_w23_without_a_key_only_programs_on_this_machine_say_how_an_episode_ended(pair: Pair) -> None:
    with two(pair) as server:
        for i, headers in enumerate(({}, {"X-Forwarded-For": "192.0.2.1"})):
            with connect(f"ws://127.0.0.1:{server.port}{PATH}", additional_headers=headers) as client:
                for said, told in (
                    ("episode_start", {"recording": {"eid": f"e{i}"}}), ("observation", seen()),
                    ("episode_end", {"success": True}), ("hello", {}),
                ):  # fmt: skip
                    client.send(encode(EvalMessage(said, told, 0)))
                assert (decode(client.recv()).type, decode(client.recv()).type) == ("action", "hello")
        outcomes = rollout(server)["outcomes"]
        assert sum(outcomes[slot]["episodes"] for slot in "ab") == 1


def test_w23_two_robots_that_name_their_episodes_alike_have_an_outcome_each(pair: Pair) -> None:
    with two(pair) as server:
        for path, more in ((PATH, {}), (PATH, {}), (PATH + "?robot_id=arm", {}), (PATH, {"reflex/robot_id": "hand"})):
            with connect(f"ws://127.0.0.1:{server.port}{path}") as client:
                for said, told in (
                    ("episode_start", {"recording": {"eid": "0"}}), ("observation", seen() | more),
                    ("episode_end", {"success": True}), ("hello", {}),
                ):  # fmt: skip
                    client.send(encode(EvalMessage(said, told, 0)))
                assert (decode(client.recv()).type, decode(client.recv()).type) == ("action", "hello")
        outcomes = rollout(server)["outcomes"]
        assert sum(outcomes[slot]["episodes"] for slot in "ab") == 4


def test_w22_every_error_keeps_the_session(portal: BlockingPortal, tiny: Path) -> None:
    options = ("--max-body-bytes", "4096", "--max-concurrent", "1")
    with Server(tiny, *options) as server, robot(portal, server) as client:
        client.begin()
        for bad, field in [
            ({"reflex/nonsense": 1}, "reflex/nonsense"),
            ({"states": np.zeros(3)}, "state"),
            ({"states": np.array([np.nan, 0.0])}, "state"),
            ({"states": None}, "states"),
            ({"reflex/deadline_ms": -1}, "deadline_ms"),
            ({"task_description": 5}, "task_description"),
        ]:
            error = refused(lambda bad=bad: client.act(seen() | bad))
            assert (error["error"], error["field"], error["retry_safe"]) == ("invalid_request", field, False)
            assert error["request_id"]
        missing = refused(lambda: client.act({"task_description": "go"}))
        assert missing["message"] == "state: missing; came: task_description; expected: state"
        seq, message = client.say(MessageType.ACTION, {})
        assert (message.type, message.seq) == (MessageType.ERROR, seq)
        assert message.payload["message"].startswith("type 'action': must be one of hello, episode_start,")
        seq, message = client.say(MessageType.EPISODE_START, {"recording": {"eid": 5}})
        assert (message.type, message.seq) == (MessageType.ERROR, seq)
        assert right(client.act(seen(3)), 3)
        assert server.metrics()("reflex_requests_total", outcome="client_error", wire="vla-eval") == 9
        client.socket("send", b"\xc1")
        message = portal.call(client.connection.recv)
        assert (message.type, message.seq) == (MessageType.ERROR, 0)
        with robot(portal, server) as other:
            other.socket("send", "text")
            with pytest.raises(ConnectionClosed) as info:
                other.socket("recv")
            assert info.value.rcvd is not None
            assert info.value.rcvd.code == 1003
        assert calm(server)


def test_w22_a_full_queue_and_an_expired_deadline_are_errors(portal: BlockingPortal, tiny: Path) -> None:
    with Server(tiny, "--max-queue", "1", held=True) as server, busy(server):
        with robot(portal, server, "?deadline_ms=200") as late, robot(portal, server) as full:
            with server.burst([{"state": STATE}]) as first:
                first.send()
                server.reach(lambda m: m(WAITING) == 1)
                error = refused(lambda: full.act(seen()))
                assert (error["error"], error["retry_safe"], error["max_queue"]) == ("queue_full", True, 1)
                first.hang_up(range(1))
                server.reach(lambda m: m(WAITING) == 0)
            assert refused(lambda: late.act(seen()))["error"] == "deadline_exceeded"
            server.release()
            assert right(full.act(seen(1)), 1)
            assert right(late.act(seen(2, deadline_ms=60_000)), 2)


def test_w22_a_model_that_fails_is_an_error_of_its_request_alone(portal: BlockingPortal, tiny: Path) -> None:
    ids = [f"request-{i}" for i in range(100)]
    bad = min(marked("raise", 0.05, ids))
    fine = min(set(ids) - marked("raise", 0.05, ids))
    with Server(tiny, "--inject-fault", "prod:raise:0.05") as server, robot(portal, server) as client:
        error = refused(lambda: client.act(seen(request_id=bad)))
        assert (error["error"], error["request_id"], error["retry_safe"]) == ("processor_failed", bad, False)
        assert right(client.act(seen(1, request_id=fine)), 1)


def test_w22_a_server_that_ends_answers_what_it_took_and_then_closes(portal: BlockingPortal, tiny: Path) -> None:
    with Server(tiny, held=True) as server, robot(portal, server) as taken, robot(portal, server) as idle:
        waiting = taken.asks(seen(1, request_id="plug"))
        server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        seq, message = idle.say(MessageType.OBSERVATION, seen())
        assert (message.type, message.seq, message.payload["error"]) == (MessageType.ERROR, seq, "shutting_down")
        server.release()
        assert right(waiting.result()["actions"], 1)
        for client in (taken, idle):
            with pytest.raises(ConnectionClosed) as info:
                client.socket("recv")
            assert info.value.rcvd is not None
            assert info.value.rcvd.code == 1001
        assert server.wait() == 0
