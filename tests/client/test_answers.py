"""What comes back: chunks that may reach a motor, and errors of their class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime import client as module
from reflex_runtime.client import BadAnswer, BadRequest, ClientError, ServerError, Unreachable, errors, exchange

from .callers import Make
from .stub import ACTIONS, ANSWER, Stub, refusal, reply


@pytest.mark.parametrize("packed", [False, True])
def test_a_chunk_is_what_was_answered_and_new_fields_do_not_matter(make: Make, packed: bool) -> None:
    actions = np.array(ACTIONS, "<f4")
    body: dict[str, Any] = ANSWER | {"news": [1], "guard": {"clamped": 1}}
    if packed:
        body["actions"] = {"dtype": "<f4", "shape": [3, 2], "data": actions.tobytes()}
    with Stub([reply(body, packed=packed)]) as stub:
        chunk = make(stub.url).act(state=[1.0])
    assert chunk.actions.dtype == np.float32
    np.testing.assert_array_equal(chunk.actions, actions)
    assert (chunk.request_id, chunk.cache, chunk.attempts) == ("mine", "off", 1)
    assert chunk.timing == {"queue_ms": 0.5, "total_ms": 1.5}
    assert chunk.batch == {"id": 7, "size": 2, "reason": "idle"}
    assert chunk.guard == {"clamped": 1}
    assert (chunk.slot, chunk.model_version, chunk.policy_changed) == (None, None, False)
    assert chunk.raw["news"] == [1]


def test_headers_say_who_answered(make: Make) -> None:
    headers = {"X-Reflex-Policy-Slot": "a", "X-Reflex-Model-Version": "mod%C3%A8le%4012ab"}
    plain = {"X-Reflex-Model-Version": "50%25@12ab"}  # plain ASCII is never encoded
    moved = reply(ANSWER | {"policy_changed": True})
    with Stub([reply(headers=headers), reply(headers=plain), moved]) as stub:
        caller = make(stub.url)
        chunk = caller.act()
        assert (chunk.slot, chunk.model_version) == ("a", "modèle@12ab")
        assert caller.act().model_version == "50%25@12ab"
        assert caller.act().policy_changed


def test_a_time_that_no_float_can_hold_is_left_out(make: Make) -> None:
    with Stub([reply(ANSWER | {"timing": {"queue_ms": 0.5, "total_ms": 10**400}})]) as stub:
        assert make(stub.url).act().timing == {"queue_ms": 0.5}


PACKED = {"dtype": "<f4", "shape": [3, 2], "data": bytes(24)}
BAD: dict[str, Any] = {
    "not JSON": b"{",
    "deep": b"[" * 100_000,
    "no object": [],
    "no actions": {**ANSWER, "actions": None},
    "ragged": {**ANSWER, "actions": [[1.0], [1.0, 2.0]]},
    "flat": {**ANSWER, "actions": [1.0]},
    "none": {**ANSWER, "actions": []},
    "NaN": {**ANSWER, "actions": [[float("nan"), 0.0]] * 3},
    "words": {**ANSWER, "actions": [["a", "b"]] * 3},
    "huge": {**ANSWER, "actions": [[10**400, 0]] * 3},
    "num_actions": {**ANSWER, "num_actions": 4},
    "action_dim": {**ANSWER, "action_dim": 3},
    "short data": {**ANSWER, "actions": PACKED | {"data": bytes(20)}},
    "negative": {**ANSWER, "actions": PACKED | {"shape": [-3, -2]}},
    "objects": {**ANSWER, "actions": PACKED | {"dtype": "|O"}},
    "no dtype": {**ANSWER, "actions": {"shape": [3, 2], "data": bytes(24)}},
    "no list": {**ANSWER, "actions": PACKED | {"shape": 6}},
}


@pytest.mark.parametrize("case", BAD)
def test_an_answer_that_is_none_reaches_no_motor(make: Make, case: str) -> None:
    packed = isinstance(BAD[case], dict) and isinstance(BAD[case].get("actions"), dict)
    with Stub([reply(BAD[case], packed=packed)]) as stub:
        with pytest.raises(BadAnswer) as caught:
            make(stub.url).act(request_id="mine")
    assert not caught.value.retry_safe
    assert caught.value.request_id == "mine"
    assert len(stub.seen) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + bytes(2000),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"7d0\r\n" + bytes(2000) + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + bytes(2000),
    ],
)
def test_answers_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(exchange, "MAX_ANSWER", 1000)
    with Stub([answer, b""]) as stub, pytest.raises(BadAnswer, match="at most 1000"):
        make(stub.url).act()


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n{}"])
def test_what_is_not_http_is_a_bad_answer(make: Make, answer: bytes) -> None:
    with Stub([answer, b""]) as stub, pytest.raises((BadAnswer, Unreachable)):
        make(stub.url).act()


def test_every_way_to_end_a_body(make: Make) -> None:
    body = json.dumps(ANSWER).encode()
    kind = b"content-type: application/json\r\n"
    parts = b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in (body[:50], body[50:]))
    with Stub(
        [
            b"HTTP/1.1 100 Continue\r\n\r\n" + reply(),
            b"HTTP/1.1 200 OK\r\n" + kind + b"transfer-encoding: chunked\r\n\r\n" + parts + b"0\r\nTrailer: 1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n" + kind + b"connection: close\r\n\r\n" + body, b"",
        ]
    ) as stub:  # fmt: skip
        caller = make(stub.url)
        assert [caller.act().actions.shape for _ in range(3)] == [(3, 2)] * 3
        assert stub.connections == 1


def test_every_code_of_the_page_has_a_class() -> None:
    page = (Path(__file__).parents[2] / "docs/errors.md").read_text()
    sections = re.split(r"^## ", page, flags=re.M)[1:]
    codes = {section.partition("\n")[0]: re.findall(r"^### `(.*)`", section, re.M) for section in sections}
    kinds = {"Your request": {errors.BadRequest, errors.NotFound, errors.ServerBusy}, "Too much": {errors.ServerBusy}}
    kinds["Too late"] = {errors.StaleRequest}
    for section, expected in kinds.items():
        assert {errors.class_of(code, 400) for code in codes[section]} == expected
    of_server = {code: errors.class_of(code, 500) for code in codes["The server"]}
    assert {code for code, kind in of_server.items() if kind is errors.ServerBusy} == {
        "not_ready", "shutting_down", "degraded"
    }  # fmt: skip
    assert {code for code, kind in of_server.items() if kind is errors.ProcessorFailed} == {
        "processor_failed", "processor_hung"
    }  # fmt: skip
    assert module.__doc__ is not None
    for kind in (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ClientError)):
        assert kind.__name__ in module.__doc__, "the tree in the docstring has every class"
        assert kind.__doc__
        assert getattr(module, kind.__name__) is kind


@pytest.mark.parametrize("packed", [False, True])
def test_an_error_is_of_its_codes_class_and_carries_what_was_said(make: Make, packed: bool) -> None:
    told = {"error": "invalid_request", "message": "state: missing", "request_id": "theirs", "retry_safe": False}
    with Stub([reply(told | {"field": "state"}, 422, packed=packed)]) as stub:
        with pytest.raises(BadRequest) as caught:
            make(stub.url).act()
        assert str(caught.value) == "invalid_request (422): state: missing [request theirs]"
    error = caught.value
    assert (error.status, error.code, error.request_id) == (422, "invalid_request", "theirs")
    assert not error.retry_safe
    assert error.body["field"] == "state"


def test_an_unknown_code_is_a_server_error(make: Make) -> None:
    with Stub([refusal("brand_new", 418, retry_safe=False)]) as stub, pytest.raises(ServerError) as caught:
        make(stub.url).act()
    assert (type(caught.value), caught.value.code) == (BadRequest, "brand_new")


@pytest.mark.parametrize("status", [408, 425, 429])
def test_a_proxy_that_is_busy_does_not_say_that_the_request_is_bad(make: Make, status: int) -> None:
    with Stub([reply(b"<html>later</html>", status)]) as stub, pytest.raises(ServerError) as caught:
        make(stub.url).act()
    assert (type(caught.value), caught.value.retry_safe) == (ServerError, False)


def test_a_request_that_came_too_slowly_may_be_sent_again(make: Make) -> None:
    with Stub([refusal("request_timeout", 408)]) as stub, pytest.raises(errors.ServerBusy):
        make(stub.url, retries=0).act()


@pytest.mark.parametrize("body", [b"<html>Bad Gateway</html>", b"", [], {"error": 3}])
def test_an_error_in_other_words_promises_nothing(make: Make, body: Any) -> None:
    with Stub([reply(body, 503, {"retry-after": "1"})]) as stub, pytest.raises(ServerError) as caught:
        make(stub.url).act()
    assert caught.value.code == "http_503"
    assert not caught.value.retry_safe
    assert len(stub.seen) == 1
