"""Chat templates are tried at the load: what they write of known calls says how the model calls, and whether."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.engine.logits_processors import Constraints
from reflex_runtime.llm.engine.output_parsers import (
    AWKWARD,
    FORMS,
    TRIED,
    PartReader,
    Thought,
    ThoughtParser,
    Tool,
    ToolCall,
    ToolParser,
    forced,
)
from reflex_runtime.llm.engine.tokenizer import Conversation, HFTokenizer, in_thought
from thinned import thinned

SPECIAL = ["<|im_start|>", "<|im_end|>", "</think>"]
MARKS = ["<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]  # special ones, too
HEAD = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\nA call is "
    '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call> or {"parameters": {}}<|im_end|>\n{% endif %}'
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
)
TAIL = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
AS_JSON = "c.function.arguments | tojson"
AS_IT_IS = "c.function.arguments if c.function.arguments is string else"
EACH = '{"name": "{{ c.function.name }}", "arguments": {{ ARGUMENTS }}}'
TAGS = (
    "\n<tool_call>\n<function={{ c.function.name }}>\n{% for name, value in c.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ VALUE }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
NAME = "{{ c.function.name }}"
NINE = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
ONE = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"


def marked(arguments: str = AS_JSON) -> str:
    return f"\n<tool_call>\n{EACH}\n</tool_call>".replace("ARGUMENTS", arguments)


def tagged(value: str) -> str:
    return TAGS.replace("VALUE", value)


def listed(begin: str, end: str) -> str:
    return f"{{{{ '{begin}' if loop.first }}}}{EACH}{{{{ '{end}' if loop.last else ', ' }}}}".replace(
        "ARGUMENTS", AS_JSON
    )


KINDS = {
    "objects between marks": ("hermes", marked()),
    "arguments as they are": ("hermes", marked(f"{AS_IT_IS} 1 // 0")),
    "arguments in either form": ("hermes", marked(f"{AS_IT_IS} {AS_JSON}")),
    "arguments by concatenation": ("hermes", marked('"" + c.function.arguments')),
    "tags": ("qwen3_coder", tagged("value if value is string else value | tojson")),
    "tags in Python's words": ("qwen3_coder", tagged("value | tojson if value is mapping else value")),
    "a list behind a mark": ("granite", listed("<|tool_call|>[", "]")),
    "objects between other marks": ("phi4", f"<|tool_call|>{EACH}<|/tool_call|>".replace("ARGUMENTS", AS_JSON)),
    "a list between marks": ("nemotron", listed("<TOOLCALL>[", "]</TOOLCALL>")),
    "a list between other marks": ("hunyuan", listed("<tool_calls>[", "]</tool_calls>")),
    "a list behind Mistral's mark": ("mistral", listed("[TOOL_CALLS][", "]")),
    "names behind marks": ("mistral_named", f"[TOOL_CALLS]{NAME}[ARGS]{{{{ {AS_JSON} }}}}"),
    "names and ids behind marks": (
        "mistral_named",
        f"{NINE}[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{{{{ {AS_JSON} }}}}",
    ),
    "an object alone": ("llama3", ONE + EACH.replace("arguments", "parameters").replace("ARGUMENTS", AS_JSON)),
}


def saved(root: Path, template: Any = None, special: Sequence[str] = ()) -> Path:
    core = Core(models.BPE({letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    core.add_special_tokens([AddedToken(text, special=True) for text in [*SPECIAL, *MARKS, *special]])
    core.save(str(root / "tokenizer.json"))
    values = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
    (root / "tokenizer_config.json").write_text(json.dumps(values))
    return root


def calls(*arguments: Any) -> list[dict[str, Any]]:
    made = [{"name": TRIED.name, "arguments": each} for each in arguments]
    return [{"id": f"call{i:05}", "type": "function", "function": call} for i, call in enumerate(made)]


TOOLS = [{"type": "function", "function": {"name": TRIED.name, "parameters": TRIED.parameters}}]
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_is_the_one_that_reads_back_what_the_template_writes(tmp_path: Path, kind: str) -> None:
    name, call = KINDS[kind]
    tokenizer = HFTokenizer.load(saved(tmp_path, HEAD + call + TAIL))
    assert tokenizer.tool_format == replace(FORMS[name], several=name != "llama3")
    for made in [({"text": "x"},), (AWKWARD,), ({"text": "x"}, AWKWARD)][: 2 if name == "llama3" else 3]:
        said = {"role": "assistant", "content": "", "tool_calls": calls(*made)}
        before, whole = (
            len(tokenizer.chat(Conversation(ASK, TOOLS))),
            tokenizer.chat(Conversation([*ASK, said], TOOLS)),
        )
        ids = whole[before : len(whole) - len(tokenizer.chat(Conversation([]))) - 1]
        for size in (1, 3, len(ids)):  # as an output that streams
            stream, parser, found = (
                tokenizer.stream(whole[:before]),
                ToolParser(tokenizer.tool_format, [TRIED]),
                list[Any](),
            )
            for at in range(0, len(ids), size):
                found += parser.feed("".join(map(stream.feed, ids[at : at + size])))
            found += parser.end()
            ended = [one for one in found if isinstance(one, ToolCall)]
            assert [json.loads(one.arguments) for one in ended] == list(made)
            sent = [call | {"id": one.id} for call, one in zip(said["tool_calls"], ended, strict=True)]
            assert tokenizer.chat(Conversation([*ASK, said | {"tool_calls": sent}], TOOLS))  # it takes its own ids back
            assert not "".join(one for one in found if isinstance(one, str)).strip()


def test_a_key_is_that_of_the_call_where_a_template_shows_tools_late(tmp_path: Path) -> None:
    """As Mistral's do, which write another text around them where an answer follows."""
    late = "{% if m.role == 'user' and tools and not loop.last %}{{ tools | tojson }}{% endif %}"
    shown = "{% if tools and messages | length == 1 %}Tools: {{ tools | tojson }}{% endif %}"
    head = f"{shown}{{% for m in messages %}}{late}{{% for c in m.tool_calls or [] %}}"
    template = head + listed("[TOOL_CALLS][", "]") + "{% endfor %}{% endfor %}"
    assert HFTokenizer.load(saved(tmp_path, template)).tool_format == FORMS["mistral"]


def test_a_demanded_call_is_a_list_where_a_template_writes_one_alone(tmp_path: Path) -> None:
    form = HFTokenizer.load(saved(tmp_path, HEAD + listed("[", "]") + TAIL)).tool_format
    assert form == replace(FORMS["llama3"], begin="[", between=", ", end="]", key="arguments")
    assert "start: " + json.dumps("[") in forced(form, [TRIED], several=True).text


def test_a_template_names_the_arguments_of_its_macros_as_it_likes(tmp_path: Path) -> None:
    macro = "{% macro shown(function, self, context, obj) %}{{ function }}{{ context }}{% endmacro %}"
    template = macro + "{{ shown(function='a', context='b') }}"
    tokenizer = HFTokenizer.load(saved(tmp_path, template))
    assert tokenizer.decode(tokenizer.chat(Conversation(ASK))) == "ab"


@pytest.mark.parametrize("name", thinned(FORMS, ["hermes", "mistral", "llama3"]))
def test_a_demanded_call_has_the_models_own_marks_and_is_read(tmp_path: Path, name: str) -> None:
    tokenizer, form, rng = HFTokenizer.load(saved(tmp_path)), FORMS[name], np.random.default_rng(3)
    counts = {"type": "object", "properties": {"count": {"enum": [1, 22]}, "why": {"enum": ["a", "b"]}}}
    tool = Tool("count", counts | {"required": ["count"], "additionalProperties": False})
    for several in (False, True):
        matcher, ids = Constraints(tokenizer.vocabulary).compile(forced(form, [tool], several)), list[int]()
        while not matcher.complete:
            ids.append(int(rng.choice(np.flatnonzero(np.isfinite(matcher.penalty())))))
            matcher.sampled(ids[-1])
        text = tokenizer.decode(ids)
        if form.mark in MARKS and form.begin:
            assert ids[0] == tokenizer._core.token_to_id(form.mark)
        parser = ToolParser(form, [tool])
        found = parser.feed(text) + parser.end()
        assert found, text
        for call in found:
            assert isinstance(call, ToolCall), text
            jsonschema.validate(json.loads(call.arguments), tool.parameters)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "reflex.server"):
        yield caplog


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (HEAD + f"<call>{{{{ c.function.name }}}}({{{{ {AS_JSON} }}}})" + TAIL, "writes a call as '<call>reflex"),
        (HEAD + marked("'{}'") + TAIL, "writes a call as '<tool_call>"),
        (HEAD + marked("c.function.arguments | string") + TAIL, ""),
        (HEAD + TAIL, "leaves calls out of a conversation"),
        (HEAD + f">>>{NAME}{{{{ '\n' + c.function.arguments }}}}" + TAIL, "writes a call as '>>>reflex_try"),
        ("{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}", "does not show them to the model"),
        ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}", "does not write a call: .*no tools here"),
    ],
    ids=["an unknown form", "no arguments", "Python's words", "no calls", "a text", "no tools", "a refusal"],
)  # fmt: skip
def test_a_template_whose_calls_nobody_reads_takes_no_tools_and_the_log_says_why(
    tmp_path: Path, told: pytest.LogCaptureFixture, template: str, why: str
) -> None:
    tokenizer = HFTokenizer.load(saved(tmp_path, template))
    if not why:  # as a text it is well
        assert tokenizer.tool_format == FORMS["hermes"]
        return
    assert tokenizer.tool_format is None
    assert re.search(f"tools are refused: the chat template {why}", told.text), told.text


@pytest.mark.parametrize("shown", ["", "{{ tools }}"])
def test_a_history_has_its_arguments_as_the_template_takes_them(tmp_path: Path, shown: str) -> None:
    """Also where nobody reads its calls, and where it shows no tools."""
    call = "{% for c in m.tool_calls or [] %}{{ '!' + c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}" + call + "{% endfor %}" + shown
    tokenizer = HFTokenizer.load(saved(tmp_path, template))
    said = {"role": "assistant", "content": "", "tool_calls": calls({"text": "für"})}
    assert tokenizer.decode(tokenizer.chat(Conversation([said]))) == '!{"text": "für"}'
    assert said["tool_calls"][0]["function"]["arguments"] == {"text": "für"}


PARTS = "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}{% endfor %}"
EACH_PART = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)
OF_USERS = "{% if m.role == 'user' %}" + EACH_PART + "{% else %}{{ m.content[0].text or m.content }}{% endif %}"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("{{ m.content | trim }}", "<system>a\nb<user>a\nb"),  # knows no parts: they are one text
        (EACH_PART, "<system>ab<user>ab"),
        (OF_USERS, "<system>a\nb<user>ab"),  # takes only the first part of others
        ("{{ m.content if m.content is string else '' }}", "<system>a\nb<user>a\nb"),
    ],
    ids=["text", "parts", "parts of users", "drops parts"],
)
def test_parts_of_a_content_stay_parts_where_the_template_writes_them(tmp_path: Path, content: str, shown: str) -> None:
    tokenizer = HFTokenizer.load(saved(tmp_path, PARTS.replace("{{ CONTENT }}", content)))
    parts = [{"type": "text", "text": text} for text in "ab"]
    said = [{"role": role, "content": parts} for role in ("system", "user")]
    assert tokenizer.decode(tokenizer.chat(Conversation(said))) == shown


@pytest.mark.parametrize("files", ["list", "folder", "both"])
def test_a_template_is_chosen_by_name_as_transformers_does(tmp_path: Path, files: str) -> None:
    import transformers

    named = {
        "default": "plain{{ ' tools' if tools }}",
        "tool_use": HEAD + marked() + TAIL,
        "rag": "{% if",
    }
    saved(tmp_path, [{"name": name, "template": text} for name, text in named.items()] if files != "folder" else None)
    if files != "list":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        (tmp_path / "chat_template.jinja").write_text("own")
    tokenizer, reference = HFTokenizer.load(tmp_path), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools in (TOOLS, None):
        expected = reference.apply_chat_template(ASK, tools=tools, add_generation_prompt=True, return_dict=False)
        assert tokenizer.chat(Conversation(ASK, tools or [])) == expected
    assert tokenizer.tool_format == FORMS["hermes"]


def test_templates_without_a_default_serve_what_they_are_for(tmp_path: Path) -> None:
    template = HEAD + marked() + TAIL
    tokenizer = HFTokenizer.load(saved(tmp_path, [{"name": "tool_use", "template": template}]))
    assert tokenizer.chat(Conversation(ASK, TOOLS))
    with pytest.raises(ConfigError, match="has chat templates named tool_use, but no default"):
        tokenizer.chat(Conversation(ASK))


CHANNELS = ["<|channel|>", "<|message|>", "<|end|>"]
FINAL = "<|end|><|im_start|>assistant<|channel|>final<|message|>"
ASKED = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ENDED = "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
THOUGHTS: dict[str, tuple[str, list[str], tuple[str, str], str]] = {
    "marks of its own": (
        ASKED + "{{ '<seed:think>' ~ m.reasoning_content ~ '</seed:think>\n' if m.reasoning_content }}" + ENDED,
        ["<seed:think>", "</seed:think>"], ("<seed:think>", "</seed:think>"), "",
    ),
    "several tokens": (
        f"{ASKED}{{{{ '<|channel|>analysis<|message|>' ~ m.thinking ~ '{FINAL}' if m.thinking }}}}{ENDED}",
        CHANNELS, ("<|channel|>analysis<|message|>", FINAL), "<|channel|>final<|message|>",
    ),
    "begun in the prompt": (
        ASKED + "{{ '[THINK]' ~ m.reasoning_content ~ '[/THINK]' if m.reasoning_content }}" + ENDED + "[THINK]",
        ["[THINK]", "[/THINK]"], ("[THINK]", "[/THINK]"), "",
    ),
}  # fmt: skip


def told_apart(tokenizer: HFTokenizer, output: str, begun: bool = False) -> tuple[str, str]:
    """The thought and the answer of an output that comes token by token."""
    stream, reader = tokenizer.stream(), PartReader(ThoughtParser(begun, tokenizer.thought))
    parts = [part for id in tokenizer.encode(output) for part in reader.feed(stream.feed(id), last=False)]
    parts += reader.feed("", last=True)
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize("kind", THOUGHTS)
def test_a_thought_stands_between_the_marks_that_the_template_writes(tmp_path: Path, kind: str) -> None:
    template, special, marks, silent = THOUGHTS[kind]
    tokenizer = HFTokenizer.load(saved(tmp_path, template + "{% endif %}", special))
    assert (tokenizer.reasons, tokenizer.thought) == (True, marks)
    begun = in_thought(tokenizer, tokenizer.chat(Conversation(ASK)))
    assert begun is template.endswith("[THINK]")
    for output in (f"{marks[0]}a < b{marks[1]}\nFour", f"a < b{marks[1]}Four")[begun : 1 + begun]:
        assert told_apart(tokenizer, output, begun) == ("a < b", "Four")
    if not begun:
        assert told_apart(tokenizer, silent + "Four.<|im_end|>") == ("", "Four.")  # it thought nothing


@pytest.mark.parametrize("written", ["", "{{ 'Why: ' ~ m.reasoning_content ~ ' So: ' if m.reasoning_content }}"])
def test_a_template_that_marks_no_thought_has_none(tmp_path: Path, written: str) -> None:
    assert not HFTokenizer.load(saved(tmp_path, ASKED + written + ENDED + "{% endif %}")).reasons
