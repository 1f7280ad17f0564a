"""L9 POST /v1/responses: OpenAI's Responses API, spoken by the unmodified `openai` client to a server of the toy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from late import Late
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.api.messages import message
from reflex_runtime.llm.api.requests import chat, refused
from reflex_runtime.llm.api.responses import response
from serving.openai_toy import MOVE_PARAMETERS, TALK, Model, Speaker, Toy

openai = Late("openai")
PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "toy", "input": "hi", "temperature": 0, "max_output_tokens": 9}
MOVE: dict[str, Any] = {
    "type": "function",
    "name": "move",
    "description": "Moves the arm.",
    "parameters": MOVE_PARAMETERS,
    "strict": True,
}
HELLO = {"role": "user", "content": "hi"}


def client_of(toy: Toy) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{toy.port}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy(Model(max_model_len=512)) as server:
        yield server


@pytest.fixture(scope="module")
def client(toy: Toy) -> Iterator[Any]:
    with client_of(toy) as found:
        yield found


@pytest.fixture(scope="module")
def talking() -> Iterator[Any]:
    with Toy(Speaker(TALK)) as server, client_of(server) as found:
        yield found


def test_l9_a_response_is_what_the_engine_says(client: Any) -> None:
    found = client.responses.create(**ASK, instructions="be brief", metadata={"a": "b"})
    prompt = "system: be brief\nuser: hi\nassistant: "
    (output,) = LLMEngine().generate([prompt], SamplingParams.greedy(9))
    assert (found.object, found.status, found.model) == ("response", "incomplete", "toy")
    assert found.id.startswith("resp_")
    assert found.output_text == output.text
    assert found.incomplete_details.reason == "max_output_tokens"
    (item,) = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert (found.instructions, found.metadata, found.temperature) == ("be brief", {"a": "b"}, 0)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(prompt), 9)
    assert found.usage.total_tokens == len(prompt) + 9
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_l9_a_response_streams_the_same(client: Any) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * 9
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 9


def test_l9_thoughts_texts_and_calls_are_items(talking: Any) -> None:
    ask = ASK | {"max_output_tokens": 200, "tools": [MOVE]}
    found = talking.responses.create(**ask)
    thought, text, call = found.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "I should move.")
    assert (text.type, text.content[0].text) == ("message", "I move it.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "move", {"x": 4})
    assert found.status == "completed"
    assert found.usage.output_tokens_details.reasoning_tokens == len("\nI should move.\n</think>")
    with talking.responses.stream(**ask) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[2].arguments) == {"x": 4}
    assert "response.reasoning_text.delta" in seen
    assert "response.function_call_arguments.done" in seen

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    talk = [{"role": "user", "content": "go"}, *(item.to_dict() for item in found.output), result]
    assert talking.responses.create(**ask | {"input": talk}).output[-1].type == "function_call"
    assert talking.responses.create(**ask, tool_choice="none").output[-1].type == "message"


def test_l9_a_call_that_a_response_must_make_comes(client: Any) -> None:
    for choice in ("required", {"type": "function", "name": "move"}):
        ask = ASK | {"max_output_tokens": 300, "temperature": 1.8}
        found = client.responses.create(
            **ask, tools=[MOVE], tool_choice=choice, parallel_tool_calls=False, extra_body={"seed": 3}
        )
        (call,) = found.output
        assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "move", {"x"})
        assert found.tools[0].name == "move"


def test_l9_the_form_of_a_response_holds(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for form in ({"type": "json_schema", "name": "x", "schema": schema}, {"type": "json_object"}):
        found = client.responses.create(
            **ASK | {"max_output_tokens": 200, "temperature": 1}, text={"format": form}, extra_body={"seed": 5}
        )
        if found.status == "completed":
            assert isinstance(json.loads(found.output_text), dict)
        assert found.text.format.type == form["type"]
    assert found.text.format.type == "json_object"


def test_l9_items_reach_the_template_by_the_names_it_knows(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy.model is not None
    tokenizer, seen = toy.generator.texts.tokenizer, []
    chat = tokenizer.chat
    monkeypatch.setattr(tokenizer, "chat", lambda talk, most=None: (seen.append(talk), chat(talk))[1])
    calls = [{"type": "function_call", "call_id": f"{i}", "name": "move", "arguments": f'{{"x": {i}}}'} for i in (1, 2)]
    talk = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "user", "content": "go"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I go.", "annotations": []}]},
        *calls,
        {"type": "function_call_output", "call_id": "1", "output": "done"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "stuck"}]},
        {"type": "reasoning", "summary": []},
        calls[0],
    ]  # fmt: skip
    assert toy.post(PATH, ASK | {"input": talk, "instructions": "be kind", "tools": [MOVE]}).status == 200
    (found,) = seen
    sent = [
        {"id": f"{i}", "type": "function", "function": {"name": "move", "arguments": {"x": i}}} for i in (1, 2)
    ]
    assert found.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I go.", "reasoning_content": "hm", "tool_calls": sent},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "tool", "tool_call_id": "2", "content": "stuck"},
        {"role": "assistant", "content": "", "tool_calls": sent[:1]},
    ]
    assert found.tools[0]["function"]["parameters"] == MOVE["parameters"]


def _item(**fields: Any) -> Any:
    return {"input": [fields]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 10_001}, "input"),
        (_item(role="user"), "input[0].content"),
        (_item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[0].content[0]"),
        (_item(type="item_reference", id="x"), "input[0]"),
        (_item(type="function_call", call_id="1", name="x", arguments="[1]"), "input[0].arguments"),
        (_item(type="function_call_output", call_id="1"), "input[0].output"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [MOVE | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [MOVE], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"input": "x" * 600}, "input"),
        ({"model": "other"}, "model"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_l9_what_a_response_cannot_be_asked_is_refused_by_name(toy: Toy, fields: Any, param: str) -> None:
    answer = toy.post(PATH, ASK | fields)
    error = toy.error(answer)
    assert answer.status == (404 if param == "model" else 400)
    assert error["param"] == param
    assert error["message"].startswith((param, "the model"))


def test_l9_the_length_of_another_api_is_told_by_the_name_that_it_has_here(toy: Toy) -> None:
    answer = toy.post(PATH, ASK | {"max_tokens": 9})
    assert answer.status == 400
    assert toy.error(answer)["message"].endswith("; did you mean max_output_tokens?")


def test_l9_a_thought_that_was_cut_stays_in_its_own_turn() -> None:
    """It may be sent back, and is no part of a later answer."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [HELLO, thought, HELLO, {"role": "assistant", "content": "yes"}, HELLO]
    asked = response(json.dumps(ASK | {"input": items}).encode()).conversation
    assert asked is not None
    cut = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert list(asked.messages) == [HELLO, cut, HELLO, {"role": "assistant", "content": "yes"}, HELLO]
    turns = [HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}, HELLO]
    talk = message(json.dumps({"model": "toy", "max_tokens": 1, "messages": turns}).encode())
    assert talk.conversation is not None
    assert list(talk.conversation.messages) == [HELLO, cut, HELLO]


def test_l9_a_long_text_with_many_commas_is_one_value() -> None:
    asked = response(json.dumps(ASK | {"instructions": "1,2\n" * 60_000}).encode())
    assert asked.conversation is not None
    assert len(asked.conversation.messages[0]["content"]) == 240_000
    table = "1,2\n" * 60_000
    for system in (table, [{"type": "text", "text": table}]):
        body = {"model": "toy", "max_tokens": 1, "system": system, "messages": [{"role": "user", "content": "x"}]}
        talk = message(json.dumps(body).encode()).conversation
        assert talk is not None
        assert talk.messages[0]["content"] == table


def test_l9_an_effort_of_none_switches_thoughts_off() -> None:
    off = {"reasoning_effort": "none", "enable_thinking": False}
    asked = response(json.dumps(ASK | {"reasoning": {"effort": "none"}}).encode())
    talk = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none"}
    assert asked.conversation is not None
    assert asked.conversation.more == off
    on = {"enable_thinking": True}
    for more, found in (({}, off), ({"chat_template_kwargs": on}, off | on)):
        chatting = chat(json.dumps(talk | more).encode()).conversation
        assert chatting is not None
        assert chatting.more == found


def test_l9_a_request_that_waits_does_not_keep_its_body() -> None:
    """Bodies are counted until they are queued (--max-bodies-mb)."""
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    body = bytes(json.dumps(ASK | {"text": {"format": form}, "tools": [MOVE]}).encode() + b" " * 1000)
    before = sys.getrefcount(body)
    asked = response(body)
    assert asked.said["text"]["format"]["name"] == "x"
    assert sys.getrefcount(body) == before


def test_l9_items_beyond_bounds_are_not_decoded(toy: Toy) -> None:
    items = [{"role": "user", "content": "x"}] * 30_000
    assert toy.error(toy.post(PATH, ASK | {"input": items}))["message"] == "input: holds 30000, must hold 1 to 10000"


def test_l9_a_model_that_fails_is_an_event_once_a_response_has_begun() -> None:
    runner = Model()
    with Toy(runner) as toy, client_of(toy) as caller:
        steps = iter(range(100))
        runner.fails = lambda step: RuntimeError("broken") if next(steps) >= 3 else None
        *_, last = caller.responses.create(**ASK, stream=True)
        assert (last.type, last.code) == ("error", "processor_failed")


def test_l9_a_template_that_refuses_the_input_is_told_with_one_name() -> None:
    error = refused(ConfigError("messages: the chat template refuses them: no tools"), "input")
    assert error.message == "input: the chat template refuses them: no tools"
