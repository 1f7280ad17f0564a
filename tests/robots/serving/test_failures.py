"""The log names what failed, without drowning in it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.observe.logs import FailureLog
from serving.exports import write_tiny
from serving.harness import Server


def test_the_first_failure_is_told_at_once_and_then_one_a_second_with_the_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = FailureLog()
    with caplog.at_level(logging.ERROR, "reflex.server"):
        for i in range(10):
            failures.tell(100.0 + 0.05 * i, f"r{i}", ProcessorError("boom"))
        failures.tell(101.5, "r10", ProcessorError("bang"))
    assert caplog.messages == ["request r0 failed: boom", "request r10 failed: bang (9 more since the last line)"]


def test_a_failing_policy_and_its_degraded_state_are_in_the_servers_log(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "tiny")
    with Server(export, "--inject-fault", "prod:raise:1", "--max-consecutive-crashes", "2") as server:
        for name in ("first", "second"):
            assert server.act(request_id=name).status == 500
        assert server.wait_log("request first failed: ")
        assert server.wait_log("drain: prod crashes: degraded")
