"""The log: a reader that stops reading stops nobody, and no text of others makes a line of its own."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from reflex_runtime.core.batch import RequestAnswered
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.observe.logs import WAITING, FailureLog, JsonLog, LogStream, TextLog, escaped
from serving.harness import PATIENCE
from serving.pipes import fill

F_SETPIPE_SZ = 1031


def full_pipe() -> tuple[int, int]:
    """A pipe of one page that takes no byte more: (reading end, writing end)."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, F_SETPIPE_SZ, 4096)
    fill(writing)
    return reading, writing


def test_x6_lines_for_a_reader_that_does_not_read_are_dropped_and_counted() -> None:
    reading, writing = full_pipe()
    with os.fdopen(writing, "w") as file:
        stream = LogStream(file)
        stream.formatter = JsonLog()
        line = "x" * 1023
        for _ in range(WAITING // 1024 + 7):
            print(line, file=stream)  # would wait for ever
        assert os.read(reading, 4096) == b"." * 4096
        text = b""
        while not text.endswith(b"}\n"):
            text += os.read(reading, 65536)
        stream.finish(PATIENCE)
    *lines, last = text.decode().splitlines()
    assert lines == [line] * (WAITING // 1024)
    assert json.loads(last)["message"] == "7 lines of the log were dropped: its reader did not read"
    os.close(reading)


def test_x6_a_thread_of_the_log_lives_only_while_its_reader_is_slow() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        stream = LogStream(file)
        print("one", file=stream)
        assert os.read(reading, 100) == b"one\n"  # written by the caller itself
        os.close(reading)
        print("two", file=stream)  # nobody will ever read it: no error
        stream.finish(PATIENCE)


def test_x6_a_log_that_gets_no_thread_goes_on_once_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = full_pipe()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with os.fdopen(writing, "w") as file:
        stream = LogStream(file)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            print("one", file=stream)
        print("two", file=stream)
        assert [os.read(reading, 4096) for _ in range(3)] == [b"." * 4096, b"one\n", b"two\n"]
    os.close(reading)


def test_x6_a_log_waits_for_its_own_reader_whatever_becomes_of_the_descriptor() -> None:
    """Libraries let standard error be /dev/null while they are noisy: a thread that asked that for room would spin."""
    reading, writing = full_pipe()
    with os.fdopen(writing, "w") as file:
        stream = LogStream(file)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), writing)
        tries, write_some = [], stream._write_some

        def counted(lines: bytes) -> int:
            tries.append(lines)
            return write_some(lines)

        stream._write_some = counted
        print("one", file=stream)
        assert not stream._written.wait(0.5)
        assert tries == [b"one\n"]
        assert os.read(reading, 4096) == b"." * 4096
        stream.finish(PATIENCE)
        assert os.read(reading, 100) == b"one\n"
    os.close(reading)


def test_x6_no_text_of_others_begins_a_line_or_commands_a_terminal() -> None:
    forged = "boom\n2026-11-29 INFO root ready\x1b[2J\r\x85\u2028\u202e"
    said = escaped(forged)
    assert said == "boom\n    2026-11-29 INFO root ready\\x1b[2J\\r\\x85\\u2028\\u202e"
    try:
        raise RuntimeError(forged)
    except RuntimeError:
        record = logging.LogRecord("reflex", logging.ERROR, "", 1, "%s", (forged,), sys.exc_info())
    text = TextLog("%(levelname)s %(message)s").format(record)
    assert [line[:4] for line in text.splitlines()] == ["ERRO"] + ["    "] * (len(text.splitlines()) - 1)
    assert "\x1b" not in text
    assert text.isascii()


def test_x6_a_text_of_any_length_is_a_short_one_in_the_log() -> None:
    """A model may raise with all of its input in the words."""
    try:
        raise RuntimeError("a" + "\n" * 5_000_000 + "z")
    except RuntimeError:
        record = logging.LogRecord("reflex", logging.ERROR, "", 1, "%s", ("x" * 5_000_000,), sys.exc_info())
    for form in (TextLog("%(message)s"), JsonLog()):
        text = form.format(record)
        assert len(text) < 150_000
        assert " characters … " in text or " characters \\u2026 " in text
    assert text.count("\n") == 0


def test_x6_lines_of_the_command_are_reflex_and_its_logger_is_not_the_root() -> None:
    code = """
import logging
from reflex_runtime.observe import logs
logs.begin("%(name)s %(message)s")
logging.getLogger("reflex").setLevel(logging.ERROR)
logging.getLogger("of.user").info("a")
logging.info("b")
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert told.stderr == "of.user a\nreflex b\n"


def test_e1_a_failure_without_a_ticket_is_no_failed_request(caplog: pytest.LogCaptureFixture) -> None:
    error = ProcessorError("x")
    FailureLog()(RequestAnswered(1.0, "a", "failed", 500, 0.1, served_in=0.1, error=error))
    assert caplog.text == ""
