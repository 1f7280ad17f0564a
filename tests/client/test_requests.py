"""What goes out: fields, pictures and ids."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest

from reflex_runtime.client import AsyncClient, Client

from .callers import Make
from .stub import PICTURE, UNNAMED, Stub, refusal, reply


def test_act_sends_msgpack_with_raw_pictures(make: Make) -> None:
    with Stub([reply(packed=True)]) as stub:
        make(stub.url + "/robots/", api_key="s3cret").act(
            image=PICTURE, images={"wrist": PICTURE[:, ::2]}, instruction="öffne", state=[1, 2.5], episode_id="e",
            robot_id="r", seed=2**63, priority="urgent", deadline_ms=250.0, request_id="mine", executed=3,
        )  # fmt: skip
    (seen,) = stub.seen
    assert (seen.method, seen.path) == ("POST", "/robots/act")
    assert seen.headers["authorization"] == "Bearer s3cret"
    assert seen.headers["content-type"] == seen.headers["accept"] == "application/msgpack"
    fields = seen.fields
    assert fields.pop("image") == {"dtype": "|u1", "shape": [6, 8, 3], "data": PICTURE.tobytes()}
    assert fields.pop("images")["wrist"]["data"] == PICTURE[:, ::2].tobytes()
    assert fields.pop("state") == {"dtype": "<f4", "shape": [2], "data": np.array([1, 2.5], "<f4").tobytes()}
    assert fields == {
        "instruction": "öffne", "episode_id": "e", "robot_id": "r", "seed": 2**63, "priority": "urgent",
        "deadline_ms": 250.0, "request_id": "mine", "executed": 3,
    }  # fmt: skip


def test_x7_the_episode_or_else_the_robot_is_named_in_a_header_too(make: Make) -> None:
    """So that a balancer in front of several servers, which does not read bodies, keeps an episode with its server."""
    with Stub([reply(), reply(), reply(), reply({})]) as stub:
        caller = make(stub.url)
        caller.act(episode_id="ep 7/ä", robot_id="arm")
        caller.act(robot_id="arm")
        caller.act()
        caller.report_outcome("ep 7/ä", True)
    named = [seen.headers.get("x-reflex-episode") for seen in stub.seen]
    assert named == ["ep%207%2F%C3%A4", "arm", None, "ep%207%2F%C3%A4"]


def test_numbers_of_numpy_are_numbers(make: Make) -> None:
    with Stub([reply()]) as stub:
        make(stub.url).act(seed=np.int64(3), executed=np.int32(8), deadline_ms=np.float32(250.0))
    assert stub.seen[0].fields == {"seed": 3, "executed": 8, "deadline_ms": 250.0, "request_id": "mine"}


@pytest.mark.parametrize(("encoding", "kind", "exact"), [("png", "PNG", True), ("jpeg", "JPEG", False)])
def test_pictures_go_out_compressed(make: Make, encoding: str, kind: str, exact: bool) -> None:
    with Stub([reply()]) as stub:
        make(stub.url, encoding=encoding).act(image=PICTURE, state=np.array([1.0, 2.0]))
    sent = stub.seen[0].fields["image"]
    with PIL.Image.open(io.BytesIO(sent)) as image:
        assert image.format == kind
        assert (np.asarray(image) == PICTURE).all() == exact


def test_files_go_out_as_they_are(make: Make) -> None:
    with Stub([reply()]) as stub:
        make(stub.url, encoding="png").act(image=b"\xff\xd8 a file")
    assert stub.seen[0].fields["image"] == b"\xff\xd8 a file"


def test_a_request_id_is_made_and_stays_through_every_attempt(make: Make) -> None:
    with Stub([refusal(), reply(UNNAMED), reply(UNNAMED)]) as stub:
        caller = make(stub.url)
        caller.act(request_id=None)
        caller.act(request_id=None)
    ids = [seen.fields["request_id"] for seen in stub.seen]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 32


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"image": PICTURE.astype(np.float32)}, "image: must be uint8"),
        ({"images": {"w": PICTURE[0]}}, r"images\['w'\]: must be uint8"),
        ({"state": [[1.0]]}, "state: must be numbers"),
        ({"state": ["a"]}, "state: must be numbers"),
        ({"images": [PICTURE]}, "images: must be a dict of pictures by camera, is list"),
        ({"deadline_ms": 0.0}, "deadline_ms=0.0: must be in"),
        ({"deadline_ms": "5"}, "deadline_ms='5': must be in"),
    ],
)
def test_what_no_server_could_take_is_not_sent(make: Make, fields: dict[str, Any], told: str) -> None:
    with Stub([]) as stub:
        with pytest.raises(ValueError, match=told):
            make(stub.url).act(**fields)
        assert stub.connections == 0


@pytest.mark.parametrize(
    "options",
    [
        {"url": "127.0.0.1:8000"}, {"url": "ftp://x"}, {"url": "http://"}, {"timeout": 0.0}, {"timeout": float("nan")},
        {"retries": -1}, {"encoding": "gif"}, {"api_key": "a\r\nb"}, {"url": "http://h:99999"}, {"verify": "ca.pem"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_wrong_settings_are_named(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(**{"url": "http://h"} | options)


def test_wrong_arguments_are_named_as_callers_write_them() -> None:
    with pytest.raises(ValueError, match="timeout='a': must be seconds > 0"):
        Client("http://127.0.0.1:1", timeout="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="retries='a': must be >= 0"):
        Client("http://127.0.0.1:1", retries="a")  # type: ignore[arg-type]
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(TypeError, match=r"^BaseClient\.predict\(\) got an unexpected keyword argument 'deadlin'"),
    ):
        client.predict(1, deadlin=3)  # type: ignore[call-arg]
    told = r"^act\(\) has no deadline; it has image, images, instruction, state,"
    with Client("http://127.0.0.1:1") as client, pytest.raises(TypeError, match=told):
        client.act(deadline=3)  # type: ignore[call-arg]
