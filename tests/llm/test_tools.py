"""Calls of tools: read out of the text in each form, piece by piece, and forced where a call is demanded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine.output_parsers import FORMS, Tool, ToolCall, ToolParser, forced
from thinned import thinned

KNOWN = [Tool("move", {"type": "object", "properties": {"why": {"type": "string"}}}), Tool("stop", {"type": "object"})]
MOVE = {"name": "move", "arguments": {"x": 1, "why": "für {dich} </tool_call"}}
STOP: dict[str, Any] = {"name": "stop", "arguments": {}}


FLY = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
FIVE = '<tool_call>{"name": "move", "arguments": 5}</tool_call>'


IN_MARKS = {"name": "move", "arguments": {"why": '</tool_call> <tool_call> ]} "[TOOL_CALLS]\\'}}
MARK = json.dumps(IN_MARKS)
NESTED = "a\n\n</tool_call> </function> </parameter>."
TAGS = {"name": "move", "arguments": {"why": NESTED, "n": 5, "yes": True, "of": {"a": None}}}
VALUES = {"why": NESTED, "n": "5", "yes": "True", "of": '{"a": null}'}
PARTS = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in VALUES.items())
TAGGED = f"<tool_call>\n<function=move>\n{PARTS}</function>\n</tool_call>"
TWO = {"name": "move", "arguments": {"x": 2}}
OTHER_KEY = '<tool_call>{"name": "move", "input": {"x": 2}}</tool_call>'
AS_TEXT = json.dumps({"name": "move", "arguments": json.dumps(TWO["arguments"])})


def marked(*calls: Any) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


def read(form: str, text: str, size: int) -> tuple[str, list[tuple[str, Any]], int]:
    """The text beside the calls, the calls, and how many the parser counts; fed `size` characters at a time."""
    parser = ToolParser(FORMS[form], KNOWN)
    found: list[str | ToolCall] = []
    for at in range(0, len(text), size):
        found += parser.feed(text[at : at + size])
    found += parser.end()
    calls = [one for one in found if isinstance(one, ToolCall)]
    assert len({call.id for call in calls}) == len(calls)
    said = "".join(one for one in found if isinstance(one, str))
    return said, [(call.name, json.loads(call.arguments)) for call in calls], parser.called


CASES: list[tuple[str, str, str, list[Any]]] = [
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
    ("mistral", "[TOOL_CALLS]" + json.dumps([STOP, MOVE]), "", [STOP, MOVE]),
    ("hermes", marked(MOVE).removesuffix("</tool_call>"), "", [MOVE]),
    ("hermes", f"<tool_call>{MARK}</tool_call>", "", [IN_MARKS]),
    ("hermes", f"<tool_call>{MARK}", "", [IN_MARKS]),
    ("hermes", f"<tool_call>{MARK}\n{json.dumps(STOP)}</tool_call>", "", [IN_MARKS, STOP]),
    ("hermes", f"<tool_call>[{json.dumps(STOP)}, {MARK}]</tool_call>yes", "yes", [STOP, IN_MARKS]),
    ("hermes", '<tool_call>{"name": "move", "parameters": {"x": 2}}</tool_call>', "", [TWO]),
    ("hermes", f"<tool_call>{AS_TEXT}</tool_call>", "", [TWO]),
    ("hermes", OTHER_KEY, OTHER_KEY, []),
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("qwen3_coder", TAGGED, "", [TAGS]),
    ("qwen3_coder", "So.\n\n" + TAGGED + "\n" + TAGGED.removesuffix("</tool_call>"), "So.", [TAGS, TAGS]),
    ("qwen3_coder", "<tool_call>\n<function=stop>\n</function>\n</tool_call>", "", [STOP]),
    ("qwen3_coder", "<tool_call>\n<function=fly>\n</function>", "<tool_call>\n<function=fly>\n</function>", []),
    ("qwen3_coder", "<tool_call> <b>bold</b>", "<tool_call> <b>bold</b>", []),
    ("qwen3_coder", TAGGED[:60], TAGGED[:60], []),
    ("granite", f"<|tool_call|>[{MARK}, {json.dumps(STOP)}]", "", [IN_MARKS, STOP]),
    ("phi4", f"<|tool_call|>{MARK}<|/tool_call|><|tool_call|>{MARK}<|/tool_call|>", "", [IN_MARKS, IN_MARKS]),
    ("nemotron", f"<TOOLCALL>[{MARK}]</TOOLCALL>", "", [IN_MARKS]),
    ("mistral", f"[TOOL_CALLS][{MARK}]", "", [IN_MARKS]),
    ("mistral", f"I see [TOOL_CALLS] [{MARK}]", "I see", [IN_MARKS]),
    ("mistral_named", '[TOOL_CALLS]move[ARGS]{"x": 2}[TOOL_CALLS]stop[ARGS]{}', "", [TWO, STOP]),
    ("mistral_named", "[TOOL_CALLS]move[ARGS]{x: 2}", "[TOOL_CALLS]move[ARGS]{x: 2}", []),
    ("mistral_named", '[TOOL_CALLS]move{"x": 2}', "", [TWO]),
    ("mistral_named", '[TOOL_CALLS]move[CALL_ID]abcDEF123[ARGS]{"x": 2}', "", [TWO]),
    ("mistral_named", "[TOOL_CALLS]move it", "[TOOL_CALLS]move it", []),
    ("llama3", '<|python_tag|>{"name": "stop", "parameters": {}}', "", [STOP]),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3", '{"type": "function", "name": "stop", "parameters": {}}', "", [STOP]),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("mistral", "[TOOL_CALLS]" + "[" * 100_000, "[TOOL_CALLS]" + "[" * 100_000, []),
    ("llama3", "[" * 100_000, "[" * 100_000, []),
    ("llama3", "42 steps", "42 steps", []),
    ("llama3", '{"name": "stop"}; 4', '{"name": "stop"}; 4', []),
    ("llama3", "4" * 5000, "4" * 5000, []),
    ("hermes", marked(MOVE).replace("1", "1" * 5000), marked(MOVE).replace("1", "1" * 5000), []),
    ("qwen3_coder", "<tool_call><function=\n" + marked(STOP) + " So.", "<tool_call><function= So.", [STOP]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_l9_calls_are_read_and_what_is_none_stays_text(
    form: str, text: str, said: str, calls: list[Any], size: int
) -> None:
    found = read(form, text, max(size, len(text) // 1000))
    assert found[0].strip() == said.strip()
    assert found[1] == [(call["name"], call["arguments"]) for call in calls]
    assert found[2] == len(calls)


def test_l9_arguments_are_json_that_can_be_sent() -> None:
    call = '<tool_call>{"name": "move", "arguments": %s}</tool_call>'
    (half,) = ToolParser(FORMS["hermes"], KNOWN).feed(call % r'{"x": "\ud800"}')
    assert isinstance(half, ToolCall)
    assert half.arguments.encode() == rb'{"x": "\ud800"}'
    (large,) = ToolParser(FORMS["hermes"], KNOWN).feed(call % '{"x": 1e999}')  # a form allows it, and it is JSON
    assert isinstance(large, ToolCall)
    assert large.arguments == '{"x": 1e999}'
    for none in ('{"x": NaN}', '{"x": 01}', '"{"', '"[1]"', "[]"):
        parser = ToolParser(FORMS["hermes"], KNOWN)
        assert parser.feed(call % none) + parser.end() == [call % none]


def test_l9_text_before_a_mark_is_said_as_soon_as_it_is_sure() -> None:
    parser = ToolParser(FORMS["hermes"], KNOWN)
    assert parser.feed("<tool_call>{no JSON} and a text") == ["<tool_call>{no JSON} and a text"]
    assert parser.feed("I go <") == ["I go"]
    assert parser.feed("b") == [" <b"]
    assert parser.feed(" ") == []
    assert parser.feed("<tool_call>") == []
    assert ToolParser(FORMS["mistral"], KNOWN).feed("Text") == ["Text"]


ARM = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/place"}, "fast": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [Tool("move", ARM), Tool("stop", {"type": "object", "additionalProperties": False})]


@pytest.mark.parametrize("form", thinned(FORMS, ["hermes", "mistral", "llama3"]))
@pytest.mark.parametrize("several", [True, False])
def test_l9_a_call_that_is_demanded_fits_its_schema(form: str, several: bool) -> None:
    import jsonschema

    params = [
        SamplingParams(max_tokens=2000, temperature=1.9, seed=seed, constraint=forced(FORMS[form], TOOLS, several))
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
