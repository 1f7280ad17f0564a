"""What an agent's next turn finds in the prefix cache: through the three APIs, with thoughts and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reflex_runtime.demo import SCRIBE
from reflex_runtime.llm.engine.tokenizer import HFTokenizer
from reflex_runtime.llm.runners.runner import Step
from reflex_runtime.llm.server.model_host import ModelPlan
from serving.openai_toy import Gate, Toy

Turn = Callable[[Toy, list[Any]], tuple[int, int]]
BLOCK = 16
ASKED = "Please bring the robot to the boat, and tell me when it is there."
SEEN = "The camera shows the robot and a boat."
# What the model writes, in turns: a thought, a text and a call; a thought and a call; a thought and the answer.
SAID = (
    "<think>\nThe robot is far away.\nI should move it first.\n</think>\n\nI move it.\n"
    '<tool_call>\n{"name": "move", "arguments": {"x": 4, "why": "größer"}}\n</tool_call>',
    '<think>\nIt has to go back.\n</think>\n\n<tool_call>\n{"name": "move", "arguments": {"x": -1.5}}\n</tool_call>',
    "<think>\nThat was all.\n</think>\n\nThe robot is beside the boat.\nShall it do more?",
)
TOOL: dict[str, Any] = {
    "name": "move",
    "description": "Moves the robot by x steps, and tells what the camera shows then.",
    "parameters": {"type": "object", "properties": {"x": {"type": "number"}, "why": {"type": "string"}}},
}
# Which thoughts of earlier answers a chat template shows to the model.
KEPT = {"all": "true", "since-the-last-question": "loop.index0 > ns.asked", "none": "false"}
TEMPLATE = """\
{{- "<|system|><tool_call>" }}
{%- for t in tools %}{{ t | tojson }}{{ "\\n" }}{% endfor %}
{{- "<|end|>" }}
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role != "assistant" %}{{ "<|user|>" + m.content + "<|end|>" }}
    {%- else %}{{ "<|assistant|>" }}
        {%- if m.reasoning_content and (KEPT) %}
            {{- "<think>\\n" + m.reasoning_content + "\\n</think>\\n\\n" }}
        {%- endif %}
        {{- m.content }}
        {%- for c in m.tool_calls or [] %}
            {{- "\\n" if m.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
            {{- c.function.arguments | tojson }}{{ "}\\n</tool_call>" }}
        {%- endfor %}{{ "<|end|>" }}
    {%- endif %}
{%- endfor %}
{{- "<|assistant|>" }}"""


class Scripted(Gate):
    """A model without weights that says `answer`, and then ends."""

    name, adapters = "scripted", ()
    num_blocks, block_size, max_model_len = 1024, BLOCK, 8192

    def __init__(self, tokenizer: HFTokenizer) -> None:
        super().__init__()
        self.vocab_size = tokenizer.vocab_size
        self.answer: list[int] = []
        self._end, self._begin = min(tokenizer.eos_token_ids), 0

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        self.pass_through(len(step.token_ids))
        logits = np.zeros((len(step.picked), self.vocab_size), np.float32)
        last = int(step.positions[-1])
        if len(step.token_ids) > 1:
            self._begin = last
        logits[-1:, [*self.answer, self._end][min(last - self._begin, len(self.answer))]] = 1000.0
        return logits

    def close(self) -> None:
        return


class ScriptedToy(Toy):
    """A server of it, with the tokenizer that it was made for."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        scripted: Any = Scripted(tokenizer)
        super().__init__(scripted)
        self.scripted, self.tokenizer = scripted, tokenizer

    def load(self, plan: ModelPlan) -> Any:
        return self.scripted, self.tokenizer


@pytest.fixture(scope="module", params=KEPT)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ScriptedToy, str]]:
    from tokenizers import Tokenizer

    directory: Path = tmp_path_factory.mktemp("tokenizer")
    core = Tokenizer.from_file(str(SCRIBE / "tokenizer.json"))
    core.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    core.save(str(directory / "tokenizer.json"))
    template = TEMPLATE.replace("KEPT", KEPT[request.param])
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with ScriptedToy(HFTokenizer.load(directory)) as toy:
        yield toy, request.param


# A turn of each API adds the answer, and what its tools gave, to what was said. It returns the tokens of the prompt and
# those of them that the cache had.


def chat(toy: Toy, talk: list[Any]) -> tuple[int, int]:
    ask = {"model": "toy", "messages": talk, "max_tokens": 200}
    found = toy.post("/v1/chat/completions", ask | {"tools": [{"type": "function", "function": TOOL}]}).json
    message, usage = found["choices"][0]["message"], found["usage"]
    talk.append(message)
    talk += [{"role": "tool", "tool_call_id": c["id"], "content": SEEN} for c in message.get("tool_calls") or []]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def messages(toy: Toy, talk: list[Any]) -> tuple[int, int]:
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    found = toy.post("/v1/messages", {"model": "toy", "messages": talk, "max_tokens": 200, "tools": [tool]}).json
    usage, blocks = found["usage"], found["content"]
    talk.append({"role": "assistant", "content": blocks})
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    if calls:
        results = [{"type": "tool_result", "tool_use_id": call, "content": SEEN} for call in calls]
        talk.append({"role": "user", "content": results})
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


def responses(toy: Toy, talk: list[Any]) -> tuple[int, int]:
    ask = {"model": "toy", "input": talk, "max_output_tokens": 200}
    found = toy.post("/v1/responses", ask | {"tools": [{"type": "function", "strict": False} | TOOL]}).json
    usage, items = found["usage"], found["output"]
    talk += items
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    talk += [{"type": "function_call_output", "call_id": call, "output": SEEN} for call in calls]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("turn", [chat, messages, responses])
def test_l5_a_turn_finds_all_that_its_template_shows_unchanged(served: tuple[ScriptedToy, str], turn: Turn) -> None:
    toy, kept = served
    talk: list[Any] = []
    asked = computed = 0  # tokens of the last prompt, and of that and its answer
    question = 0  # tokens up to the last question, which the thoughts of its answers follow
    for i in range(9):
        new = i % len(SAID) == 0
        if new:
            talk.append({"role": "user", "content": f"{turn.__name__}: {ASKED}"})
        toy.scripted.answer = toy.tokenizer.encode(SAID[i % len(SAID)])
        prompt, cached = turn(toy, talk)
        if kept == "none":
            known = asked  # an answer begins with its thought
        elif kept == "since-the-last-question" and new:
            known = question
        else:
            known = computed
        if i:
            assert cached == known // BLOCK * BLOCK, f"turn {i}: {prompt} tokens"
        asked, computed = prompt, prompt + len(toy.scripted.answer)
        question = prompt if new else question
