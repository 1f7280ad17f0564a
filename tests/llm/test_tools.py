"""Calls of tools: read out of the text in each form, piece by piece, and forced where a call is demanded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine.output_parsers import Tool, ToolCall, ToolFormat, ToolParser, forced, format_of

NAMES = ["move", "stop"]
MOVE = {"name": "move", "arguments": {"x": 1, "why": "für {dich} </tool_call"}}
STOP: dict[str, Any] = {"name": "stop", "arguments": {}}


FLY = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
FIVE = '<tool_call>{"name": "move", "arguments": 5}</tool_call>'


def marked(*calls: Any) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


def read(form: ToolFormat, text: str, size: int) -> tuple[str, list[tuple[str, Any]], int]:
    """The text beside the calls, the calls, and how many the parser counts; fed `size` characters at a time."""
    parser = ToolParser(form, NAMES)
    found: list[str | ToolCall] = []
    for at in range(0, len(text), size):
        found += parser.feed(text[at : at + size])
    found += parser.end()
    calls = [one for one in found if isinstance(one, ToolCall)]
    assert len({call.id for call in calls}) == len(calls)
    said = "".join(one for one in found if isinstance(one, str))
    return said, [(call.name, json.loads(call.arguments)) for call in calls], parser.called


CASES: list[tuple[ToolFormat, str, str, list[Any]]] = [
    ("hermes", marked(MOVE), "", [MOVE]),
    ("hermes", "\n" + marked(MOVE, STOP) + "\n", "", [MOVE, STOP]),
    ("hermes", "I move.\n\n" + marked(MOVE) + " Done <b> now ", "I move. Done <b> now", [MOVE]),
    ("hermes", "a < b, <tool_cal is no call ", "a < b, <tool_cal is no call ", []),
    ("hermes", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ("hermes", FLY, FLY, []),
    ("hermes", '<tool_call>{"name": "move", "argu', '<tool_call>{"name": "move", "argu', []),
    ("hermes", FIVE, FIVE, []),
    ("llama3", '{"name": "move", "parameters": {"x": 2}}', "", [{"name": "move", "arguments": {"x": 2}}]),
    ("llama3", ' {"name": "stop"}; {"name": "move", "parameters": {}}', "", [STOP, {"name": "move", "arguments": {}}]),
    ("llama3", '{"speed": 5}', '{"speed": 5}', []),
    ("llama3", '{"name": "fly", "parameters": {}}', '{"name": "fly", "parameters": {}}', []),
    ("llama3", 'Text, then {"name": "stop"}', 'Text, then {"name": "stop"}', []),
    ("llama3", '{"name": "stop"} and text', '{"name": "stop"} and text', []),
    ("mistral", json.dumps([STOP, MOVE]), "", [STOP, MOVE]),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("mistral", "[" * 100_000, "[" * 100_000, []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_l9_calls_are_read_and_what_is_none_stays_text(
    form: ToolFormat, text: str, said: str, calls: list[Any], size: int
) -> None:
    found = read(form, text, max(size, len(text) // 1000))
    assert found[0].strip() == said.strip()
    assert found[1] == [(call["name"], call["arguments"]) for call in calls]
    assert found[2] == len(calls)


def test_l9_arguments_are_json_that_can_be_sent() -> None:
    call = '<tool_call>{"name": "move", "arguments": %s}</tool_call>'
    (half,) = ToolParser("hermes", NAMES).feed(call % r'{"x": "\ud800"}')
    assert isinstance(half, ToolCall)
    assert half.arguments.encode() == rb'{"x": "\ud800"}'
    for none in ('{"x": NaN}', '{"x": 1e999}'):
        assert ToolParser("hermes", NAMES).feed(call % none) == [call % none]


def test_l9_text_before_a_mark_is_said_as_soon_as_it_is_sure() -> None:
    parser = ToolParser("hermes", NAMES)
    assert parser.feed("I go <") == ["I go"]
    assert parser.feed("b") == [" <b"]
    assert parser.feed(" ") == []
    assert parser.feed("<tool_call>") == []
    assert ToolParser("mistral", NAMES).feed("Text") == ["Text"]


ARM = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/place"}, "fast": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [Tool("move", ARM), Tool("stop", {"type": "object", "additionalProperties": False})]


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("several", [True, False])
def test_l9_a_call_that_is_demanded_fits_its_schema(form: ToolFormat, several: bool) -> None:
    import jsonschema

    params = [
        SamplingParams(max_tokens=2000, temperature=1.9, seed=seed, constraint=forced(form, TOOLS, several))
        for seed in range(6)
    ]
    outputs = LLMEngine().generate(["Go"] * len(params), params)
    counts = set()
    for output in outputs:
        assert output.finish_reason == "stop"
        said, calls, count = read(form, output.text, 9)
        assert (said, count) == ("", len(calls))
        assert not set("\t\r") & set(output.text)  # no blanks at which a weak model would spend its answer
        for name, arguments in calls:
            jsonschema.validate(arguments, next(tool.parameters for tool in TOOLS if tool.name == name))
        counts.add(count)
    assert counts == {1} if not several else max(counts) > 1


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ('{% if tools %}{"name": f, "parameters": p}{% endif %}', "llama3"),
        ("{% if tools %}call them somehow{% endif %}", None),
        ("{{ messages }}<tool_call>", None),
    ],
)
def test_l9_the_template_says_how_its_model_calls(template: str, form: str | None) -> None:
    assert format_of(template) == form
