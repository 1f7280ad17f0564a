"""What agents and front ends send by themselves is answered: their first requests, as they came.

`first_requests.jsonl` holds them, fields and shapes unchanged, every text replaced by ours, `MODEL` for the model.
Those with a version were sent by that program to a server here; Claude Code and Codex are as public
reports and documentation show them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm.serving.test_growing_conversations import ScriptedToy
from reflex_runtime.demo import model_directory
from reflex_runtime.llm.engine.tokenizer import HFTokenizer
from serving.harness import Server
from serving.openai_toy import Model, Speaker, Toy

REQUESTS = [
    json.loads(line) for line in (Path(__file__).parent / "first_requests.jsonl").read_text("utf-8").splitlines()
]
NAMES = [f"{one['agent']} {one['path'].removeprefix('/v1/')} {i}" for i, one in enumerate(REQUESTS)]
TEMPLATE = """{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif -%}
{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content -}}
{% for c in m.tool_calls or [] %}
<tool_call>
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""scribe's own, and tools: no model that comes along knows any."""
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE = "/v1/messages/count_tokens", "/tokenize"
LAST = {MESSAGES: "message_stop", RESPONSES: '"response.', CHAT: "[DONE]", COMPLETIONS: "[DONE]"}
HI: list[Any] = [{"role": "user", "content": "hi"}]
"""What a request must say, by the path of its dialect."""
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy", "max_tokens": 2, "messages": HI},
    RESPONSES: {"model": "toy", "max_output_tokens": 2, "input": "hi"},
    MESSAGES: {"model": "toy", "max_tokens": 2, "messages": HI},
    COUNT: {"model": "toy", "messages": HI},
    TOKENIZE: {"messages": HI},
}


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy(Model(max_model_len=4096)) as server:
        yield server


@pytest.fixture(scope="module")
def speaker() -> Iterator[Toy]:
    with Toy(Speaker("an answer of some words")) as server:  # several ask for all that a model has to say
        yield server


@pytest.fixture(scope="module")
def efforts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedToy]:
    directory = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(model_directory("scribe") / "tokenizer.json", directory)
    template = "{{ reasoning_effort }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with ScriptedToy(HFTokenizer.load(directory)) as server:
        yield server


@pytest.fixture(scope="module")
def scribe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("models") / "scribe"
    shutil.copytree(model_directory("scribe"), directory, ignore=shutil.ignore_patterns(".reflex"))
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    with Server(directory, "--max-model-len", "1024") as server:
        yield server


def wrong(status: int, body: bytes, request: Any) -> str:
    """What is wrong with the answer to a first request, "" for nothing."""
    text = body.decode()
    if status != 200:
        return f"{status}: {text[:300]}"
    last = LAST[request["path"].partition("?")[0]] if request["body"].get("stream") else "{"
    return "" if last in text.rstrip().rpartition("\n\n")[2] else f"ends with {text[-300:]!r}"


@pytest.mark.parametrize("first", REQUESTS, ids=NAMES)
def test_l9_the_first_request_of_an_agent_is_answered(speaker: Toy, first: Any) -> None:
    answer = speaker.post(first["path"], first["body"] | {"model": "toy"})
    assert wrong(answer.status, answer.body, first) == ""


@pytest.mark.long  # it has much to say
def test_l9_the_same_of_a_trained_model(scribe: Server) -> None:
    found = {}
    for name, first in zip(NAMES, REQUESTS, strict=True):
        body = json.dumps(first["body"] | {"model": "scribe"}).encode()
        answer = scribe.ask("POST", first["path"], body, {"Content-Type": "application/json"})
        found[name] = wrong(answer.status, answer.body, first)
    assert {name: told for name, told in found.items() if told} == {}


def _tool(name: str, api: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object"}
    if api == CHAT:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}
    flat = {"name": name, "parameters": parameters} if api == RESPONSES else {"name": name, "input_schema": parameters}
    return flat | ({"type": "function"} if api == RESPONSES else {})


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (CHAT, {"reasoning_effort": "low", "store": True, "service_tier": "flex"},
         "reasoning_effort, service_tier, store"),
        (CHAT, {"reasoning_effort": "none", "store": False, "verbosity": "medium", "metadata": {}}, None),
        (CHAT, {"tools": [_tool("a", CHAT), {"type": "web_search", "filters": {}}]}, "tools[1]"),
        (COMPLETIONS, {"prompt": "hi"}, None),
        (RESPONSES, {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}},
         "reasoning.effort, text.verbosity"),
        (RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning"),
        (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}}, "reasoning"),
        (RESPONSES, {"include": ["x"], "context_management": [{}], "truncation": "auto", "stream": True},
         "context_management, include, truncation"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "b"}, _tool("a", RESPONSES), {"type": "namespace"}]},
         "tools[0], tools[2]"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}, "mcp_servers": [{}]},
         "mcp_servers, thinking.budget_tokens, thinking.display"),
        (MESSAGES, {"output_config": {"effort": "low"}, "speed": "fast", "container": "x"},
         "container, output_config.effort, speed"),
        (MESSAGES, {"tools": [_tool("a", MESSAGES) | {"defer_loading": True, "input_examples": [{}]}]},
         "tools[0].defer_loading, tools[0].input_examples"),
        (COUNT, {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}},
         "output_config.effort, thinking.budget_tokens"),
        (COUNT, {"tools": [_tool("a", MESSAGES) | {"defer_loading": True}, {"type": "web_search_1", "name": "b"}]},
         "tools[0].defer_loading, tools[1]"),
        (COUNT, {}, None),
        (TOKENIZE, {"tools": [_tool("a", CHAT), {"type": "web_search"}]}, "tools[1]"),
        (TOKENIZE, {}, None),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "summarized"}, "cache_control": {"type": "x"}}, None),
    ],
)  # fmt: skip
def test_l9_a_hint_is_taken_and_told_in_a_header(toy: Toy, path: str, fields: Any, told: str | None) -> None:
    answer = toy.post(path, LEAST.get(path, {"model": "toy", "max_tokens": 2}) | fields)
    assert (answer.status, answer.headers.get("x-reflex-ignored")) == (200, told), answer.body


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"reasoning_effort": "high", "store": True}, "store"),
        (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, None),
        (RESPONSES, {"reasoning": {"effort": "high"}, "store": True}, "store"),
        (RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning"),
        (MESSAGES, {"output_config": {"effort": "high"}, "speed": "fast"}, "speed"),
        (COUNT, {"output_config": {"effort": "high"}}, None),
    ],
)
def test_l9_an_effort_reaches_a_template_that_names_it(
    efforts: ScriptedToy, monkeypatch: pytest.MonkeyPatch, path: str, fields: Any, ignored: str | None
) -> None:
    seen, written = [], efforts.tokenizer._written
    monkeypatch.setattr(efforts.tokenizer, "_written", lambda talk: (seen.append(written(talk)), written(talk))[1])
    answer = efforts.post(path, LEAST[path] | fields)
    assert (answer.status, answer.headers.get("x-reflex-ignored")) == (200, ignored), answer.body
    assert seen == ["high: hi"]


def test_l9_a_hint_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    hint = {"tools": [{"type": "web_search"}, {"type": "web_search"}], "store": True}
    with caplog.at_level("INFO", "reflex.server"), Toy() as toy:
        for _ in range(3):
            assert toy.post(CHAT, LEAST[CHAT] | hint).status == 200
    told = [record.getMessage().partition(" is")[0] for record in caplog.records if "hint" in record.getMessage()]
    assert told == [f"{CHAT}: store", f"{CHAT}: tools[]"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [_tool("a", CHAT) | {"other": 1}]}, "tools[0].other"),
        (CHAT, {"tools": [_tool("a", CHAT), {"function": {"name": "b"}}]}, "tools[1].type"),
        (CHAT, {"tools": [{"type": "web_search"}, _tool("a b", CHAT)]}, "tools[1].function.name"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]},
         "messages[0].function_call"),
        (RESPONSES, {"tools": [_tool("a", RESPONSES) | {"parametres": {}}]}, "tools[0].parametres"),
        (RESPONSES, {"input": [{"type": "mesage", "role": "user", "content": "a"}]}, "input[0]"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (MESSAGES, {"tools": [{"name": "a"}]}, "tools[0]"),
        (MESSAGES, {"thinking": {"type": "between_tools"}}, "thinking.type"),
    ],
)  # fmt: skip
def test_l9_a_wish_that_is_not_served_is_refused_where_it_stands(toy: Toy, path: str, fields: Any, param: str) -> None:
    answer = toy.post(path, LEAST[path] | fields)
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert error["message"].startswith(param)
    assert error.get("param", param) == param


def test_l9_what_there_is_no_room_for_ends_a_message_where_the_context_does(toy: Toy) -> None:
    """Agents ask for the most that any model of that API can say."""
    ask = {
        "model": "toy",
        "max_tokens": 32_000,
        "messages": [{"role": "user", "content": "x" * 4000}],
        "ignore_eos": True,
    }
    found = toy.post(MESSAGES, ask).json
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("model_context_window_exceeded", 4096 - 4018)
    assert toy.post(MESSAGES, ask | {"max_tokens": 3}).json["stop_reason"] == "max_tokens"
    assert toy.post(CHAT, ask).status == 400


def test_l9_numbers_that_mean_off_elsewhere_mean_it_here(toy: Toy) -> None:
    plain = toy.complete(temperature=1.0, seed=5, max_tokens=20).json["choices"][0]["text"]
    assert toy.complete(temperature=1.0, seed=5, top_k=-1, max_tokens=20).json["choices"][0]["text"] == plain
    texts = {toy.complete(temperature=1.0, seed=-1, max_tokens=20).json["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    assert toy.error(toy.complete(top_k=-2))["param"] == "top_k"


def test_l9_an_error_over_several_prompts_names_the_one(toy: Toy) -> None:
    for prompts in (["a", "", "b"], [[97], [], [98]], ["a", "x" * 5000], [[97], [97, 300]]):
        error = toy.error(toy.complete(prompts))
        assert (error["param"], error["message"].partition(":")[0]) == ("prompt[1]", "prompt[1]"), error
    assert toy.error(toy.complete([[97, 300]]))["message"].startswith("prompt: token id 300: must be in")


def test_l9_the_length_that_is_told_is_one_that_the_cache_holds() -> None:
    with Toy(Model(num_blocks=4, block_size=16, max_model_len=512)) as toy:
        (card,) = toy.get("/v1/models").json["data"]
        assert card["max_model_len"] == 65  # the last token is not kept
        assert toy.complete("x" * 60, max_tokens=5).status == 200
        assert toy.complete("x" * 60, max_tokens=6).status == 400


def test_l9_parts_of_a_content_stay_parts(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = toy.generator.texts.tokenizer, []
    chat = tokenizer.chat
    monkeypatch.setattr(
        tokenizer, "chat", lambda talk, most=None: (seen.append(talk.messages[0]["content"]), chat(talk))[1]
    )
    for path, kind in ((CHAT, "text"), (RESPONSES, "input_text"), (MESSAGES, "text")):
        for texts in (["a", "b"], ["a"]):
            said = {"role": "user", "content": [{"type": kind, "text": text} for text in texts]}
            field = "input" if path == RESPONSES else "messages"
            assert toy.post(path, LEAST[path] | {field: [said]}).status == 200
    assert seen == [[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a"] * 3
