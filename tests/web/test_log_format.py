"""--log-format: the log of a server for a collector, from the supervisor, the server and its runtime processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from reflex_runtime.cli.serving import show_settings
from reflex_runtime.observe.logs import JsonLog
from reflex_runtime.settings import ServeConfig
from reflex_runtime.settings.declare import table
from serving.harness import PATIENCE, Server
from serving.pipes import fill
from thinned import thinned

SMALL = ("--kv-cache-gb", "0.05")


def lines(server: Server) -> list[dict[str, Any]]:
    """Every line of its log."""
    return [json.loads(line) for line in server.log if line != "<end>"]


def test_x6_a_log_in_json_is_one_object_a_line(tiny: Path) -> None:
    with Server(tiny, "--log-format", "json", supervised=True) as server:
        assert server.post({"state": [float("nan"), 0.0]}).status == 422
        server.stop()
        told = lines(server)
    messages = [line["message"] for line in told]
    assert any(message.startswith("ready on http://") for message in messages)
    assert {"time", "level", "logger", "message", "pid", "thread"} == set(told[0]) - {"settings"}
    (settings,) = [line["settings"] for line in told if "settings" in line]
    assert settings["--log-format"].startswith("json")
    assert {line["level"] for line in told} <= {"INFO", "WARNING"}


@pytest.mark.parametrize("more", thinned([(), ("--workers", "1")], [("--workers", "1")]))
def test_x6_the_log_of_a_model_server_is_json_too(more: tuple[str, ...]) -> None:
    with Server("scribe", "--log-format", "json", *SMALL, *more) as server:
        server.stop()
        told = lines(server)
    assert any(line["message"].startswith("ready on http://") for line in told)


def test_x6_the_log_of_a_runtime_process_is_json_where_its_server_says_so() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "reflex_runtime", "worker"], stdin=theirs, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "REFLEX_LOG_FORMAT": "json"},
        )  # fmt: skip
        theirs.close()
        ours.sendall(b"no frame at all" * 10)
        told = [json.loads(line) for line in process.communicate(timeout=PATIENCE)[1].splitlines()]
    assert any(line["message"].startswith("the other end broke the protocol") for line in told)
    assert {(line["level"], line["pid"]) for line in told} == {("WARNING", process.pid)}


def test_x6_a_line_can_be_written_in_every_encoding() -> None:
    record = logging.LogRecord("reflex", logging.INFO, "f", 1, "%s", ("Zürich \u2028 \udcff",), None)
    text = JsonLog().format(record)
    assert text.isascii()
    assert json.loads(text)["message"] == "Zürich \u2028 \udcff"


def test_x6_no_key_is_in_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        show_settings(ServeConfig(api_key="s3cret", log_format="json"), "tiny")
    (record,) = caplog.records
    text = JsonLog().format(record)
    assert json.loads(text)["settings"]["--api-key"] == "set"
    assert "s3cret" not in text


def test_x6_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("no\nsuch thing")
    except ValueError:
        record = logging.LogRecord("reflex", logging.ERROR, "f", 1, "it %s", ("failed",), sys.exc_info())
    text = JsonLog().format(record)
    assert "\n" not in text
    told = json.loads(text)
    assert (told["message"], told["error"], told["error_message"]) == ("it failed", "ValueError", "no\nsuch thing")
    assert "raise ValueError" in told["traceback"]


def test_h10_the_settings_that_are_not_defaults_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show_settings(ServeConfig(api_key="s3cret", port=8123, latest_only=True), "tiny", [("arm", "EXPORT")])
    head, *rows, rest = capsys.readouterr().err.splitlines()
    assert head == "reflex serve tiny"
    assert [" ".join(row.split()) for row in rows] == ["--port 8123", "--api-key set", "--latest-only on", "arm EXPORT"]
    assert rest == f" {len(table(ServeConfig())) - 3} settings have their defaults, see --help"


def test_x6_a_server_whose_log_nobody_reads_answers_and_ends_at_sigterm(tiny: Path) -> None:
    reading, writing = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "reflex_runtime", "serve", str(tiny), "--port", "0", "--inject-fault", "prod:raise:1"],
        stdout=writing, stderr=writing, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with server, open(reading, "rb", buffering=0) as log:
        ready = next(line for line in log if b"ready on http://" in line)  # the last that is read
        url = ready.split(b"ready on ")[1].split()[0].decode().rstrip(",;")
        fill(writing)
        try:
            body = {"instruction": "pick", "state": [0.0, 0.0]}  # its call fails, and is logged
            assert httpx.post(f"{url}/act", json=body, timeout=PATIENCE).status_code == 500
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()
            os.close(writing)
