"""Drafts and guidance over the wire of runtime processes (contract G9): the same tokens, and whose forms hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from reflex_runtime.core.errors import ConfigError, TooLarge
from reflex_runtime.ipc import messages
from reflex_runtime.ipc.messages import CheckDraft, Constraint, GenerateParams, LoadModel, guided
from reflex_runtime.llm.server.worker_engine import WorkerEngine, loading

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
        with pytest.raises(ConfigError, match=r"prompt_logprobs: 8 numbers of the prompt would be told, at most 6 are"):
            await said(engine, prompt="abcd", prompt_logprobs=1)
        assert len((await said(engine, prompt="abc", prompt_logprobs=1, max_tokens=2))[0]) == 2
        with pytest.raises(ConfigError, match=r"prompt_logprobs=21: must be in \[0, 20\] or absent"):
            await said(engine, prompt_logprobs=21)

    play(work)


async def said(engine: WorkerEngine, **params: Any) -> tuple[list[int], str]:
    params = {"stream_id": "s", "model_id": "m", "prompt": PROMPT, "max_tokens": 30, "temperature": 0.0} | params
    stream = await engine.submit(GenerateParams(**params), asyncio.Event(), None)
    outputs = [output async for output in stream]
    return [output.token_id for output in outputs], "".join(output.text for output in outputs)


def test_g9_a_draft_that_the_front_sends_changes_nothing_and_is_computed() -> None:
    async def work(engine: WorkerEngine) -> None:
        plain, _ = await said(engine, ignore_eos=True, max_tokens=200)
        assert engine._model.processor.drafted == 0
        for more in ({"draft_token_ids": plain}, {"draft_model": "ngram"}, {"draft_token_ids": [5] * 40}):
            assert (await said(engine, ignore_eos=True, max_tokens=200, **more))[0] == plain
        assert engine._model.processor.accepted > 0
        assert engine.state()["speculation"]["accepted_tokens"] == engine._model.processor.accepted

    play(work)


def test_g9_a_pair_that_cannot_be_is_told() -> None:
    async def work(engine: WorkerEngine) -> None:
        with pytest.raises(ConfigError, match="draft_model='small': must be 'ngram'"):
            await said(engine, draft_model="small")
        with pytest.raises(ConfigError, match=r"draft_token_ids: must be in \[0, 255\], not 3 to 999"):
            await said(engine, draft_token_ids=[3, 999])
        checked = await engine.check_draft(CheckDraft("m", "small"))
        assert not checked.compatible
        assert "drafts of another model are not served" in checked.reason
        assert (await engine.check_draft(CheckDraft("m"))).compatible

    play(work)


def test_g9_check_draft_says_how_far_the_model_would_say_the_same() -> None:
    async def work(engine: WorkerEngine) -> None:
        plain, _ = await said(engine, ignore_eos=True)
        for right in (0, 1, 7, 12):
            draft = [*plain[:right], (plain[right] + 1) % 256, *plain[right + 1 : 12]]
            checked = await engine.check_draft(CheckDraft("m", prompt=PROMPT, draft_token_ids=draft))
            assert (checked.accepted, checked.token_ids) == (right, plain[: right + 1])
        whole = CheckDraft("m", prompt_token_ids=list(PROMPT.encode()), draft_token_ids=plain[:12])
        checked = await engine.check_draft(whole)
        assert (checked.compatible, checked.accepted, checked.token_ids) == (True, 12, plain[:13])
        long = CheckDraft("m", prompt=PROMPT, draft_token_ids=[(plain[0] + 1) % 256] * 6000)
        assert (await engine.check_draft(long)).accepted == 0
        await said(engine)
        runtime = engine._model
        assert runtime.running == runtime.waiting == 0  # what follows a mistake is not generated
        for wrong in ({}, {"prompt": "a", "prompt_token_ids": [1]}, {"prompt": "a" * 9000}):
            with pytest.raises((ConfigError, TooLarge)):
                await engine.check_draft(CheckDraft("m", draft_token_ids=[1], **wrong))

    play(work)


def test_g9_guidance_is_the_form_of_an_output() -> None:
    async def work(engine: WorkerEngine) -> None:
        regex = {"mode": "regex", "regex": "[0-9]{3}-[0-9]{2}"}
        assert re.fullmatch(regex["regex"], (await said(engine, guidance=regex))[1])
        choice = {"mode": "choice", "choice": ["left", "right"]}
        assert (await said(engine, guidance=choice))[1] in choice["choice"]
        with pytest.raises(ConfigError, match=r"guidance\.mode='cfg': must be one of json, regex, choice, grammar"):
            await said(engine, guidance={"mode": "cfg"})

    play(work)


@pytest.mark.parametrize(
    ("guidance", "constraint"),
    [
        ({"mode": "json"}, ("json", '{"type":"object"}')),
        ({"mode": "json", "schema": {"type": "array"}}, ("json", '{"type":"array"}')),
        ({"mode": "choice", "choice": ["a", "b"]}, ("choice", '["a","b"]')),
        ({"mode": "grammar", "grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
    ],
)
def test_g9_guidance_means_a_constraint(guidance: dict[str, Any], constraint: tuple[Any, str]) -> None:
    found = guided(GenerateParams(guidance=guidance, max_tokens=5))
    assert (found.constraint, found.guidance, found.max_tokens) == (Constraint(*constraint), None, 5)


@pytest.mark.parametrize(
    ("guidance", "told"),
    [
        ({}, "guidance.mode=None: must be one of"),
        ({"mode": ["json"]}, "guidance.mode="),
        ({"mode": "json", "schema": "{}"}, "guidance.schema: must be a JSON Schema, an object"),
        ({"mode": "json", "regex": "a"}, "guidance.regex: is no field of mode 'json'"),
        ({"mode": "choice", "choice": []}, "guidance.choice: must be a list of 1 to 1000 texts"),
        ({"mode": "choice", "choice": ["a", ""]}, "guidance.choice: must be"),
        ({"mode": "json", "schema": {"const": msgspec.msgpack.Ext(1, b"a")}}, "guidance.schema: is no JSON"),
        ({"mode": "choice", "choice": ["\ud800"]}, "guidance.choice: is no JSON"),
        ({"mode": "regex"}, "guidance.regex: must be a text"),
        ({"mode": "regex", "regex": ""}, "regex: has 0 characters"),
    ],
)
def test_g9_guidance_that_is_none_is_told(guidance: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        guided(GenerateParams(guidance=guidance))
    assert told in caught.value.message


def test_g9_guidance_beside_a_constraint_is_refused() -> None:
    both = GenerateParams(guidance={"mode": "json"}, constraint=Constraint("regex", "a"))
    with pytest.raises(ConfigError, match="send one"):
        guided(both)
    assert msgspec.json.decode(msgspec.json.encode(both), type=GenerateParams) == both
