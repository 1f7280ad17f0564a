"""The form of errors, which a server and its supervisor share."""

from __future__ import annotations

import json

import msgpack
import pytest

from reflex_runtime.core.errors import QueueFull
from reflex_runtime.web.errors import PLAIN
from reflex_runtime.web.request import own_id


@pytest.mark.parametrize("sent", [b"", b"a" * 257, b"a\tb", "é".encode(), b"\xff", b" a", b"a\x7f"])
def test_l9_an_id_that_cannot_be_repeated_as_it_came_is_not(sent: bytes) -> None:
    assert own_id(sent) is None
    assert own_id(b"a" * 256) == "a" * 256
    assert own_id(b"mine 1") == "mine 1"


def test_h3_an_error_says_the_same_in_json_and_msgpack() -> None:
    error = QueueFull("the queue is full", retry_after=2.0, max_queue=4)
    plain, packed = PLAIN(error, "r1", False), PLAIN(error, "r1", True)
    assert (plain.content_type, packed.content_type) == (b"application/json", b"application/msgpack")
    found = json.loads(plain.body)
    assert found == msgpack.unpackb(packed.body)
    assert found["error"] == "queue_full"
    assert (found["request_id"], found["retry_safe"], found["max_queue"]) == ("r1", True, 4)
    assert plain.status == packed.status == 503
