"""H10: what the options of `reflex serve` do for functions, where they are not read by the code of other servers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.cli import main
from reflex_runtime.functions import server as server_of_functions
from reflex_runtime.functions import source as sources
from reflex_runtime.functions.server import FunctionServer
from reflex_runtime.functions.source import read_functions
from reflex_runtime.settings import FunctionsConfig
from serving.harness import PATIENCE

from .door import Functions, source
from .test_scheduling import IN_FLIGHT, WAITING, plugged


def group(**settings: Any) -> Any:
    return FunctionsConfig(**settings).group("f")


def test_h10_options_of_functions_need_only_options_of_functions() -> None:
    own = {field.name: field.metadata for field in fields(FunctionsConfig)}
    named = [word for told in own.values() for key in ("needs", "unless") for word in told[key].split("|") if word]
    assert {word.partition("=")[0] for word in named} <= own.keys()


def test_h10_functions_are_scheduled_as_their_settings_say() -> None:
    assert group(max_batch_cost_ms=40.0).flush.max_batch_cost == pytest.approx(0.04)
    assert group().flush.max_batch_cost == inf or group().flush != group(max_batch_cost_ms=40.0).flush
    assert group(batch_timeout_ms=7.0).flush != group().flush
    assert group(max_queue_s=1.5).max_queued_seconds == 1.5
    assert group(max_in_flight_per_client=2).max_in_flight_per_client == 2


def test_h10_the_device_of_functions_is_that_of_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def batcher(processors: Any, groups: Any, audience: Any, watchdog: float, *, brief: float, **more: Any) -> None:
        made.update(watchdog=watchdog, brief=brief)

    monkeypatch.setattr(server_of_functions, "Batcher", batcher)
    config = FunctionsConfig(brief_ms=2.0)
    functions = read_functions([source("double")], config)
    FunctionServer(config, functions, None)
    assert made["brief"] == pytest.approx(0.002)


def test_h10_provider_and_threads_are_those_of_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []

    class Read(Exception):
        """It was asked for."""

    def graph(*told: Any, **more: Any) -> None:
        made.append((*told, *more.values()))
        raise Read

    (tmp_path / "a.onnx").write_bytes(b"")
    monkeypatch.setattr(sources, "OnnxItems", graph)
    for config in (FunctionsConfig(provider="cuda", threads=3), FunctionsConfig()):
        with pytest.raises(Read):
            read_functions([str(tmp_path / "a.onnx")], config)
    assert {"CUDAExecutionProvider", 3} <= {*made[0]}
    assert not {"CUDAExecutionProvider", 3} & {*made[1]}


def test_h10_an_option_without_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "python:nowhere:f", "--ssl-keyfile", "key.pem"]) == 2
    assert "--ssl-keyfile needs --ssl-certfile" in capsys.readouterr().err


def test_h10_a_private_key_without_a_certificate_has_no_effect() -> None:
    with Functions("double", env={"REFLEX_SSL_KEYFILE": "key.pem"}) as server:
        assert server.wait_log("REFLEX_SSL_KEYFILE has no effect: it needs --ssl-certfile")
        assert server.predict("double", 1).json == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nmax-queue = 5\nmax_queue = 6", "[serve] max_queue: is given twice, with - and with _; keep one"),
        ("[serve]\nmax-que = 5", "[serve] max-que: no such setting; did you mean max_queue?"),
    ],
)
def test_h10_a_key_of_the_file_that_cannot_be_meant(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reflex.toml").write_text(text)
    assert main(["serve", "python:nowhere:f", "--config", str(tmp_path / "reflex.toml")]) == 2
    assert capsys.readouterr().err == f"reflex serve: {tmp_path / 'reflex.toml'}: {said}\n"


def test_h10_max_concurrent_of_functions_is_429() -> None:
    with Functions("double", options=("--max-concurrent", "1"), held=True) as server, plugged(server) as plug:
        answer = server.predict("double", 1)
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "too_many_requests", "1")
        assert server.get("/health").status == 200
        server.release()
        assert plug.answers()[0].status == 200


def test_h10_deadline_ms_is_the_limit_of_items_that_bring_none() -> None:
    with Functions("double", options=("--deadline-ms", "50"), held=True) as server:
        plug = server.together("double", [1], request_id="plug", deadline_ms=600000)
        with plug, server.together("double", [2]) as burst:
            plug.send()
            server.reach(lambda m: m(IN_FLIGHT) == 1 and m(WAITING) == 0)
            burst.send()
            assert burst.answers()[0].code == "deadline_exceeded"
            server.release()
            assert plug.answers()[0].status == 200


def test_h10_drain_timeout_s_is_how_long_items_may_take_at_the_end() -> None:
    with Functions("double", options=("--drain-timeout-s", "0.1"), held=True) as server, plugged(server) as plug:
        with server.together("double", [1]) as burst:
            burst.send()
            server.reach(lambda m: m(WAITING) == 1)
            server.process.send_signal(signal.SIGTERM)
            answers = [*plug.answers(), *burst.answers()]
        assert [(answer.status, answer.code) for answer in answers] == [(503, "shutting_down")] * 2
        assert max(answer.seconds for answer in answers) < FunctionsConfig().drain_timeout_s
        server.wait()


def test_h10_reload_starts_again_when_a_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "changes.py"

    def written(text: str, later: int) -> None:
        """Its time is another, whatever the clock's grain."""
        draft = tmp_path / "draft"
        draft.write_text(text)
        os.utime(draft, (2e9 + later, 2e9 + later))
        draft.rename(file)

    written("def f(items: list[int]) -> list[int]:\n    return [1 for _ in items]\n", 0)
    before = f"import os; os.chdir({str(tmp_path)!r}); from reflex_runtime.cli import serve_functions as s; "
    with Functions("python:changes:f", options=("--reload",), before=before + "s.LOOK_EVERY = 0.05") as server:
        assert server.predict("", 0).json == 1
        for _ in range(5):
            server.process.send_signal(signal.SIGSTOP)
            resume = time.monotonic() + 0.1  # its wait is over by then
            while time.monotonic() < resume:
                assert server.predict("", 0).json == 1
            server.process.send_signal(signal.SIGCONT)
        written("def f(items: list[int]) -> list[int]:\n    return [22 for _ in items]\n", 1)
        server.wait_log_while_fewer("reflex ready", 2)
        assert server.predict("", 0).json == 22
        written("def f(:\n", 2)
        server.wait_log("the server has ended")
        written("def f(items: list[int]) -> list[int]:\n    return [333 for _ in items]\n", 3)
        server.wait_log_while_fewer("reflex ready", 3)
        assert server.predict("", 0).json == 333
        assert server.stop() == 0


def test_h10_reload_ends_with_the_status_of_the_server_below_it() -> None:
    with Functions("hangs", options=("--reload", "--brief-ms", "0")) as server:
        parent = server.process.pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        with server.together("", [13]) as burst:
            burst.send()
            server.reach(lambda m: m(IN_FLIGHT) == 1)
            server.process.send_signal(signal.SIGINT)
            server.wait_log("draining")
            os.kill(int(child), signal.SIGINT)
            assert server.process.wait(PATIENCE) == 130
