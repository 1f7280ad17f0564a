"""Large bodies: bounded before anything is made of them, decoded beside the loop, and counted while they are held."""

from __future__ import annotations

import asyncio
import base64
import gc
import itertools
import json
import logging
import sys
import threading
import tracemalloc
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import msgpack
import pytest

from reflex_runtime.llm.api import decode
from reflex_runtime.llm.api import requests as openai
from reflex_runtime.llm.app import ModelServer
from reflex_runtime.robots.policy.observation import InvalidRequest
from reflex_runtime.robots.serving.question import Question
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.wires import act
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.web import app as application
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import Overloaded
from reflex_runtime.web.pictures import PIECE, picture_bytes
from reflex_runtime.web.request import LARGE, Bodies, Reading, Seldom
from serving.harness import PATIENCE, STATE
from serving.in_process import Caller, nothing, with_app
from serving.openai_toy import Model, Toy, toy_model
from web.held import HELD, hold

MB = 2**20


class Held:
    """A request as `Bodies` sees it."""

    def __init__(self) -> None:
        self.held = 0


def _bodies(most: int) -> Bodies:
    return Bodies(most, lambda now: None)


# -- the sum of what is held -------------------------------------------------------------------------------------------


def test_h4_more_than_the_sum_is_refused_and_what_is_released_may_come_again() -> None:
    bodies, first, second = _bodies(100), Held(), Held()
    bodies.take(first, 60)
    bodies.take(second, 40)
    with pytest.raises(Overloaded) as caught:
        bodies.take(second, 1)
    assert (caught.value.http_status, caught.value.retry_safe, caught.value.retry_after) == (503, True, 1.0)
    assert (bodies.held, first.held, second.held) == (100, 60, 40)
    bodies.release(first)
    bodies.release(first)
    bodies.take(second, 60)
    assert bodies.held == second.held == 100


def test_h4_a_body_that_is_alone_is_taken_whatever_the_sum_may_be() -> None:
    bodies, alone = _bodies(100), Held()
    bodies.take(alone, 90)
    bodies.take(alone, 90)
    with pytest.raises(Overloaded):
        bodies.take(Held(), 1)


def test_a_refusal_of_bodies_is_one_line_in_the_log_until_it_was_quiet(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("reflex_runtime.web.request.time.monotonic", lambda: now)
    bodies = _bodies(10)
    bodies.take(Held(), 10)
    with caplog.at_level(logging.WARNING):
        for later in (0.0, 1.0, Seldom.QUIET, Seldom.QUIET + 1.0, 2.0):
            now += later
            with pytest.raises(Overloaded):
                bodies.take(Held(), 1)
    assert [record.message for record in caplog.records] == [
        "10 bytes of request bodies are held: more are refused (--max-bodies-mb)"
    ] * 2


async def _until(what: Callable[[], bool]) -> None:
    while not what():  # noqa: ASYNC110
        await asyncio.sleep(0)


def _padded(size: int, **fields: Any) -> bytes:
    body = json.dumps({"state": STATE} | fields).encode()
    return body + b" " * (size - len(body))


def test_h4_bodies_over_max_bodies_mb_in_all_are_503_and_taken_again_once_there_is_room(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "STALLED", inf)  # none is ended to make room

    async def check(app: App, runtime: PolicyRuntime) -> None:
        slow, refused, later = Caller(app), Caller(app), Caller(app)
        slow.say(bytes(900_000), more=True)
        await _until(lambda: app.bodies.held == 900_000)
        refused.say(_padded(50_000), more=True)
        refused.say(b" " * 100_000)
        answer = await refused.answer()
        assert (answer.status, answer.code, answer.json["retry_safe"]) == (503, "overloaded", True)
        assert answer.headers["retry-after"] == "1"
        assert app.bodies.held == 900_000
        slow.leave()
        await _until(lambda: app.bodies.held == 0)
        later.say(_padded(150_000))
        assert (await later.answer()).status == 200
        assert app.bodies.held == 0

    with_app(tiny, check, max_bodies_mb=1.0)


def test_h4_a_whole_body_counts_until_it_is_answered(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        first, second, third = Caller(app), Caller(app), Caller(app)
        first.say(_padded(700_000))
        second.say(_padded(700_000))
        assert (await second.answer()).status == 503
        assert (await first.answer()).status == 200
        third.say(_padded(700_000))
        assert (await third.answer()).status == 200
        assert app.bodies.held == 0

    with_app(tiny, check, max_bodies_mb=1.0)


def test_l9_bodies_over_max_bodies_mb_in_all_are_503_and_a_prompt_is_let_go_once_it_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(application, "STALLED", inf)
    runner = Model()

    def asked(size: int) -> bytes:
        body = json.dumps({"model": "toy", "prompt": "a", "max_tokens": 1}).encode()
        return body + b" " * (size - len(body))

    async def main() -> None:
        config = LLMServeConfig(max_bodies_mb=1.0)
        model = toy_model(runner, config)
        await model.start()
        app = ModelServer(model).app
        runner.stop()
        queued, slow, refused, later = (Caller(app, "/v1/completions") for _ in range(4))
        queued.say(asked(900_000))
        await _until(lambda: runner.inside)
        assert app.bodies.held == 0  # it was understood: nothing of its body is needed any more
        slow.say(bytes(900_000), more=True)
        await _until(lambda: app.bodies.held == 900_000)
        refused.say(asked(200_000))
        answer = await refused.answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert (answer.headers["x-should-retry"], answer.headers["retry-after"]) == ("true", "1")
        slow.leave()
        await _until(lambda: app.bodies.held == 0)
        runner.go()
        later.say(asked(200_000))
        assert [(await queued.answer()).status, (await later.answer()).status] == [200, 200]
        assert app.bodies.held == 0
        await model.stop(asyncio.get_running_loop().time() + 1.0, nothing)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


# -- beside the loop ---------------------------------------------------------------------------------------------------


def test_h4_a_large_body_is_decoded_beside_the_loop_and_a_small_one_on_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    decode = act.decode

    def seen(body: bytes, packed: bool) -> Question:
        threads.append(threading.current_thread().name)
        return decode(body, packed)

    monkeypatch.setattr(act, "decode", seen)

    async def check(app: App, runtime: PolicyRuntime) -> None:
        for size in (1000, LARGE + 1):
            caller = Caller(app)
            caller.say(_padded(size))
            assert (await caller.answer()).status == 200
        wrong = Caller(app)
        wrong.say(_padded(LARGE + 1, seed=-1))
        assert (await wrong.answer()).status == 422

    with_app(tiny, check)
    here = threading.current_thread().name
    assert threads[0] == here
    assert [name.rpartition("_")[0] for name in threads[1:]] == ["reflex-decode"] * 2


@pytest.mark.parametrize("size", [1000, LARGE + 1], ids=["small", "large"])
@pytest.mark.parametrize("fields", [{}, {"seed": -1}, {"nonsense": 1}], ids=["fine", "wrong", "unknown"])
def test_h4_nothing_keeps_a_body_once_it_is_answered(
    tiny: Path, size: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until the next collection: they are rare here, and bodies large."""

    async def check(app: App, runtime: PolicyRuntime) -> None:
        go, body = hold(monkeypatch), _padded(size, **fields)
        caller, unsettled = Caller(app), runtime.batcher.scheduler.unsettled
        alone = sys.getrefcount(body)
        caller.say(body)
        if not fields:
            await _until(lambda: bool(unsettled("prod")))
            await _until(lambda: sys.getrefcount(body) == alone)  # it is not kept while it is queued
            go.set()
        assert (await caller.answer()).status == (422 if fields else 200)
        await asyncio.sleep(0)
        with app.bodies._decoder:  # its thread has ended
            pass
        assert sys.getrefcount(body) == alone

    gc.disable()
    try:
        with_app(tiny, check, **HELD)
    finally:
        gc.enable()


def test_failed_requests_leave_nothing_for_the_collector(tiny: Path) -> None:
    """Neither those that failed alone nor those in the calls that were repeated in parts."""
    robots = itertools.count()

    async def check(app: App, runtime: PolicyRuntime) -> None:
        async def ask() -> int:
            caller = Caller(app)
            caller.say(_padded(1000, robot_id=f"r{next(robots)}"))
            status = (await caller.answer()).status
            caller.leave()
            return status

        answers = list(await asyncio.gather(*(ask() for _ in range(16))))
        gc.collect()
        for _ in range(8):
            answers += await asyncio.gather(*(ask() for _ in range(16)))
        assert answers.count(500) > 5
        assert answers.count(200) > 5
        await asyncio.sleep(0)
        assert gc.collect() < 10

    gc.disable()
    try:
        with_app(tiny, check, inject_fault=("prod:raise:0.2",))
    finally:
        gc.enable()


def test_b16_a_caller_that_leaves_while_its_body_is_decoded_is_never_asked_of_the_policy(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go = threading.Event(), threading.Event()
    decode = act.decode

    def slow(body: bytes, packed: bool) -> Question:
        inside.set()
        assert go.wait(20.0)
        return decode(body, packed)

    monkeypatch.setattr(act, "decode", slow)

    async def check(app: App, runtime: PolicyRuntime) -> None:
        caller = Caller(app)
        caller.say(_padded(LARGE + 1))
        await _until(inside.is_set)
        caller.leave()
        go.set()
        await asyncio.wait({caller.task})
        assert caller.head is None
        assert runtime.batcher.scheduler.unsettled("prod") == 0
        assert b'outcome="cancelled",policy_slot="prod"} 1.0' in runtime.metrics.render()

    with_app(tiny, check)


def test_l9_a_large_body_of_a_model_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    decode = openai.decode

    def seen(*given: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return decode(*given)

    monkeypatch.setattr(openai, "decode", seen)
    with Toy() as toy:
        assert toy.complete("a", max_tokens=1).status == 200
        assert toy.complete("x" * (LARGE + 1), max_tokens=1).status == 400
    assert threads[0] != "reflex-decode"
    assert threads[1] == "reflex-decode"


# -- bounded before anything is made of them ---------------------------------------------------------------------------


def _peak(call: Callable[[], Any]) -> int:
    """The most memory that Python's objects took during a call, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BOMBS: dict[str, tuple[bytes, bool, str]] = {
    "keys": (b"{" + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}", False, "k0"),
    "numbers": (b'{"state":[' + b"1," * 10**6 + b"1]}", False, "state"),
    "numbers behind a NaN": (b'{"seed":NaN,"state":[' + b"1," * 10**6 + b"1]}", False, "state"),
    "images": (b'{"images":{' + b",".join(b'"%d":""' % i for i in range(200_000)) + b"}}", False, "39999"),
    "msgpack numbers": (msgpack.packb({"state": [1] * 10**6}), True, "state"),
    "msgpack images": (msgpack.packb({"images": {str(i): b"" for i in range(200_000)}}), True, "images"),
    "msgpack dimensions": (
        msgpack.packb({"state": {"dtype": "<f4", "shape": [1] * 10**6, "data": b""}}), True, "state"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_h4_no_millions_of_objects_are_made_of_a_body(name: str) -> None:
    body, packed, field = BOMBS[name]

    def refused() -> None:
        with pytest.raises(InvalidRequest) as caught:
            act.decode(body, packed)
        assert caught.value.details["field"] == field

    assert _peak(refused) < 2 * len(body) + 8 * MB


def _completion(prompt: str) -> bytes:
    return b'{"model":"m","prompt":%s}' % prompt.encode()


def test_l9_token_ids_by_the_hundred_thousand_are_what_they_are_by_the_dozen() -> None:
    ids = [(i * 7919) % 50_000 for i in range(150_000)]
    assert openai.completion(_completion(json.dumps(ids))).prompts == [ids]
    assert openai.completion(_completion(json.dumps(ids, separators=(",", ":")))).prompts == [ids]
    spaced = "[ " + " , ".join(map(str, ids)) + " ]"
    assert openai.completion(_completion(spaced)).prompts == [ids]
    lists = [ids[:70_000], ids[70_000:70_001], ids[70_001:]]
    assert openai.completion(_completion(json.dumps(lists))).prompts == lists
    texts = ["a," * 30_000, "b"]
    assert openai.completion(_completion(json.dumps(texts))).prompts == texts
    text = "1,2;" * 100_000
    assert openai.completion(_completion(json.dumps(text))).prompts == [text]


MANY = 100_000
TOO_MANY: dict[str, tuple[str, str]] = {
    "tokens": ("prompt", "[" + "1," * decode.MOST_TOKENS + "1]"),
    "prompts": ("prompt", "[" + "[1]," * MANY + "[1]]"),
    "not whole": ("prompt", "[" + "1," * MANY + "1.5]"),
    "not numbers": ("prompt", "[" + "1," * MANY + "null]"),
    "lists and numbers": ("prompt", "[" + "1," * MANY + "[1]]"),
    "deep": ("prompt", "[[" + "1," * MANY + "[1]]]"),
    "an empty one": ("prompt[1]", "[[" + "1," * MANY + "1],[]]"),
    "an object": ("prompt", '{"a":[' + "1," * MANY + "1]}"),
    "an object without a name": ("prompt", "{}" + " " * MANY),
    "texts": ("prompt", "[" + '"",' * MANY + '""]'),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_l9_a_prompt_of_too_much_is_400_and_named(name: str) -> None:
    param, prompt = TOO_MANY[name]
    with pytest.raises(openai.BadRequest) as caught:
        openai.completion(_completion(prompt))
    assert caught.value.param == param


CHATS: dict[str, tuple[str, str]] = {
    "messages": ("messages", '"messages":[' + '{"role":"user","content":""},' * MANY + '{"role":"user"}]'),
    "parts": (
        "messages",
        '"messages":[{"role":"user","content":[' + '{"type":"text","text":""},' * MANY + '{"type":"text","text":""}]}]',
    ),
    "nothings": ("messages[0].content[0].type", '"messages":[{"role":"user","content":[' + "{}," * MANY + "{}]}]"),
    "tools": ("tools", '"messages":[],"tools":[' + "{}," * MANY + "{}]"),
    "stops": ("stop", '"messages":[],"stop":[' + '"",' * MANY + '""]'),
    "unknown": ("nonsense", '"messages":[],"nonsense":[' + "1," * MANY + "1]"),
}


@pytest.mark.parametrize("name", CHATS)
def test_l9_a_conversation_of_too_much_is_400_and_named(name: str) -> None:
    param, fields = CHATS[name]
    body = b'{"model":"m",%s}' % fields.encode()

    def refused() -> None:
        with pytest.raises(openai.BadRequest) as caught:
            openai.chat(body)
        assert caught.value.param == param

    assert _peak(refused) < 3 * len(body) + MB


def test_l9_a_long_conversation_with_many_commas_is_taken() -> None:
    content = "role, type, " * 20_000 + '"role" and "type"'
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}] * 3}).encode()
    asked = openai.chat(body)
    assert asked.conversation is not None
    assert asked.conversation.messages == [{"role": "user", "content": content}] * 3


def test_max_bodies_mb_has_a_range() -> None:
    assert LLMServeConfig(max_bodies_mb=1.0).max_bodies_mb == 1.0
    with pytest.raises(ValueError, match=r"--max-bodies-mb=0.5: must be in \[1, 1000000\] MB"):
        LLMServeConfig(max_bodies_mb=0.5)


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_h1_a_picture_decoded_in_pieces_is_the_same_and_padding_stands_at_its_end() -> None:
    for size in (PIECE // 4 * 3 - 1, PIECE // 4 * 3, 2 * PIECE + 1):
        data = bytes(i * 31 % 256 for i in range(size))
        assert picture_bytes(base64.b64encode(data).decode(), "image") == data
    piece = "A" * (PIECE - 2)
    for wrong in (piece + "==" + "AAAA", piece + "AA" + "A", piece + "!!", "A" * PIECE + "A==="):
        with pytest.raises(InvalidRequest, match="not base64"):
            picture_bytes(wrong, "image")


# -- messages of unknown size ------------------------------------------------------------------------------------------


def test_w34_few_messages_of_unknown_size_are_read_at_a_time_and_a_slow_one_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reflex_runtime.web.request.STALLED", 0.01)

    async def check() -> None:
        reading, far = Reading(1), asyncio.get_running_loop().time() + PATIENCE
        came: list[str] = []

        async def read(name: str, sent: asyncio.Event) -> None:
            async with reading.one(far):
                await sent.wait()
                came.append(name)

        never, at_once = asyncio.Event(), asyncio.Event()
        at_once.set()
        first = asyncio.create_task(read("first", never))
        await asyncio.sleep(0)
        stalled = asyncio.create_task(read("stalled", never))
        await asyncio.sleep(0)
        last = asyncio.create_task(read("last", at_once))
        await asyncio.gather(first, stalled, last, return_exceptions=True)
        assert [type(task.exception()) for task in (first, stalled, last)] == [TimeoutError, TimeoutError, type(None)]
        assert came == ["last"]
        with pytest.raises(TimeoutError):
            async with reading.one(asyncio.get_running_loop().time() + 0.01):
                await never.wait()
        async with reading.one(far):
            came.append("again")

    asyncio.run(check())
