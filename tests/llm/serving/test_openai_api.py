"""The OpenAI API, spoken by the unmodified `openai` client and over plain sockets, to a server of the toy model."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from late import Late
from reflex_runtime.core.errors import ConfigError, TooLarge
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine import logits_processors
from reflex_runtime.llm.engine.output_parsers import FORMS
from reflex_runtime.llm.engine.toy import ByteTokenizer
from serving.openai_toy import Model, Speaker, Toy

openai = Late("openai")
GREEDY = {"model": "toy", "temperature": 0}


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy(Model(max_model_len=512)) as server:
        yield server


@pytest.fixture(scope="module")
def client(toy: Toy) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{toy.port}/v1", api_key="any", max_retries=0) as found:
        yield found


def expected(prompt: str | list[int], params: SamplingParams) -> str:
    """What the engine says by itself."""
    (output,) = LLMEngine().generate([prompt], params)
    assert output.error is None
    return output.text


# -- completions -------------------------------------------------------------------------------------------------------


def test_l9_a_completion_is_what_the_engine_says(toy: Toy, client: Any) -> None:
    found = client.completions.create(prompt="Robots that", max_tokens=12, **GREEDY)
    assert found.object == "text_completion"
    assert found.id.startswith("cmpl-")
    assert found.model == "toy"
    (choice,) = found.choices
    assert choice.text == expected("Robots that", SamplingParams.greedy(12))
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (11, 12, 23)
    assert set(toy.complete().json) == {"id", "object", "created", "model", "choices", "usage"}


def test_l9_max_tokens_is_sixteen_and_temperature_one_unless_said(client: Any) -> None:
    found = client.completions.create(model="toy", prompt="Robots", seed=5)
    assert found.choices[0].text == expected("Robots", SamplingParams(max_tokens=16, temperature=1.0, seed=5))


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_l9_prompts_are_texts_or_token_ids_one_or_several(client: Any, prompt: Any, texts: list[str]) -> None:
    found = client.completions.create(prompt=prompt, max_tokens=6, **GREEDY)
    assert [choice.text for choice in found.choices] == [expected(text, SamplingParams.greedy(6)) for text in texts]
    assert [choice.index for choice in found.choices] == list(range(len(texts)))
    assert found.usage.prompt_tokens == sum(map(len, texts))
    assert found.usage.completion_tokens == 6 * len(texts)


def test_l9_a_stream_says_the_same_token_by_token(client: Any) -> None:
    whole = client.completions.create(prompt="Robots", max_tokens=10, **GREEDY)
    parts = list(client.completions.create(prompt="Robots", max_tokens=10, stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(parts) == 10
    assert [part.choices[0].finish_reason for part in parts] == [None] * 9 + ["length"]
    assert len({part.id for part in parts}) == 1
    assert all(part.usage is None for part in parts)


def test_l9_a_stream_is_server_sent_events_that_end_with_done(toy: Toy) -> None:
    with toy.open(max_tokens=3, stream=True) as caller:
        data = caller.read()
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head.lower()
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert all("usage" not in event for event in caller.said)


def test_l9_include_usage_brings_it_last(toy: Toy, client: Any) -> None:
    options = {"include_usage": True}
    *parts, last = client.completions.create(prompt="ab", max_tokens=4, stream=True, stream_options=options, **GREEDY)
    assert all(part.usage is None and part.choices for part in parts)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (2, 4, 6)
    with toy.open(max_tokens=2, stream=True, stream_options=options) as caller:
        caller.read()
    assert [event["usage"] is None for event in caller.said] == [True, True, False]


def test_l9_continuous_usage_stats_come_with_every_event(client: Any) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = client.completions.create(prompt="ab", max_tokens=4, stream=True, stream_options=options, **GREEDY)
    assert [part.usage.completion_tokens for part in parts] == sorted(part.usage.completion_tokens for part in parts)
    assert {part.usage.prompt_tokens for part in parts} == {2}
    assert (parts[-1].usage.completion_tokens, last.usage.completion_tokens, last.choices) == (4, 4, [])
    alone: Any = {"continuous_usage_stats": True}
    hello: Any = [{"role": "user", "content": "hi"}]
    ask: dict[str, Any] = {"messages": hello, "max_tokens": 3, "stream": True, "stream_options": alone}
    chats = list(client.chat.completions.create(**ask, **GREEDY))
    assert all(part.usage is not None and part.choices for part in chats)


def test_l9_stop_ends_before_the_text_also_in_a_stream(client: Any) -> None:
    plain = expected("Robots", SamplingParams.greedy(30))
    for stop in (plain[7:10], [plain[7:10], "never"]):
        found = client.completions.create(prompt="Robots", max_tokens=30, stop=stop, **GREEDY).choices[0]
        assert (found.text, found.finish_reason) == (plain[: plain.index(plain[7:10])], "stop")
        parts = list(client.completions.create(prompt="Robots", max_tokens=30, stop=stop, stream=True, **GREEDY))
        assert "".join(part.choices[0].text for part in parts) == found.text
        assert parts[-1].choices[0].finish_reason == "stop"


def test_l9_a_seed_repeats_and_n_choices_are_seeds_in_a_row(client: Any) -> None:
    ask = {"model": "toy", "prompt": "Robots", "max_tokens": 12, "temperature": 1.5}
    three = client.completions.create(n=3, seed=40, **ask)
    singles = [client.completions.create(seed=40 + i, **ask).choices[0].text for i in range(3)]
    assert [choice.text for choice in three.choices] == singles
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(singles)) == 3
    assert three.usage.prompt_tokens == 6
    assert three.usage.completion_tokens == 36
    other = client.completions.create(n=2, **ask)
    assert other.choices[0].text != other.choices[1].text


def test_l9_n_choices_in_a_stream_carry_their_index(client: Any) -> None:
    ask = {"model": "toy", "prompt": ["ab", "cd"], "max_tokens": 5, "n": 2, "seed": 3}
    whole = client.completions.create(**ask)
    said = [""] * 4
    for part in client.completions.create(stream=True, **ask):
        for choice in part.choices:
            said[choice.index] += choice.text
    assert said == [choice.text for choice in whole.choices]


def test_l9_choices_share_their_prompt_through_the_prefix_cache() -> None:
    runner = Model()
    with Toy(runner) as toy:
        before = len(runner.sizes)
        answer = toy.complete("x" * 100, n=4, max_tokens=1)
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert sum(runner.sizes[before:]) == 100 + 3 * (100 - 96)
        again = toy.complete("x" * 100, max_tokens=1)
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_l9_logprobs_of_a_completion_have_the_old_shape(client: Any) -> None:
    found = client.completions.create(prompt="Robots", max_tokens=4, logprobs=2, **GREEDY).choices[0]
    logprobs = found.logprobs
    assert logprobs.tokens == list(found.text)
    assert logprobs.text_offset == [0, 1, 2, 3]
    for token, own, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == own == max(top.values())
        assert len(top) == 2
    parts = list(client.completions.create(prompt="Robots", max_tokens=4, logprobs=2, stream=True, **GREEDY))
    told = [part.choices[0].logprobs for part in parts]
    assert [t.tokens for t in told] == [[token] for token in logprobs.tokens]
    assert [t.text_offset for t in told] == [[0], [1], [2], [3]]
    none = client.completions.create(prompt="Robots", max_tokens=2, logprobs=0, **GREEDY).choices[0].logprobs
    assert [list(top) for top in none.top_logprobs] == [[token] for token in none.tokens]


def test_l9_logprobs_tell_where_a_token_begins_also_while_text_is_held_for_a_stop(client: Any) -> None:
    text = client.completions.create(prompt="Robots", max_tokens=12, **GREEDY).choices[0].text
    near = text[2:5] + "\n"  # begins like the text does, and never comes
    more = {"max_tokens": 12, "logprobs": 0, "stop": [near], **GREEDY}
    found = client.completions.create(prompt="Robots", **more).choices[0]
    assert found.text == text
    assert found.logprobs.text_offset == list(range(12))
    parts = list(client.completions.create(prompt="Robots", stream=True, **more))
    assert "".join(part.choices[0].text for part in parts) == text
    assert [part.choices[0].logprobs.text_offset for part in parts] == [[i] for i in range(12)]


# -- chat --------------------------------------------------------------------------------------------------------------


def test_l9_embeddings_are_refused_by_name(toy: Toy, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="toy", input="hi")
    assert caught.value.body["message"] == "no such path: /v1/embeddings; /docs has all paths"
    assert "POST /v1/chat/completions" in toy.get("/").json["paths"]


def test_l9_a_conversation_is_answered(toy: Toy, client: Any) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    found = client.chat.completions.create(messages=messages, max_completion_tokens=9, **GREEDY)
    assert found.object == "chat.completion"
    assert found.id.startswith("chatcmpl-")
    (choice,) = found.choices
    prompt = "system: be brief\nuser: hi\nassistant: "
    assert choice.message.role == "assistant"
    assert choice.message.content == expected(prompt, SamplingParams.greedy(9))
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert found.usage.prompt_tokens == len(prompt)
    assert set(toy.chat("hi").json["choices"][0]["message"]) == {"role", "content", "refusal"}


def test_l9_content_may_be_parts_of_text_and_max_tokens_the_old_name(client: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = client.chat.completions.create(messages=[{"role": "user", "content": parts}], max_tokens=5, **GREEDY)
    assert found.choices[0].message.content == expected("user: one\ntwo\nassistant: ", SamplingParams.greedy(5))


def test_l9_without_a_limit_a_conversation_goes_on_to_the_end_of_the_context(client: Any) -> None:
    found = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **GREEDY)
    assert found.usage.total_tokens == 512
    assert found.choices[0].finish_reason == "length"


def test_l9_a_streamed_conversation_begins_with_the_role_and_ends_with_the_reason(client: Any) -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | GREEDY
    whole = client.chat.completions.create(**ask).choices[0].message.content
    first, *parts, last = client.chat.completions.create(stream=True, **ask)
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content for part in parts) == whole
    assert all(part.choices[0].delta.role is None for part in parts)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "length")


def test_l9_logprobs_of_a_conversation_have_the_new_shape(client: Any) -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True} | GREEDY
    found = client.chat.completions.create(top_logprobs=2, **ask).choices[0]
    for token, text in zip(found.logprobs.content, found.message.content, strict=True):
        assert token.token == text
        assert bytes(token.bytes).decode() == text
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob
    alone = client.chat.completions.create(**ask).choices[0]
    assert [token.top_logprobs for token in alone.logprobs.content] == [[], [], []]
    parts = [p.choices[0].logprobs for p in client.chat.completions.create(stream=True, top_logprobs=2, **ask)]
    told = [token.token for logprobs in parts if logprobs for token in logprobs.content]
    assert told == [token.token for token in found.logprobs.content]


# -- the rest of the door ----------------------------------------------------------------------------------------------


def test_l9_the_model_is_listed_and_no_other(client: Any) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("toy", "model", "reflex")
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.body["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt", prompt="x")
    assert (caught.value.body["code"], caught.value.body["param"]) == ("model_not_found", "model")


def test_l9_health_tells_state_and_load(toy: Toy) -> None:
    answer = toy.get("/health")
    assert answer.status == 200
    told = answer.json
    assert (told["status"], told["state"], told["model"], told["runner"]) == ("ok", "ready", "toy", "toy")
    assert (told["running"], told["waiting"], told["kv_cache_usage"], told["hung_steps"]) == (0, 0, 0.0, 0)
    assert told["max_model_len"] == 512


def test_l9_every_answer_has_a_request_id_and_the_callers_own_comes_back(toy: Toy) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nothing"):
        assert toy.get(path).headers["x-request-id"]
        assert toy.ask("GET", path, headers={"X-Request-Id": "mine 7"}).headers["x-request-id"] == "mine 7"
    mine = {"X-Request-Id": "a-b"}
    assert toy.post("/v1/completions", GREEDY | {"prompt": "x"}, **mine).headers["x-request-id"] == "a-b"
    assert toy.post("/v1/completions", b"{", **mine).headers["x-request-id"] == "a-b"
    bad = [toy.ask("GET", "/health", headers={"X-Request-Id": id}) for id in ("é", "x" * 257)]
    made = {answer.headers["x-request-id"] for answer in bad}
    assert len(made) == 2
    assert all(len(id) < 40 for id in made)


def test_l9_paths_and_methods_that_are_not_there(toy: Toy) -> None:
    answer = toy.get("/v1/embeddings")
    assert answer.status == 404
    assert toy.error(answer)["code"] == "not_found"
    answer = toy.get("/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    answer = toy.post("/v1/models", {})
    assert (answer.status, answer.headers["allow"]) == (405, "GET")
    assert toy.error(answer)["code"] == "method_not_allowed"


WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("max_tokens", 0),
    ("max_tokens", "many"),
    ("n", 0),
    ("n", 129),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", 7),
    ("logprobs", -1),
    ("logprobs", 21),
    ("priority", "high"),
    ("priority", 1),
    ("deadline_ms", 0),
    ("max_gap_ms", 0.9),
    ("max_gap_ms", 60_001),
    ("user", "x" * 257),
    ("user", "a\nb"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("best_of", 2),
    ("suffix", "end"),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("min_p", 1.5),
    ("min_tokens", 17),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {"256": 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("stop_token_ids", [256]),
    ("stop_token_ids", [-1]),
    ("nonsense", 1),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [97, "a"]),
    ("prompt", [256]),
    ("prompt", [-1]),
    ("prompt", 5),
    ("prompt", None),
]


@pytest.mark.parametrize(("param", "value"), WRONG, ids=lambda v: str(v)[:20])
def test_l9_a_wrong_value_is_400_and_names_its_field(toy: Toy, param: str, value: Any) -> None:
    answer = toy.complete(**{param: value})
    assert answer.status == 400
    error = toy.error(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]
    assert answer.headers["x-should-retry"] == "false"


def test_l9_how_tokens_are_sampled_reaches_the_engine(client: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    more = {"repetition_penalty": 1.3, "min_p": 0.1, "min_tokens": 4}
    found = client.completions.create(
        model="toy", prompt="Robots", seed=3, logit_bias={"97": -5.0}, extra_body=more, **asked
    )
    params = SamplingParams(seed=3, logit_bias=((97, -5.0),), **asked, **more)
    assert found.choices[0].text == expected("Robots", params)
    assert found.choices[0].text != expected("Robots", SamplingParams(max_tokens=24, seed=3))


def test_l9_stop_texts_and_ids_end_an_answer_as_asked(client: Any) -> None:
    plain = expected("Robots", SamplingParams.greedy(30))
    found = client.completions.create(
        prompt="Robots", max_tokens=30, stop=plain[5:8], extra_body={"include_stop_str_in_output": True}, **GREEDY
    ).choices[0]
    assert (found.text, found.finish_reason) == (plain[:8], "stop")
    found = client.completions.create(
        prompt="Robots", max_tokens=30, extra_body={"stop_token_ids": [ord(plain[9])]}, **GREEDY
    ).choices[0]
    assert (found.text, found.finish_reason) == (plain[: plain.index(plain[9])], "stop")


def test_l9_echo_begins_each_choice_with_its_prompt(toy: Toy, client: Any) -> None:
    ask: dict[str, Any] = {"prompt": ["ab", "cd"], "max_tokens": 5, "n": 2, "seed": 3, "model": "toy"}
    plain = [choice.text for choice in client.completions.create(**ask).choices]
    echoed = [text + more for text, more in zip(["ab", "ab", "cd", "cd"], plain, strict=True)]
    assert [choice.text for choice in client.completions.create(echo=True, **ask).choices] == echoed
    said = [""] * 4
    for part in client.completions.create(echo=True, stream=True, **ask):
        for choice in part.choices:
            said[choice.index] += choice.text
    assert said == echoed
    ids = client.completions.create(prompt=[97, 98], echo=True, max_tokens=5, **GREEDY)
    assert ids.choices[0].text == "ab" + expected("ab", SamplingParams.greedy(5))


SCHEMA = {
    "type": "object",
    "properties": {"robot": {"enum": ["arm", "rover"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["robot", "steps"],
    "additionalProperties": False,
}


def test_l9_an_answer_has_the_form_that_its_schema_says(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA, "strict": True}}
    ask: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Plan"}], "max_tokens": 300}
    found = client.chat.completions.create(response_format=form, n=4, seed=2, **ask)
    plans = [json.loads(choice.message.content) for choice in found.choices]
    assert all(choice.finish_reason == "stop" for choice in found.choices)
    assert all(set(plan) == {"robot", "steps"} and plan["robot"] in ("arm", "rover") for plan in plans)
    assert len({choice.message.content for choice in found.choices}) > 1
    parts = list(client.chat.completions.create(response_format=form, seed=2, stream=True, **ask))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == found.choices[0].message.content


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "(ab|cd){1,9};"}, r"(ab|cd){1,9};"),
        ({"choice": ["left", "right", 'say "hi"\n']}, r'left|right|say "hi"\n'),
        ({"grammar": 'start: "go" /[0-9]/ ("," /[0-9]/)* "."'}, r"go\d(,\d)*\."),
        ({"json": json.dumps({"type": "boolean"})}, r"\s*(true|false)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_l9_structured_outputs_are_what_they_say(client: Any, form: Any, pattern: str) -> None:
    found = client.completions.create(
        model="toy", prompt="Go", max_tokens=200, n=6, seed=1, extra_body={"structured_outputs": form}
    )
    assert all(re.fullmatch(pattern, choice.text) for choice in found.choices), [c.text for c in found.choices]
    assert {choice.finish_reason for choice in found.choices} == {"stop"}


def test_l9_a_form_is_compiled_once_and_not_on_the_event_loop(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    plain = logits_processors._grammar

    def grammar(library: Any, form: Any) -> str:
        threads.append(threading.current_thread().name)
        return plain(library, form)

    monkeypatch.setattr(logits_processors, "_grammar", grammar)
    for _ in range(2):
        assert toy.complete(n=3, structured_outputs={"regex": "[xyz]here"}).status == 200
    assert [name.rpartition("_")[0] for name in threads] == ["reflex-forms"] * 2  # looked at, and compiled


def test_l9_a_form_that_response_format_says_too_is_refused(toy: Toy) -> None:
    answer = toy.complete(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert (answer.status, toy.error(answer)["param"]) == (400, "structured_outputs")
    assert toy.complete(response_format={"type": "text"}, structured_outputs={"regex": "a"}).status == 200


def test_l9_a_schema_at_the_wrong_place_is_told_the_field_that_holds_it(toy: Toy) -> None:
    answer = toy.complete(response_format={"type": "json_schema", "schema": {}})
    assert answer.status == 400
    assert toy.error(answer)["message"].endswith("unknown field `schema`; did you mean json_schema?")


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages[0].role", None),
    ("messages[0].content", [{"type": "image_url", "image_url": {"url": "x"}}]),
    ("messages[0].content", None),
    ("messages[0].tool_calls", [{"id": "1"}]),
    ("messages[0].tool_calls", [_call("[]")]),
    ("messages[0].tool_calls", [_call('{"half": "\\ud800"}')]),
    ("messages[0].tool_calls", [_call('{"x": NaN}')]),
    ("messages[0].tool_calls", [_call('{"x": [' + "1," * 50_001 + "1]}")]),
    ("min_tokens", 5000),
    ("tools", [{"type": "function", "function": {}}]),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 1025),
    ("tool_choice", "required"),
    ("tool_choice", "sometimes"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"a b": 1}),
    ("response_format", {"type": "json"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": [""]}),
    ("structured_outputs", {"grammar": "nothing"}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"regex": "x" * 200_001}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "a"}),
    ("top_logprobs", 3),
    ("logprobs", 3),
    ("max_completion_tokens", 0),
    ("nonsense", None),
]


@pytest.mark.parametrize(("param", "value"), WRONG_CHAT, ids=lambda v: str(v)[:20])
def test_l9_the_same_for_a_conversation(toy: Toy, param: str, value: Any) -> None:
    message: dict[str, Any] = {"role": "user", "content": "hi"}
    fields: dict[str, Any] = GREEDY | {"messages": [message]}
    if param.startswith("messages[0]."):
        message[param.partition(".")[2]] = value
    else:
        fields[param] = value
    answer = toy.post("/v1/chat/completions", fields)
    assert answer.status == 400
    assert str(toy.error(answer)["param"]).startswith(param.partition("[")[0])
    assert param.rpartition(".")[2] in toy.error(answer)["message"]


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Moves the arm.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "maxProperties": 0}}},
]


def test_l9_a_call_reaches_the_client_and_its_result_the_model() -> None:
    text = 'I move it. <tool_call>\n{"name": "move", "arguments": {"x": 4}}\n</tool_call>'
    with (
        Toy(Speaker(text)) as server,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as caller,
    ):
        messages: list[Any] = [{"role": "user", "content": "Move"}]
        ask: dict[str, Any] = {"model": "toy", "tools": TOOLS, "max_tokens": 200}
        (choice,) = caller.chat.completions.create(messages=messages, **ask).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I move it.")
        assert (call.type, call.function.name, call.function.arguments) == ("function", "move", '{"x": 4}')

        with caller.chat.completions.stream(messages=messages, **ask) as stream:
            whole = stream.get_final_completion().choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I move it.")
        assert whole.message.tool_calls[0].function.arguments == '{"x": 4}'

        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        messages += [choice.message.model_dump(exclude_none=True), result]
        assert caller.chat.completions.create(messages=messages, **ask).choices[0].finish_reason == "tool_calls"
        (plain,) = caller.chat.completions.create(messages=messages, tool_choice="none", **ask).choices
        assert (plain.finish_reason, plain.message.content) == ("stop", text)  # nothing was to be called
        assert plain.message.tool_calls is None


def test_l9_a_thought_is_reasoning_content() -> None:
    text = "<think>\nTwo and two.\n</think>\n\nFour."
    with (
        Toy(Speaker(text)) as server,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as caller,
    ):
        ask: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 200}
        message = caller.chat.completions.create(**ask).choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Four.", "Two and two.")
        deltas = [part.choices[0].delta for part in caller.chat.completions.create(**ask, stream=True)]
        thought = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
        assert ("".join(thought), "".join(delta.content or "" for delta in deltas)) == ("Two and two.", "Four.")
        back = ask["messages"] + [message.model_dump(exclude_none=True), {"role": "user", "content": "and 3+3?"}]
        assert caller.chat.completions.create(**ask | {"messages": back}).choices[0].message.content == "Four."
        plain = caller.completions.create(model="toy", prompt="2+2?", max_tokens=200).choices[0].text
        assert plain == text  # a completion has no parts


def test_l9_a_prompt_may_begin_the_thought_but_a_form_has_none(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy.model is not None
    tokenizer = toy.generator.texts.tokenizer
    monkeypatch.setattr(tokenizer, "chat", lambda talk, most=None: tokenizer.encode("user: hi\nassistant: <think>\n"))
    message = toy.chat("hi", max_tokens=5).json["choices"][0]["message"]
    assert (message["content"], len(message["reasoning_content"])) == ("", 5)
    form = {"structured_outputs": {"choice": ["yes", "no"]}}  # holds from the first token on
    message = toy.chat("hi", **form).json["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert "reasoning_content" not in message


def test_l9_a_call_that_is_demanded_comes(client: Any) -> None:
    ask: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Go"}], "max_tokens": 300}
    for choice, names in (
        ("required", {"move", "stop"}),
        ({"type": "function", "function": {"name": "move"}}, {"move"}),
    ):
        found = client.chat.completions.create(
            tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=4, temperature=1.8, seed=1, **ask
        )
        calls = [call for one in found.choices for call in one.message.tool_calls]
        assert len(calls) == 4
        assert {call.function.name for call in calls} == names
        assert {one.finish_reason for one in found.choices} == {"tool_calls"}
        for call in calls:
            assert set(json.loads(call.function.arguments)) == ({"x"} if call.function.name == "move" else set())


def test_l9_tools_that_a_model_does_not_know_are_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "tool_format", None)
    answer = toy.post("/v1/chat/completions", GREEDY | {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
    assert (answer.status, toy.error(answer)["param"]) == (400, "tools")
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    monkeypatch.setattr(ByteTokenizer, "tool_format", FORMS["hermes"])
    demanded = {"tools": [*TOOLS, broken], "tool_choice": "required"}
    fields = GREEDY | {"messages": [{"role": "user", "content": "x"}]} | demanded
    answer = toy.post("/v1/chat/completions", fields)
    assert (answer.status, toy.error(answer)["param"]) == (400, "tools")
    assert toy.error(answer)["message"] == "tools: 'f': parameters: Invalid type: nothing"
    both = fields | {"tools": TOOLS, "response_format": {"type": "json_object"}}
    assert toy.error(toy.post("/v1/chat/completions", both))["param"] == "tool_choice"


def test_l9_what_clients_send_without_meaning_anything_is_taken(toy: Toy) -> None:
    plain = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "n": None, "stop": None, "user": "me"}
    answer = toy.complete(**plain, best_of=1, echo=False, suffix=None, stream=False)
    assert answer.status == 200
    answer = toy.chat(
        "hi", max_tokens=1, **plain, tools=[], tool_choice="auto", response_format={"type": "text"},
        metadata={"a": "b"}, modalities=["text"], store=False, service_tier="auto", parallel_tool_calls=True,
        prompt_cache_key="k",
        logprobs=False, top_logprobs=0,
    )  # fmt: skip
    assert answer.status == 200
    said = answer.json["choices"][0]["message"]
    messages = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "go on", "name": "x"}]
    assert toy.post("/v1/chat/completions", GREEDY | {"messages": messages, "max_tokens": 1}).status == 200


def test_l9_a_prompt_over_the_context_is_400_and_tells_the_limits(toy: Toy, client: Any) -> None:
    answer = toy.complete("x" * 500, max_tokens=13)
    error = toy.error(answer)
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert all(number in error["message"] for number in ("512", "500", "13"))
    assert toy.complete("x" * 500, max_tokens=12).status == 200
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=[{"role": "user", "content": "x" * 600}], **GREEDY)
    assert (caught.value.body["code"], caught.value.body["param"]) == ("context_length_exceeded", "messages")


NOT_JSON = [b"", b"{", b"[1]", b'{"model": "toy", "prompt": "x"', b"\xff", b"[" * 10_000, rb'{"model": "\ud800"}']


@pytest.mark.parametrize("body", NOT_JSON)
def test_l9_what_is_not_json_is_400(toy: Toy, body: bytes) -> None:
    answer = toy.post("/v1/completions", body)
    assert answer.status == 400
    assert toy.error(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("size", [0, 200_000], ids=["decoded on the loop", "beside it"])
@pytest.mark.parametrize("form", ["tools", "demanded", "variables"])
def test_l9_values_that_nest_too_deeply_are_400_at_every_depth(toy: Toy, form: str, size: int) -> None:
    """Whoever walks through them runs out of stack a few levels apart: the decoder, the template, the tokenizer."""
    tools = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'
    demanded, variables = tools + ', "tool_choice": "required"', '"chat_template_kwargs": %s'
    field = {"tools": tools, "demanded": demanded, "variables": variables}
    rest = f'"model": "toy", "max_tokens": 1, "messages": [{{"role": "user", "content": "hi"}}]{" " * size}'
    for depth in range(970, 1000, 2):
        value = '{"a":' * depth + "1" + "}" * depth
        answer = toy.post("/v1/chat/completions", f"{{{rest}, {field[form] % value}}}".encode())
        assert answer.status in (200, 400), depth


def test_l9_a_template_that_refuses_is_400_and_does_not_tell_where_the_model_lies(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert toy.model is not None
    for said, told in (
        ("/srv/models/x: chat template: TypeError: no", "messages: chat template: TypeError: no"),
        ("messages[0].role='x': must be other", "messages[0].role='x': must be other"),
    ):

        def refuses(*given: Any, said: str = said, **more: Any) -> Any:
            raise ConfigError(said)

        monkeypatch.setattr(toy.generator.processor.tokenizer, "chat", refuses)
        answer = toy.chat("hi")
        assert answer.status == 400
        assert toy.error(answer)["message"] == told
        assert toy.error(answer)["param"].startswith("messages")


def test_l9_a_long_prompt_is_tokenised_beside_the_loop(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy.model is not None
    tokenizer, threads = toy.generator.processor.tokenizer, []
    encode = tokenizer.encode

    def noting(text: str, most: int | None = None) -> list[int]:
        threads.append(threading.current_thread().name)
        if len(text) > 3000:
            raise TooLarge(f"the model's context holds {most} tokens, and the prompt has more")
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", noting)
    toy.complete("x" * 2000)
    toy.complete("x" * 2001)
    assert threads[0] == "toy-server"
    assert threads[1].startswith("reflex-tokenise")
    answer = toy.complete("x" * 3001)
    assert (answer.status, toy.error(answer)["code"]) == (400, "context_length_exceeded")
    assert "holds 512 tokens" in toy.error(answer)["message"]


def test_l9_many_short_texts_are_tokenised_beside_the_loop(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy.model is not None
    tokenizer = toy.generator.processor.tokenizer
    threads: dict[str, set[str]] = {"encode": set(), "chat": set()}
    for name, seen in threads.items():
        function = getattr(tokenizer, name)

        def noting(*given: Any, function: Any = function, seen: set[str] = seen, **more: Any) -> list[int]:
            seen.add(threading.current_thread().name)
            return list(function(*given, **more))

        monkeypatch.setattr(tokenizer, name, noting)
    assert len(toy.complete(["x" * 100] * 21, max_tokens=1).json["choices"]) == 21
    toy.chat(*[""] * 300, max_tokens=1)  # a template walks through them, short as they are
    called = {"role": "assistant", "tool_calls": [_call('{"x": "' + "y" * 3000 + '"}')]}
    asked = GREEDY | {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for long in ({"messages": [called]}, {"chat_template_kwargs": {"x": "y" * 3000}}):
        assert toy.post("/v1/chat/completions", asked | long).status == 200
    for seen in threads.values():
        assert [name.rpartition("_")[0] for name in seen] == ["reflex-tokenise"]


def test_l9_the_series_move(toy: Toy) -> None:
    before = toy.metrics()
    toy.complete("robots and cameras", max_tokens=7)
    after = toy.metrics()

    def moved(name: str, **labels: str) -> float:
        return after(name, **labels) - before.samples.get((name, frozenset(labels.items())), 0.0)

    assert moved("reflex_prompt_tokens_total") == 18
    assert moved("reflex_generation_tokens_total") == 7
    assert moved("reflex_iteration_tokens_total_count") == 7
    assert moved("reflex_time_to_first_token_seconds_count") == 1
    assert moved("reflex_inter_token_latency_seconds_count") == 6
    assert moved("reflex_e2e_request_latency_seconds_count") == 1
    assert moved("reflex_request_success_total", finished_reason="length") == 1
    assert moved("reflex_openai_requests_total", path="/v1/completions", status="200") == 1
    assert after("reflex_invariant_violations_total") == 0
    assert after("reflex_kv_cache_usage_perc") == 0
    toy.get("/v1/nothing")
    assert toy.metrics()("reflex_openai_requests_total", path="other", status="404") >= 1


def test_l9_errors_of_the_model_are_500_and_an_event_once_the_stream_has_begun(client: Any) -> None:
    runner = Model()
    with Toy(runner) as toy:
        steps = itertools.count()
        runner.fails = lambda step: RuntimeError("broken") if next(steps) >= 3 else None
        with toy.open(max_tokens=10, stream=True) as caller:
            caller.read()
        *tokens, error = caller.said
        assert len(tokens) == 3
        assert error["error"]["code"] == "processor_failed"
        assert b"[DONE]" not in caller.data
        answer = toy.complete()
        assert (answer.status, toy.error(answer)["type"]) == (500, "server_error")
        assert answer.headers["x-should-retry"] == "false"
        with openai.OpenAI(base_url=f"http://127.0.0.1:{toy.port}/v1", api_key="any", max_retries=5) as retrying:
            asked = len(runner.sizes)
            with pytest.raises(openai.InternalServerError):
                retrying.completions.create(prompt="ab", **GREEDY)
            assert len(runner.sizes) == asked + 1
        runner.fails = lambda step: None
        assert json.loads(toy.complete().body)["choices"]
        assert toy.pool.free_blocks == runner.num_blocks


def test_l9_a_slow_reader_gets_every_token_in_order_although_parts_are_written_past_asgi() -> None:
    """What is written on the spot and what a woken task writes never change places: the socket is full now and then."""
    with Toy(send_buffer=4096) as toy:
        whole = toy.complete("in order", max_tokens=1000).json["choices"][0]["text"]
        with toy.open("in order", max_tokens=1000, stream=True, receive_buffer=2048) as caller:
            caller.read()
            assert caller.text == whole
            assert caller.data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
