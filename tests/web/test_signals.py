"""Signals of process managers: each has a meaning in every server, and only three end it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from feeds.commands import Feeds, scratch
from serving.harness import PATIENCE, Server

KEPT = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_x6_three_signals_end_a_policy_server_and_the_others_do_not(tiny: Path, ends: signal.Signals) -> None:
    with Server(tiny, supervised=True) as server:
        for number in KEPT:
            server.process.send_signal(number)
        assert server.get("/health").json["restarts"] == 0
        assert server.act().status == 200
        assert server.stop(ends) == 0
        assert not [line for line in server.log if "restart" in line]


def test_x6_usr1_is_hangup_for_a_log_rotation(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, "--trace", str(tmp_path / "batches.jsonl"), supervised=True) as server:
        assert server.act().status == 200
        server.process.send_signal(signal.SIGUSR1)
        server.wait_until(lambda: (tmp_path / "batches.jsonl.1").exists())


def test_x6_signals_of_a_model_server() -> None:
    with Server("scribe", "--kv-cache-gb", "0.05", supervised=True) as server:
        for number in KEPT:
            server.process.send_signal(number)
        assert server.get("/health").json["restarts"] == 0
        assert server.stop(signal.SIGQUIT) == 0
        assert not [line for line in server.log if "restart" in line]


def test_x6_signals_of_feeds(tmp_path: Path) -> None:
    with Feeds("a=shapes:seed=1", "--processor", "mine:Sizes", "--results", "-", cwd=scratch(tmp_path)) as feeds:
        feeds.wait_out(2)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            feeds.process.send_signal(number)
        feeds.wait_out(len(feeds.out) + 2)
        assert feeds.stop(signal.SIGQUIT) == 0


@pytest.mark.long
def test_x6_a_signal_to_the_whole_group_does_not_end_a_runtime_process_before_its_server() -> None:
    with Server("scribe", "--kv-cache-gb", "0.05", "--workers", "1", supervised=True) as server:
        (worker,) = psutil.Process(server.process.pid).children()
        runtimes = worker.children()
        for runtime in runtimes:
            for number in (*KEPT, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                runtime.send_signal(number)
        body = b'{"prompt": "one", "max_tokens": 2, "model": "scribe"}'
        assert server.ask("POST", "/v1/completions", body, {"Content-Type": "application/json"}).status == 200
        assert [process.pid for process in worker.children()] == [runtime.pid for runtime in runtimes]
        assert server.stop() == 0


EARLY = """
import os, signal
from reflex_runtime.web.supervisor import _become_server
if (child := os.fork()) == 0:
    _become_server(os.getppid())
    os._exit(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_x6_a_terminal_that_closes_ends_a_server_that_has_no_handlers_yet(terminal: bool) -> None:
    ours, theirs = pty.openpty() if terminal else os.pipe()[::-1]
    with open(ours, "wb", buffering=0), open(theirs, "rb", buffering=0) as end:
        started = [sys.executable, "-c", EARLY]
        told = subprocess.run(started, stdin=end, stdout=subprocess.PIPE, check=True, timeout=PATIENCE).stdout
    assert told == (b"1\n" if terminal else b"0\n")
