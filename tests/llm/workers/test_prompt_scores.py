"""What a runtime process tells of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc import messages
from reflex_runtime.ipc.messages import GenerateParams, LoadModel
from reflex_runtime.llm.server.local_model import WorkerEngine, loading

from .toy_worker import make

PROMPT = "one two three"


@asynccontextmanager
async def loaded() -> AsyncIterator[WorkerEngine]:
    load = loading(make, lambda: None)
    engine = await load(LoadModel("m", "toy", {"max_num_seqs": 4}))
    assert isinstance(engine, WorkerEngine)
    try:
        yield engine
    finally:
        await engine.close(False, 5.0)


def play(work: Callable[[WorkerEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with loaded() as engine:
            await work(engine)

    asyncio.run(main())


def test_l9_a_runtime_process_tells_no_more_of_a_prompt_than_a_front_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_SCORES", 6)

    async def work(engine: WorkerEngine) -> None:
        with pytest.raises(ConfigError, match=r"prompt_logprobs: 8 numbers of the prompt are too many, at most 6 are"):
            await said(engine, prompt="abcd", prompt_logprobs=1)
        assert len((await said(engine, prompt="abc", prompt_logprobs=1, max_tokens=2))[0]) == 2
        with pytest.raises(ConfigError, match=r"prompt_logprobs=21: must be in \[0, 20\]"):
            await said(engine, prompt_logprobs=21)

    play(work)


async def said(engine: WorkerEngine, **params: Any) -> tuple[list[int], str]:
    params = {"stream_id": "s", "model_id": "m", "prompt": PROMPT, "max_tokens": 30, "temperature": 0.0} | params
    stream = await engine.submit(GenerateParams(**params), asyncio.Event(), None)
    outputs = [output async for output in stream]
    return [output.token_id for output in outputs], "".join(output.text for output in outputs)
