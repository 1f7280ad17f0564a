"""LoRA adapters in a server: each is a model behind the name of the one that it changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.cli.serve_llm import _adapters
from reflex_runtime.core.batch import BatchScheduled, RequestSettled
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.runner import Step
from reflex_runtime.llm.server.model_host import ModelPlan, adapters_of
from reflex_runtime.settings import LLMServeConfig
from serving.openai_toy import Model, Toy


class Adapted(Model):
    """Says x's by itself, a's with its first adapter and b's with the second."""

    adapters = ("poet", "coder")

    def forward(self, step: Step) -> Any:
        logits = super().forward(step)
        numbers = [0] * len(logits) if step.adapters is None else step.adapters
        for row, number in zip(logits, numbers, strict=True):
            row[ord("xab"[number])] = 1000.0
        return logits


class WithAdapters(Toy):
    def plan(self) -> ModelPlan:
        return ModelPlan("toy", self.config, adapters=Adapted.adapters)


@pytest.fixture(scope="module")
def adapted() -> Iterator[WithAdapters]:
    with WithAdapters(Adapted()) as made:
        yield made


@pytest.mark.parametrize(("name", "says"), [("toy", "x"), ("toy:poet", "a"), ("toy:coder", "b")])
def test_l9_an_adapter_is_asked_for_behind_the_name_of_its_model(adapted: Toy, name: str, says: str) -> None:
    completion = adapted.complete(model=name, max_tokens=4).json
    assert (completion["model"], completion["choices"][0]["text"]) == (name, 4 * says)
    assert adapted.chat("hi", model=name, max_tokens=4).json["choices"][0]["message"]["content"] == 4 * says
    assert adapted.post("/tokenize", {"model": name, "prompt": "hi"}).json["count"] == 2


def test_l9_adapters_are_listed_with_the_model_they_change(adapted: Toy) -> None:
    cards = {card["id"]: card for card in adapted.get("/v1/models").json["data"]}
    assert list(cards) == ["toy", "toy:poet", "toy:coder"]
    assert (cards["toy:poet"]["root"], cards["toy:poet"]["parent"]) == ("toy", "toy")
    assert (cards["toy"]["root"], cards["toy"]["parent"]) == ("toy", None)
    assert adapted.get("/v1/models/toy%3Apoet").json == cards["toy:poet"]
    for name in ("poet", "toy:", "toy:other", "toy:poet:coder"):
        answer = adapted.complete(model=name)
        assert (answer.status, adapted.error(answer)["code"]) == (404, "model_not_found")
        says = f"the model {name!r} does not exist; 'toy', 'toy:poet', 'toy:coder' do"
        assert adapted.error(answer)["message"] == says


def test_l9_requests_with_different_adapters_share_steps_and_no_cached_blocks() -> None:
    runner = Adapted()
    with WithAdapters(runner) as toy:
        runner.stop()
        with (
            toy.open("p" * 40, name="first", model="toy:poet", max_tokens=3, stream=True) as first,
            toy.open("p" * 40, name="second", model="toy:coder", max_tokens=3, stream=True) as second,
            toy.open("p" * 40, name="third", max_tokens=3, stream=True) as third,
        ):
            for name in ("first", "second", "third"):
                toy.ticket(name)
            runner.go()
            texts = [caller.read() and caller.text for caller in (first, second, third)]
        assert texts == ["aaa", "bbb", "xxx"]
        assert max(len(event.batch) for event in toy.log.of(BatchScheduled)) == 3
        for name, cached in (("toy:poet", 32), ("toy:coder", 32), ("toy", 32)):
            usage = toy.complete("p" * 40, model=name, max_tokens=1).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        tickets = [toy.log.wait(RequestSettled, n + 1).ticket for n in range(3)]
        assert [ticket.cached for ticket in tickets] == [0.0, 0.0, 0.0]


# -- the command -------------------------------------------------------------------------------------------------------


def test_h10_lora_names_adapters_of_the_model() -> None:
    found = tuple(_adapters(("x=adapters/x", "y=/y=1")))
    assert found == (f"x={Path('adapters/x').resolve()}", "y=/y=1")
    assert adapters_of(LLMServeConfig(lora=found)) == {"x": Path("adapters/x").resolve(), "y": Path("/y=1")}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("x",), "--lora=x: must be NAME=DIR, where DIR is of peft and has adapter_config.json"),
        (("x=y", "x=z"), "--lora=x=…: two adapters have this name"),
        (("x y=z",), "--lora=x y=z: the name 'x y' must be 1 to 64 letters"),
        (("b:x=y",), "--lora=b:x=y: the name 'b:x' must be 1 to 64 letters"),
    ],
)
def test_h11_adapters_that_contradict_each_other_are_one_line(given: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tuple(_adapters(given))
