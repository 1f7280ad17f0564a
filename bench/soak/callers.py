"""Callers that know the right answer, what they got, and `/health` beside them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil

from bench.servers import Server
from bench.soak.misbehaving import STEPS

ROOT = Path(__file__).parents[2]
PATIENCE = 40.0  # seconds for an answer
BACK = 30.0  # and for a right one after the end of a fault
PROMPTS = ("Once there was", "The scheduler", "A batch", "Tom had a")

Right = Callable[[Any], bool]


class Question(NamedTuple):
    """What to POST where under which id, and whether an answer with status 200 is right."""

    id: str
    path: str
    body: dict[str, Any]
    right: Right


def serve(*arguments: str, verb: str = "serve", **env: str) -> Server:
    """A server as users start it, with its supervisor."""
    command = ["-m", "reflex_runtime", verb, *arguments, "--port", "PORT"]
    return Server("reflex", command, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | env, pinned=False, ready="/health")


def resident(server: Server) -> float:
    """Memory of all its processes, in MB."""
    total = 0
    for pid in server.pids():
        with suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total / 2**20


def act(i: int) -> Question:
    """Of the policy in `misbehaving`."""
    first, id = float(i % 997), f"soak-{i}"
    chunk = [[2 * first + 1, 3, 5, 7]] * STEPS
    body = {"state": [first, 1, 2, 3], "request_id": id}
    return Question(id, "/act", body, lambda answer: answer["request_id"] == id and answer["actions"] == chunk)


class Completions:
    """Questions to the bundled language model; the right texts are those that it gives to one caller alone."""

    def __init__(self, server: Server) -> None:
        asked = ((prompt, post(server.port, self._path, self._body(prompt))) for prompt in PROMPTS)
        self.texts = {prompt: json.loads(answer.body)["choices"][0]["text"] for prompt, answer in asked}

    _path = "/v1/completions"

    @staticmethod
    def _body(prompt: str) -> dict[str, Any]:
        return {"model": "scribe", "prompt": prompt, "max_tokens": 12, "temperature": 0}

    def __call__(self, i: int) -> Question:
        prompt = PROMPTS[i % len(PROMPTS)]
        text = self.texts[prompt]
        right = lambda answer: answer["choices"][0]["text"] == text  # noqa: E731
        return Question(f"soak-{i}", self._path, self._body(prompt), right)


class Answer(NamedTuple):
    status: int
    body: bytes
    id: str | None


def post(port: int, path: str, body: dict[str, Any], id: str = "one") -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        return _ask(connection, path, body, id)
    finally:
        connection.close()


def _ask(connection: http.client.HTTPConnection, path: str, body: dict[str, Any], id: str) -> Answer:
    headers = {"Content-Type": "application/json", "X-Request-Id": id}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    return Answer(response.status, response.read(), response.headers["X-Request-Id"])


def judged(question: Question, answer: Answer) -> str:
    """ "right", "refused", or what is wrong with the answer to a right question."""
    try:
        told = json.loads(answer.body)
        if answer.id != question.id and (answer.status == 200 or (answer.id or "").startswith("soak-")):
            return f"an answer to {answer.id}"
        if answer.status == 200:
            return "right" if question.right(told) else f"wrong answer: {answer.body[:200]!r}"
        return "refused" if told["error"] and answer.status >= 429 else f"status {answer.status}"
    except (ValueError, LookupError, TypeError) as error:
        return f"not readable, {error!r}: {answer.status} {answer.body[:200]!r}"


class Callers:
    """Callers that ask again as soon as they are answered, each on one connection, until `stop`.

    found: how many answers were right, refused, or a closed connection. wrong: what else there was.
    """

    def __init__(self, port: int, question: Callable[[int], Question], callers: int = 8) -> None:
        self._port, self._question = port, question
        self._over, self._lock = threading.Event(), threading.Lock()
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(callers)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        i = number * 1_000_000
        while not self._over.is_set():
            i += 1
            question = self._question(i)
            try:
                told = judged(question, _ask(connection, question.path, question.body, question.id))
            except TimeoutError:
                told = f"no answer in {PATIENCE:g} s"
            except (OSError, http.client.HTTPException):
                told = "closed"
            self._note(told)
            if told != "right":
                connection.close()
                self._over.wait(0.05)
        if connection.sock is not None:
            connection.sock.setblocking(False)
            with suppress(OSError):
                if connection.sock.recv(1):
                    self._note("a second answer")
        connection.close()

    def _note(self, told: str) -> None:
        with self._lock:
            if told in ("right", "refused", "closed"):
                self.found[told] += 1
            else:
                self.wrong.append(told)


def back(port: int, question: Callable[[int], Question]) -> bool:
    """Whether the next right answer comes in time."""
    end = time.monotonic() + BACK
    for i in count():
        if time.monotonic() > end:
            break
        with suppress(OSError, http.client.HTTPException):
            asked = question(i)
            if judged(asked, post(port, asked.path, asked.body, asked.id)) == "right":
                return True
        time.sleep(0.05)
    return False


class Health:
    """Asks `/health` every 10 ms in a thread."""

    def __init__(self, port: int) -> None:
        self._port, self._over = port, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._times: list[float] = []

    def longest(self) -> float:
        """Seconds that an answer took since this was asked before; it waits for an answer to a new question."""
        seen = len(self._times)
        while self._thread.is_alive() and len(self._times) < seen + 2:
            time.sleep(0.01)
        times, self._times = self._times, []
        return max(times, default=0.0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        while not self._over.wait(0.01):
            began = time.monotonic()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()
            self._times.append(time.monotonic() - began)
        connection.close()
