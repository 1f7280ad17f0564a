"""What is refused before a port opens, a function that hangs, workers, and what users of a whole server do to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from forked import reflex
from reflex_runtime.settings import FunctionsConfig
from serving.harness import PATIENCE, parse_answers

from .door import Functions, parts_of, request

# -- refusals ----------------------------------------------------------------------------------------------------------

WRONG = {
    "raises.py": "raise OSError('no disk\\nhere')",
    "exits.py": "raise SystemExit(4)",
    "broken.py": "def f(:",
    "missing.py": "import surely_not_there",
    "some.py": """
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

def embed(texts: list[str]) -> list[str]:
    return texts

def other(texts: list[str]) -> list[str]:
    return texts

def single(text: str) -> str:
    return text

def nothing(a, b):
    return a

def unknown(items: list[socket]) -> list[str]:
    return items

def strange(items: list[np.dtype]) -> list[str]:
    return items

def spectrum(items: list[NDArray[np.complex64]]) -> list[str]:
    return items

def strange_result(items: list[int]) -> list[object]:
    return items

def by_name(*, items: list[int]) -> list[int]:
    return items

def empty():
    return []

class Empty:
    pass

class Fails:
    def __init__(self):
        raise ValueError("no weights")

    def predict(self, items):
        return items

class Example:
    example = "text"

    def predict(self, items: list[int]) -> list[int]:
        return items

number = 3
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("modules")
    for name, text in WRONG.items():
        (made / name).write_text(text)
    (made / "no.onnx").write_bytes(b"no graph")
    (made / "two").mkdir()
    for name in ("a.onnx", "b.onnx"):
        (made / "two" / name).write_bytes(b"")
    return made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python:not_there:f"], "no module 'not_there'"),
        (["python:missing:f"], "'surely_not_there'"),
        (["python:raises:f"], "OSError: no disk here (raises.py, line 1)"),
        (["python:exits:f"], "SystemExit: 4"),
        (["python:broken:f"], "SyntaxError"),
        (["python:some:embedd"], "did you mean embed?"),
        (["python:some:Empty"], "no method predict"),
        (["python:some:number"], "no method predict"),
        (["python:some:Fails"], "ValueError: no weights"),
        (["python:some:single"], "has type str; must be list[ITEM]"),
        (["python:some:nothing"], "must take one argument"),
        (["python:some:unknown"], "NameError"),
        (["python:some:strange"], "reflex serve: python:some:strange: its items: dtype is no type that can be sent"),
        (["python:some:by_name"], "must take one argument"),
        (["python:some:empty"], "expected a StagedModel or a WholeModel; a function to serve takes a list"),
        (["python:some:embed", "--provider", "gpu"], "--provider=gpu: must be cpu or cuda"),
        (["a b=python:some:embed"], "the name 'a b' must be"),
        (["python:some:spectrum"], "its items: arrays of complex64 cannot be sent"),
        (["python:some:Example"], "python:some:Example: its items: the example does not fit: "),
        (["python:some:embed", "python:some:embed"], "two functions are called 'embed'"),
        (["a=python:some:embed", "a=python:some:other"], "two functions are called 'a'"),
        (["python:some:embed", "--weight", "embed=x"], "must be NAME=NUMBER"),
        (["python:some:embed", "--weight", "embed=0"], "from 0.01 to 100"),
        (["python:some:embed", "--weight", "embd=2"], "did you mean embed?"),
        (["no.onnx"], "no.onnx"),
        (["absent.onnx"], "absent.onnx"),
        (["two"], "2 files *.onnx"),
        (["python:some:embed", "--otel", "nowhere"], "otel"),
        (["python:some:embed", "--trace", "/no/such/folder/file"], "trace"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line_and_status_2(folder: Path, words: list[str], said: str) -> None:
    done = reflex("serve", *words, "--port", "0", cwd=folder)
    assert said in done.stderr
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, ""), done


LATE = """
class Late:
    def setup(self):
        raise OSError("no weights")

    def predict(self, items: list[int]) -> list[int]:
        return items
"""


def test_a_setup_that_raises_ends_the_server_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    server = Functions("python:late:Late", before=f"import os; os.chdir({str(tmp_path)!r})", until="setup failed")
    with server:
        assert "OSError: no weights (late.py, line 4)" in server.wait_log("setup failed")
        assert server.wait() == 2
        assert not any("Traceback" in line for line in server.log), server.log


FAULTS = """
import json

def key(items: list[int]) -> list[int]:
    return [{}["nope"] for item in items]

def text(items: list[int]) -> list[int]:
    return json.loads("no JSON")

async def later(items: list[int]) -> list[int]:
    return undefined

def stream(items: list[int]):
    yield [1 for item in items]
    raise RuntimeError("mid")

def thing(items: list[int]) -> list:
    return [{"in": object()} for item in items]

def things(items: list[int]):
    yield [1 for item in items]
    yield [object() for item in items]
"""
TOLD = {
    "key": "KeyError: 'nope' (faults.py, line 5)",
    "text": "(faults.py, line 8)",
    "later": "NameError: name 'undefined' is not defined (faults.py, line 11)",
    "stream": "RuntimeError: mid (faults.py, line 15)",
    "thing": "thing returned an object, which has no form in JSON",
    "things": "things returned an object, which has no form in JSON",
}


@pytest.mark.parametrize("name", TOLD)
def test_the_log_says_where_in_the_users_code_a_request_failed(tmp_path: Path, name: str) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    with Functions(f"python:faults:{name}", before=f"import os; os.chdir({str(tmp_path)!r})") as server:
        answer = server.predict("", 1, {"X-Request-Id": "mine"})
        told = answer.json if answer.status == 500 else [*parts_of(answer.body)][-1][1]
        assert (told["error"], told["request_id"]) == ("processor_failed", "mine")
        assert "faults.py" not in told["message"]
        assert server.wait_log("request mine failed: ").rstrip().endswith(TOLD[name])


# -- a function that hangs ---------------------------------------------------------------------------------------------


def test_a_function_that_hangs_fails_its_callers_and_no_other() -> None:
    with Functions("hangs", "double", options=("--watchdog-s", "0.5", "--brief-ms", "0")) as server:
        with server.together("hangs", [13]) as burst:
            burst.send()
            answer = burst.answers()[0]
        assert (answer.status, answer.code) == (500, "processor_hung")
        assert answer.seconds < FunctionsConfig().watchdog_s
        assert server.predict("hangs", 1).json == 1
        assert server.predict("double", 4).json == 8


# -- workers -----------------------------------------------------------------------------------------------------------


def test_devices_are_a_worker_each() -> None:
    with Functions("double", options=("--devices", "cpu,cpu"), supervised=True) as server:
        server.wait_log_while_fewer("reflex ready", 2)
        health = server.get("/health").json
        assert len(health["workers"]) == 2
        assert len(psutil.Process(server.process.pid).children()) == 2
        with server.together("", range(8)) as burst:
            burst.send()
            assert [answer.json for answer in burst.answers()] == [2 * i for i in range(8)]
        assert server.stop() == 0


# -- users -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Functions]:
    with Functions("double", "raw_bytes", "anything", "slow", "result", options=("--trace", "/dev/null")) as made:
        yield made
        assert made.get("/health").status == 200


def test_thousands_of_small_requests_at_once(server: Functions) -> None:
    """Of each connection a hundred, in one go: each is answered in its order, or refused because the queue is full."""
    many, sent = 40, 100
    sockets = [server.connect() for _ in range(many)]
    for n, sock in enumerate(sockets):
        sock.sendall(b"".join(request("/predict/double", n * sent + i) for i in range(sent)))
    for n, sock in enumerate(sockets):
        found = pipelined(sock, sent)
        assert [answer.json for answer in found] == [2 * (n * sent + i) for i in range(sent)]
        sock.close()


def pipelined(sock: socket.socket, count: int) -> list[Any]:
    """So many answers of a connection."""
    data = b""
    while data.count(b"HTTP/1.1 ") < count or not whole(data, count):
        part = sock.recv(1 << 20)
        assert part
        data += part
    return parse_answers(data)


def whole(data: bytes, count: int) -> bool:
    try:
        found = parse_answers(data)
    except (ValueError, IndexError):
        return False
    return len(found) == count and len(found[-1].body) == int(found[-1].headers["content-length"])


def test_items_of_16_mb_are_answered_and_larger_ones_refused(server: Functions) -> None:
    most = 16 * 2**20
    data = bytes(range(256)) * (most // 256)
    answer = server.send("raw_bytes", data)
    assert answer.status == 200
    assert answer.body == data[::-1]
    text = b'"' + b"a" * (most - 2) + b'"'
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as connection:
        connection.request("POST", "/predict/anything", text, {"Content-Type": "application/json"})
        assert server.predict("double", 1).json == 2
        assert connection.getresponse().read() == text
    numbers = b"[" + b"1," * (most // 2 - 2) + b"1]"  # a decoder would let nothing else run for half a second
    refused = server.send("anything", numbers, "application/json")
    assert (refused.status, "send arrays as binary data" in refused.json["message"]) == (400, True)
    assert server.send("raw_bytes", data * 8).status == 413


def test_what_one_item_raises_never_ends_a_function_that_runs_on_the_loop(server: Functions) -> None:
    """Brief functions run on the server's loop, once they are known to be brief."""
    for i in range(60):
        assert server.predict("result", f"fine {i}").status == 200
    for bad in ("exit", "interrupt", "left", "cancelled", "panic"):
        assert server.predict("result", bad).status == 500
    assert server.predict("result", "after").json == "after"


def test_the_report_of_a_recording_counts_answers_and_shows_nothing_of_robots(tmp_path: Path) -> None:
    with Functions("result", options=("--record", str(tmp_path))) as server:
        for item in ("a", "b", "c", "raises"):
            server.predict("", item)
        assert server.stop() == 0
    done = reflex("report", str(tmp_path))
    rows = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if len(line.split()) > 1)
    assert (rows["requests"], rows["  answered"], rows["  processor_failed"]) == ("4", "3", "1")
    assert 0.0 < float(rows["latency p50, ms"]) <= float(rows["latency p99, ms"])
    for word in ("episodes", "success", "interval", "guard"):
        assert word not in done.stdout


def test_the_journal_of_a_server_that_runs_is_sent(tmp_path: Path) -> None:
    """As policies have it: a head, the batches of the next second, and a foot."""
    with Functions("double", options=("--trace", str(tmp_path / "trace.jsonl"))) as server:
        kinds: set[str] = set()
        while not kinds >= {"batch", "request"}:  # on a busy machine a second may pass without a request
            with ThreadPoolExecutor(1) as beside:
                sent = beside.submit(server.get, "/diagnostics/journal?seconds=1")
                while not sent.done():
                    assert server.predict("double", 4).status == 200
            lines = [json.loads(line) for line in sent.result().body.splitlines() if line.strip()]
            assert lines[0]["kind"] == "header"
            assert lines[0]["model_type"] == "function"
            assert lines[-1]["kind"] == "footer"
            kinds = {line["kind"] for line in lines}
        health = json.loads(server.get("/health").body)
        assert (health["state"], health["hung_batches"]) == ("ready", 0)
        assert server.get("/diagnostics/journal?seconds=0").status == 422
