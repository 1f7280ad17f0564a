"""L9 POST /v1/messages: the Anthropic API, spoken by the unmodified `anthropic` client to a server of the toy model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from late import Late
from reflex_runtime.llm import LLMEngine, SamplingParams
from serving.openai_toy import MOVE_PARAMETERS, TALK, Model, Speaker, Toy

anthropic = Late("anthropic")
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: list[Any] = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "toy", "max_tokens": 9, "messages": HI}
MOVE: dict[str, Any] = {
    "name": "move",
    "description": "Moves the arm.",
    "input_schema": MOVE_PARAMETERS,
}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # its client no longer has a name for it


def client_of(toy: Toy, key: str = "any") -> Any:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{toy.port}", api_key=key, max_retries=0)


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


def block(text: str, **more: Any) -> Any:
    return {"type": "text", "text": text, **more}


def refused(toy: Toy, fields: Any, path: str = PATH, **headers: str) -> tuple[int, str, str]:
    answer = toy.post(path, fields, **headers)
    body = answer.json
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    return answer.status, body["error"]["type"], body["error"]["message"]


def test_l9_a_message_is_what_the_engine_says(client: Any) -> None:
    found = client.messages.create(**ASK, system="be brief", **GREEDY)
    (output,) = LLMEngine().generate(["system: be brief\nuser: hi\nassistant: "], SamplingParams.greedy(9))
    assert (found.type, found.role, found.model) == ("message", "assistant", "toy")
    assert found.id.startswith("msg_")
    assert [(block.type, block.text) for block in found.content] == [("text", output.text)]
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len("system: be brief\nuser: hi\nassistant: "), 9)


def test_l9_a_message_streams_the_same(client: Any) -> None:
    whole = client.messages.create(**ASK, **GREEDY)
    with client.messages.stream(**ASK, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, "max_tokens")
    assert final.usage.output_tokens == 9
    raw = [event.type for event in client.messages.create(**ASK, **GREEDY, stream=True)]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[2:-3] == ["content_block_delta"] * 9
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "text" in kinds


def test_l9_a_stop_sequence_ends_a_message_and_is_named(client: Any) -> None:
    plain = client.messages.create(**ASK | {"max_tokens": 30}, **GREEDY).content[0].text
    stop = plain[7:10]
    more = ASK | {"max_tokens": 30, "stop_sequences": ["never", stop]} | GREEDY
    found = client.messages.create(**more)
    assert found.content[0].text == plain[: plain.index(stop)]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    with client.messages.stream(**more) as stream:
        assert "".join(stream.text_stream) == found.content[0].text
        assert stream.get_final_message().stop_sequence == stop


def test_l9_the_cache_of_prompts_is_told(toy: Toy, client: Any) -> None:
    ask = ASK | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 90}]}]}
    first, second = (client.messages.create(**ask).usage for _ in range(2))
    assert (first.cache_read_input_tokens, first.input_tokens) == (0, 108)
    assert (second.cache_read_input_tokens, second.input_tokens) == (96, 12)


@pytest.mark.parametrize("as_blocks", [True, False])
def test_l9_a_line_of_billing_is_no_part_of_the_prompt(toy: Toy, client: Any, as_blocks: bool) -> None:
    """It differs in every request of an agent: behind it nothing would be found in the cache."""

    def asked(line: str) -> Any:
        rules = f"{as_blocks} {'Be brief. ' * 12}"
        system: Any = [block(line), block(rules)] if as_blocks else f"{line}\n{rules}"
        return client.messages.create(**ASK, system=system).usage

    asked("x-anthropic-billing-header: cc_version=2; cch=71fea;")
    usage = asked("x-anthropic-billing-header: cc_version=2; cch=0aaa9;")
    assert (usage.cache_read_input_tokens, usage.input_tokens < 16) == (144, True), usage
    other = asked("x-anthropic-other: 1")
    assert other.cache_read_input_tokens <= 16


def test_l9_thoughts_texts_and_calls_are_blocks(talking: Any) -> None:
    ask = ASK | {"max_tokens": 200, "tools": [MOVE]}
    found = talking.messages.create(**ask)
    thought, text, call = found.content
    assert (thought.type, thought.thinking) == ("thinking", "I should move.")
    assert (text.type, text.text) == ("text", "I move it.")
    assert (call.type, call.name, call.input) == ("tool_use", "move", {"x": 4})
    assert found.stop_reason == "tool_use"
    with talking.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert [streamed.content[0].thinking, streamed.content[1].text] == ["I should move.", "I move it."]
    assert (streamed.content[2].input, streamed.stop_reason) == ({"x": 4}, "tool_use")

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    talk = [*HI, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    assert talking.messages.create(**ask | {"messages": talk}).stop_reason == "tool_use"
    plain = talking.messages.create(**ask, tool_choice={"type": "none"})
    assert [block.type for block in plain.content] == ["thinking", "text"]
    assert plain.stop_reason == "end_turn"


def test_l9_a_demanded_call_comes(client: Any) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "move"}):
        found = client.messages.create(
            **ASK | {"max_tokens": 300}, tools=[MOVE], tool_choice=choice, extra_body={"seed": 1}
        )
        (call,) = found.content
        assert (call.type, call.name, set(call.input), found.stop_reason) == ("tool_use", "move", {"x"}, "tool_use")


def test_l9_the_form_of_a_message_holds(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    found = client.messages.create(**ASK | {"max_tokens": 60}, output_config=config)
    assert json.loads(found.content[0].text)["a"] in (1, 2)


def test_l9_messages_reach_the_template_by_the_names_it_knows(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy.model is not None
    tokenizer, seen = toy.generator.texts.tokenizer, []
    chat = tokenizer.chat
    monkeypatch.setattr(tokenizer, "chat", lambda talk, most=None: (seen.append(talk), chat(talk))[1])
    talk = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                block("I go."),
                {"type": "tool_use", "id": "1", "name": "move", "input": {"x": 4}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [block("stuck")], "is_error": True},
                block("again", cache_control={"type": "ephemeral"}),
            ],
        },
    ]
    more = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"level": 2}, "tools": [MOVE]}
    assert toy.post(PATH, ASK | {"messages": talk} | more).status == 200
    (found,) = seen
    call = {"id": "1", "type": "function", "function": {"name": "move", "arguments": {"x": 4}}}
    assert found.messages == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I go.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "Error: stuck"},
        {"role": "user", "content": "again"},
    ]
    assert found.more == {"enable_thinking": False, "level": 2}
    (tool,) = found.tools
    assert tool["function"] == {
        "name": "move", "description": "Moves the arm.", "parameters": MOVE["input_schema"]
    }  # fmt: skip


def test_l9_tokens_of_messages_are_counted(toy: Toy, client: Any) -> None:
    found = client.messages.count_tokens(model="toy", messages=HI, system="be brief", tools=[MOVE])
    asked = client.messages.create(**ASK, system="be brief", tools=[MOVE])
    assert found.input_tokens == asked.usage.input_tokens + asked.usage.cache_read_input_tokens
    assert refused(toy, {"model": "other", "messages": HI}, COUNT)[:2] == (404, "not_found_error")
    assert refused(toy, {"model": "toy", "messages": HI, "max_tokens": 1}, COUNT)[0] == 400
    status, _, message = refused(toy, {"model": "toy", "messages": HI, "seed": 1}, COUNT)
    assert (status, message[:5]) == (400, "seed:")


def test_l9_the_key_of_its_client_is_honoured() -> None:
    with Toy(api_key="secret") as toy:
        with client_of(toy, "secret") as right:
            assert right.messages.create(**ASK).usage.output_tokens == 9
        with client_of(toy, "wrong") as wrong, pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**ASK)
        assert refused(toy, ASK)[:2] == (401, "authentication_error")
        assert toy.post(PATH, ASK, **{"x-api-key": "secret"}).status == 200


BROKEN = {"type": "json_schema", "schema": {"type": "nothing"}}


def _block(type: str, **more: Any) -> Any:
    return {"messages": [{"role": "user", "content": [{"type": type, **more}]}]}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": None}, "max_tokens: expected"),
        ({"max_tokens": 0}, "max_tokens=0: must be >= 1"),
        ({"messages": []}, "messages: holds 0, must"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "messages: must not end with"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: is empty"),
        (_block("image", source={"type": "base64"}), "messages[0].content[0]: a block 'image' is wrong here"),
        (_block("tool_use", id="1", name="x", input={}), "messages[0].content[0]: a block 'tool_use' is wrong here"),
        (_block("tool_result", content="x"), "messages[0].content[0].tool_use_id: is missing"),
        (_block("tool_result", tool_use_id="1", content=[{"type": "image"}]), "messages[0].content[0].content[0]: has"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "x", "input": [1]}]},
                       *HI]}, "messages[0].content[0].input: must be a JSON object"),
        ({"system": [{"type": "image"}]}, "system[0]: has type 'image'"),
        ({"stop_sequences": [""]}, "stop_sequences=['']: must be at most 16 texts"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=[-1]: must be at most 256 token ids"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": None}}},
            "output_config.format.schema: is missing",
        ),
        ({"temperature": 3}, "temperature=3.0: must be in [0, 2]"),
        ({"metadata": {"user_id": "\n"}}, "metadata.user_id: holds a control character"),
        ({"metadata": {"user": "a"}}, "metadata.user: object contains unknown field `user`; did you mean user_id?"),
        ({"output_config": {"format": BROKEN}}, "output_config.format: "),
        ({"tools": [MOVE | {"name": "a b"}]}, "tools[0].name: expected `str` matching regex"),
        ({"tools": [MOVE], "tool_choice": {"type": "tool"}}, "tool_choice.name: is for type tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: demands a call, but there are no tools"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: invalid enum value 'robot'; must be"),
        ({"stop": ["x"]}, "stop: object contains unknown field `stop`"),
        ({"max_token": 3}, "max_token: object contains unknown field `max_token`; did you mean max_tokens?"),
    ],
)  # fmt: skip
def test_l9_what_a_message_cannot_ask_is_refused_by_name(toy: Toy, fields: Any, told: str) -> None:
    status, kind, message = refused(toy, ASK | fields)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith(told)
    assert ("did you mean" in message) is ("did you mean" in told)


def test_l9_what_is_not_utf8_is_no_json_also_where_it_is_passed_on_as_it_is(toy: Toy) -> None:
    use = {"type": "tool_use", "id": "1", "name": "x", "input": {"a": "HERE"}}
    body = json.dumps(ASK | {"messages": [*HI, {"role": "assistant", "content": [use]}, *HI]}).encode()
    status, kind, message = refused(toy, body.replace(b"HERE", b"\xff"))
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("the body is not JSON")


def test_l9_bounds_of_messages_hold(toy: Toy) -> None:
    many = [{"role": "user", "content": "x"}] * 10_001
    assert refused(toy, ASK | {"messages": many})[2].startswith("messages: holds 10001")
    use = {"type": "tool_use", "id": "1", "name": "x", "input": {"a": [1] * 50_100}}
    deep = [{"role": "assistant", "content": [use]}, *HI]
    assert "hold more than 50000 values" in refused(toy, ASK | {"messages": deep})[2]
    long = [{"role": "user", "content": "x" * 600}]
    assert refused(toy, ASK | {"messages": long})[2].startswith("the model's context")
    assert refused(toy, b"{")[:2] == (400, "invalid_request_error")
    for depth in range(960, 1000, 3):
        schema = '{"a":' * depth + "1" + "}" * depth
        head = '"model": "toy", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]'
        body = f'{{{head}, "tools": [{{"name": "f", "input_schema": {schema}}}]}}'
        assert toy.post(PATH, body.encode()).status in (200, 400), depth


def test_l9_a_model_that_fails_is_an_event_once_a_message_has_begun() -> None:
    runner = Model()
    with Toy(runner) as toy, client_of(toy) as caller:
        runner.fails = lambda step: RuntimeError("broken")
        with pytest.raises(anthropic.InternalServerError) as caught:
            caller.messages.create(**ASK)
        assert caught.value.body["error"]["type"] == "api_error"
        steps = iter(range(100))
        runner.fails = lambda step: RuntimeError("broken") if next(steps) >= 3 else None
        seen = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            seen += caller.messages.create(**ASK, stream=True)
        assert caught.value.body["error"]["type"] == "api_error"
