"""L9: what the model says of a prompt: `echo` with `logprobs`, as evaluations ask for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from late import Late
from llm.workers.test_workers import Fleet
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import BATCH_GENERATE, GenerateParams, SamplingParams
from reflex_runtime.llm.api.answers import Answer
from reflex_runtime.llm.engine.llm_engine import LLMEngine
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer
from serving.openai_toy import Model, Toy

openai = Late("openai")

PROMPT = "robots move"


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy(Model(max_model_len=512)) as made:
        yield made


@pytest.fixture(scope="module")
def told() -> Any:
    """What an engine of the toy says of the prompt."""
    engine = LLMEngine()
    engine.add_request(PROMPT, SamplingParams.greedy(1), prompt_logprobs=3)
    return engine.step()[0].prompt_logprobs


def texts(logprobs: Any) -> str:
    return "".join(logprobs["tokens"])


def test_l9_echo_with_logprobs_tells_the_prompt_and_then_the_answer(toy: Toy, told: Any) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{toy.port}/v1", api_key="none")
    answer = client.completions.create(model="toy", prompt=PROMPT, max_tokens=3, temperature=0, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(len(choice.text)))
    assert choice.logprobs.token_logprobs[0] is None
    found = choice.logprobs.token_logprobs[1 : len(PROMPT)]
    np.testing.assert_allclose(found, [each.logprob for each in told], atol=1e-6)
    tops = choice.logprobs.top_logprobs
    assert tops is not None
    assert tops[0] is None
    assert all(2 <= len(top) <= 3 for top in tops[1:])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 3)


def test_l9_max_tokens_0_with_echo_is_the_prompt_alone(toy: Toy, told: Any) -> None:
    answer = toy.complete([PROMPT, "a"], max_tokens=0, echo=True, logprobs=0).json
    first, second = answer["choices"]
    assert (first["text"], first["finish_reason"], texts(first["logprobs"])) == (PROMPT, "length", PROMPT)
    assert (second["text"], second["logprobs"]["token_logprobs"]) == ("a", [None])
    np.testing.assert_allclose(first["logprobs"]["token_logprobs"][1:], [each.logprob for each in told], atol=1e-6)
    assert answer["usage"]["completion_tokens"] == 0
    assert toy.complete(PROMPT, max_tokens=0, echo=True).json["choices"][0]["text"] == PROMPT


def test_l9_the_prompt_alone_may_fill_the_context(toy: Toy) -> None:
    longest = toy.runner.max_model_len
    for prompt in ([97] * longest, "a" * longest):
        answer = toy.complete(prompt, max_tokens=0, echo=True, logprobs=0).json
        assert answer["choices"][0]["text"] == "a" * longest
        assert toy.error(toy.complete(prompt, max_tokens=1, echo=True))["code"] == "context_length_exceeded"
    with pytest.raises(ConfigError, match=r"^prompt_only=True: needs max_tokens=1$"):
        GenerateParams(prompt_only=True, max_tokens=2)


def test_l9_a_stream_begins_with_the_prompt_and_what_the_model_says_of_it(toy: Toy) -> None:
    asked = {"max_tokens": 3, "echo": True, "logprobs": 1}
    (whole,) = toy.complete(PROMPT, **asked).json["choices"]
    with toy.open(PROMPT, stream=True, **asked) as caller:
        caller.read()
    parts = [event["choices"][0] for event in caller.said]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [each for part in parts if part["logprobs"] for each in part["logprobs"][name]]
        assert told == whole["logprobs"][name]
    with toy.open(PROMPT, stream=True, **asked | {"max_tokens": 0}) as caller:
        caller.read()
    parts = [event["choices"][0] for event in caller.said]
    assert [(part["text"], part["finish_reason"]) for part in parts] == [(PROMPT, None), ("", "length")]


def test_l9_every_choice_tells_the_same_prompt(toy: Toy) -> None:
    choices = toy.complete(PROMPT, n=3, max_tokens=2, temperature=1, seed=1, echo=True, logprobs=1).json["choices"]
    found = [choice["logprobs"]["token_logprobs"][1 : len(PROMPT)] for choice in choices]
    assert len(found) == 3
    np.testing.assert_allclose(found, [found[0]] * 3, atol=1e-6)


def test_l9_a_scored_prompt_uses_no_cached_blocks(toy: Toy) -> None:
    long = "the same long beginning of many prompts " * 4
    assert toy.complete(long, max_tokens=1).status == 200
    answer = toy.complete(long, max_tokens=1, echo=True, logprobs=0).json
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(long) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_l9_what_is_told_of_a_prompt_is_written_beside_the_loop(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    read = Answer._scored
    others = []

    def scored(self: Answer, index: int) -> Any:
        others.append(threading.current_thread().name != "toy-server")
        return read(self, index)

    monkeypatch.setattr(Answer, "_scored", scored)
    assert toy.complete(PROMPT, max_tokens=2, echo=True, logprobs=1, n=2, stream=stream).status == 200
    assert others == [True, True]


@pytest.mark.parametrize(("fields", "beside"), [({}, False), ({"logprobs": 1}, True)])
def test_l9_logprobs_of_an_answer_are_written_beside_the_loop(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, fields: Any, beside: bool
) -> None:
    read, names = Answer.end, list[str]()

    def end(self: Answer) -> bytes:
        names.append(threading.current_thread().name)
        return read(self)

    monkeypatch.setattr(Answer, "end", end)
    assert toy.complete(PROMPT, n=2, max_tokens=2, **fields).status == 200
    assert [name != "toy-server" for name in names] == [beside]


def test_l9_long_lists_of_token_ids_are_echoed_by_a_thread(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = ByteTokenizer.decode, set[str]()

    def decode(self: ByteTokenizer, ids: Any, whole: bool) -> str:
        names.add(threading.current_thread().name)
        return read(self, ids, whole)

    monkeypatch.setattr(ByteTokenizer, "decode", decode)
    choices = toy.complete([[97] * 400, [98] * 400, [99] * 400], max_tokens=0, echo=True).json["choices"]
    assert [choice["text"] for choice in choices] == ["a" * 400, "b" * 400, "c" * 400]
    assert names.isdisjoint({"toy-server"})


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: must be >= 1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unknown field"),
        ({"prompt": ["robots " * 40] * 8, "n": 16, "echo": True, "logprobs": 20}, "echo", "at most 524288 are"),
    ],
)
def test_l9_what_cannot_be_told_is_refused_by_name(toy: Toy, fields: Any, param: str, says: str) -> None:
    answer = toy.complete(**{"prompt": PROMPT} | fields)
    error = toy.error(answer)
    assert (answer.status, error["param"]) == (400, param)
    assert says in error["message"]


@pytest.mark.parametrize("prompt", ["hi", "a prompt of more than one block of the cache"])
@pytest.mark.parametrize("stream", [False, True])
def test_l9_a_prompt_is_scored_once_for_all_its_choices(
    toy: Toy, prompt: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, asked = Sequence.score, list[int]()

    def counted(self: Sequence, alternatives: int = 0) -> None:
        asked.append(alternatives)
        score(self, alternatives)

    monkeypatch.setattr(Sequence, "score", counted)
    fields = {"n": 3, "max_tokens": 2, "temperature": 1, "seed": 1, "echo": True, "logprobs": 1}
    if stream:
        with toy.open([prompt, "b"], stream=True, **fields) as caller:
            caller.read()
        first = dict[int, Any]()
        for choice in (event["choices"][0] for event in caller.said):
            first.setdefault(choice["index"], choice["logprobs"]["token_logprobs"])
    else:
        choices = toy.complete([prompt, "b"], **fields).json["choices"]
        first = {choice["index"]: choice["logprobs"]["token_logprobs"] for choice in choices}
    assert asked == [1, 1]
    found = [first[index][: len(prompt)] for index in range(3)]
    assert found[0][0] is None
    assert None not in found[0][1:]
    assert found == [found[0]] * 3
    assert len(first) == 6


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(2) as made:
        yield made


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 2, "max_tokens": 3},
        {"prompt": [PROMPT, "a", "x" * 300], "echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt": [[1, 2, 3], [4]], "echo": True, "logprobs": 20, "max_tokens": 1},
        {"echo": True, "logprobs": 1, "n": 3, "seed": 7, "temperature": 1, "max_tokens": 2},
        {"prompt": "y" * 900, "echo": True, "logprobs": 20, "max_tokens": 1},
    ],
)
def test_l9_with_workers_a_prompt_is_told_as_without(toy: Toy, fleet: Fleet, fields: Any) -> None:
    asked = {"prompt": PROMPT} | fields
    expected, found = toy.complete(**asked), fleet.complete(**asked)
    if toy.runner.max_model_len < 900 and expected.status == 400:
        with Toy() as long:
            expected = long.complete(**asked)
    assert (expected.status, found.status) == (200, 200), (expected.body, found.body)
    assert found.json["choices"] == expected.json["choices"]
    assert found.json["usage"] == expected.json["usage"]


def test_l9_with_workers_a_stream_begins_with_its_prompt_and_each_prompt_is_scored_once(fleet: Fleet) -> None:
    assert fleet.workers is not None
    said = list[Any]()
    for line in fleet.workers.lines:
        call = line.client.call

        def heard(method: str, params: Any, call: Any = call) -> Any:
            said.extend(params["requests"] if method == BATCH_GENERATE else [])
            return call(method, params)

        line.client.call = heard  # type: ignore[method-assign]
    with fleet.open("x" * 500, n=3, max_tokens=2, stream=True, echo=True, logprobs=20) as caller:
        caller.read()
    first = dict[int, Any]()
    for choice in (event["choices"][0] for event in caller.said):
        first.setdefault(choice["index"], choice["logprobs"])
    assert [len(first[index]["tokens"]) >= 500 for index in range(3)] == [True] * 3
    assert first[1]["token_logprobs"][:500] == first[2]["token_logprobs"][:500] == first[0]["token_logprobs"][:500]
    assert [one.prompt_logprobs for one in said] == [20, None, None]
    answer = fleet.complete(["robots " * 40] * 8, n=16, echo=True, logprobs=20)
    assert (answer.status, fleet.error(answer)["param"]) == (400, "echo")
    parts = [line["client"]["received"].get("stream.prompt", 0) for line in fleet.status_page()["lines"]]
    assert sum(parts) >= 3  # 500 tokens with 20 alternatives are 10,479 numbers
