"""Both clients against a real `reflex serve`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.client import AsyncClient, BadRequest, Client
from serving.exports import expected, write_tiny
from serving.harness import Server
from serving.place import Place

from .callers import Make, Time
from .stub import PICTURE


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def server(export: Path) -> Iterator[Server]:
    with Server(export, "--api-key", "key") as running:
        yield running


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    export = write_tiny(tmp_path_factory.mktemp("seeing"), cameras=("image", "wrist"))
    with Server(export, "--api-key", "key") as running:
        yield running


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_real_server_answers(make: Make, server: Server) -> None:
    caller = make(url_of(server), api_key="key")
    for seed in range(3):
        chunk = caller.act(
            state=np.array([0.1, -0.2]), seed=seed, episode_id="épisode", robot_id="r",
            priority="urgent", deadline_ms=60_000.0, request_id=f"request {seed} ü",
        )  # fmt: skip
        np.testing.assert_allclose(chunk.actions, expected([0.1, -0.2], seed), atol=1e-6)
        assert chunk.request_id == f"request {seed} ü"
        assert chunk.timing["total_ms"] > 0.0
        assert chunk.batch["size"] == 1
    assert caller.act(state=[0.1, -0.2], request_id="x").actions.tobytes() == (
        caller.act(state=[0.1, -0.2], request_id="x").actions.tobytes()
    )


@pytest.mark.parametrize("encoding", ["raw", "png", "jpeg"])
def test_real_server_takes_every_encoding(make: Make, seeing: Server, encoding: str) -> None:
    caller = make(url_of(seeing), api_key="key", encoding=encoding)
    assert caller.act(image=PICTURE, images={"wrist": PICTURE}, state=[0.0, 0.0]).actions.shape == (3, 2)


def test_real_server_errors(make: Make, server: Server) -> None:
    caller = make(url_of(server), api_key="key")
    with pytest.raises(BadRequest) as caught:
        caller.act(state=[1.0, 2.0, 3.0], request_id="mine")
    assert caught.value.body["field"] == "state"
    assert caught.value.request_id == "mine"
    with pytest.raises(BadRequest, match="state"):
        caller.act(state=[1.0, float("nan")])
    with pytest.raises(BadRequest, match="image"):
        caller.act(state=[1.0, 2.0], image=b"no picture")
    with pytest.raises(BadRequest):
        make(url_of(server), api_key="other").act(state=[1.0, 2.0])
    assert caller.health()["state"] == "ready"
    assert caller.get("/config")["export"]["model_id"] == "tiny"


def test_real_server_many_at_once(server: Server) -> None:
    with Client(url_of(server), "key") as client, ThreadPoolExecutor(8) as pool:
        chunks = list(pool.map(lambda seed: client.act(state=[0.1, -0.2], seed=seed), range(64)))
    for seed, chunk in enumerate(chunks):
        np.testing.assert_allclose(chunk.actions, expected([0.1, -0.2], seed), atol=1e-6)

    async def together() -> list[Any]:
        async with AsyncClient(url_of(server), "key") as client:
            return await asyncio.gather(*(client.act(state=[0.1, -0.2], seed=seed) for seed in range(64)))

    for seed, chunk in enumerate(asyncio.run(together())):
        np.testing.assert_allclose(chunk.actions, expected([0.1, -0.2], seed), atol=1e-6)


def test_a_restart_of_a_real_server_is_waited_out(make: Make, export: Path) -> None:
    time = Time()
    with contextlib.ExitStack() as stack:
        where = ("--port", str(stack.enter_context(Place()).port))
        with Server(export, *where) as first:
            caller = make(url_of(first), time)
            assert caller.act(state=[0.0, 0.0]).attempts == 1
            assert first.stop() == 0

        def come_up(number: int) -> None:  # while the client sleeps, and no sooner
            stack.enter_context(Server(export, *where))

        time.during = come_up
        chunk = caller.act(state=[0.1, -0.2], seed=3)
    np.testing.assert_allclose(chunk.actions, expected([0.1, -0.2], 3), atol=1e-6)
    assert (chunk.attempts, len(time.pauses)) == (2, 1)
