"""Output of a given form: on a real tokenizer and model, whatever the batch, and what cannot be."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.demo import model_directory
from reflex_runtime.ipc.messages import Constraint, ScoredToken
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine import form_check, logits_processors
from reflex_runtime.llm.engine.logits_processors import Constraints, Matcher, Shaping, check_constraint
from reflex_runtime.llm.engine.output_parsers import FORMS, Tool, forced
from reflex_runtime.llm.engine.sampler import sample
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.tokenizer import HFTokenizer
from reflex_runtime.llm.engine.toy import ByteTokenizer
from thinned import thinned

YES = Constraint("choice", json.dumps(["yes", "no"]))


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.load(model_directory("scribe"))


def allowed(matcher: Matcher) -> npt.NDArray[np.bool_]:
    """Whether each token may come next."""
    return matcher.penalty() == 0.0


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema by chance, and every answer to it is short."""
    kind = rng.choice(["integer", "boolean", "enum", "string"] + ["object", "array"] * (depth < 2))
    if kind == "integer":
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "enum":
        return {"enum": rng.sample(["a", 1, None, "two words", '\u00e9"', 2.5, True], rng.randint(1, 4))}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == "array":
        return {"type": "array", "items": schema_of(rng, depth + 1), "maxItems": rng.randint(0, 3)}
    if kind == "object":
        names = rng.sample(["x", "y", "a b", "\u00fc", "steps"], rng.randint(1, 4))
        required = rng.sample(names, rng.randint(0, len(names)))
        found = {"type": "object", "properties": {name: schema_of(rng, depth + 1) for name in names}}
        return found | {"required": required, "additionalProperties": False}
    return {"type": kind}


def test_l8_answers_to_schemas_by_chance_are_valid() -> None:
    """Sampled hot: the form holds because nothing else is allowed, not because the model knows it."""
    import jsonschema

    rng = random.Random(5)
    schemas = [schema_of(rng) for _ in range(40)]
    engine = LLMEngine(max_num_batched_tokens=24, num_blocks=60)
    params = [
        SamplingParams(max_tokens=500, temperature=2.0, seed=i, constraint=Constraint("json", json.dumps(schema)))
        for i, schema in enumerate(schemas)
    ]
    outputs = engine.generate(["Answer: "] * len(schemas), params)
    for schema, output in zip(schemas, outputs, strict=True):
        assert (output.error, output.finish_reason) == (None, "stop")
        jsonschema.validate(json.loads(output.text), schema)
    engine.close()


def test_l5_a_form_does_not_depend_on_the_batch_or_on_preemption() -> None:
    form = Constraint("json", json.dumps({"type": "array", "items": {"enum": ["left", "right"]}, "maxItems": 9}))
    params = SamplingParams(max_tokens=80, temperature=1.5, seed=3, constraint=form)
    prompts = ["Go", "Robots that wait", "x"]
    alone = [LLMEngine().generate([prompt], params)[0].text for prompt in prompts]
    tight = LLMEngine(num_blocks=14, block_size=8, max_num_batched_tokens=5)
    assert [output.text for output in tight.generate(prompts, params)] == alone


def test_l8_a_real_tokenizer_keeps_to_the_form_and_ends(tokenizer: HFTokenizer) -> None:
    rng = np.random.default_rng(0)
    matcher = Constraints(tokenizer.vocabulary).compile(Constraint("regex", "[a-z]{3,5} \u00e9t\u00e9\\."))
    tokens: list[int] = []
    while not matcher.complete:
        tokens.append(int(rng.choice(np.flatnonzero(allowed(matcher)))))
        matcher.sampled(tokens[-1])
    text = tokenizer.decode(tokens)
    assert text.endswith(" \u00e9t\u00e9.")
    assert text.split(" ")[0].isalpha()


def test_l8_the_end_token_may_come_where_the_form_may_end(tokenizer: HFTokenizer) -> None:
    matcher = Constraints(tokenizer.vocabulary).compile(Constraint("regex", "a+"))
    (end, *_) = tokenizer.eos_token_ids
    assert not allowed(matcher)[end]
    matcher.sampled(tokenizer.encode("a")[-1])
    assert allowed(matcher)[end]


def test_l8_a_copy_goes_its_own_way(tokenizer: HFTokenizer) -> None:
    first = Constraints(tokenizer.vocabulary).compile(YES)
    second = first.copy()
    before = allowed(second).copy()
    first.sampled(int(np.flatnonzero(allowed(first))[0]))
    assert (allowed(second) == before).all()
    with pytest.raises(ProcessorError, match="form of the output"):
        second.sampled(int(np.flatnonzero(~before)[0]))
    with pytest.raises(ProcessorError, match="form of the output"):
        allowed(second)


def test_l8_a_model_that_only_writes_spaces_comes_to_an_end() -> None:
    matcher = Constraints(ByteTokenizer().vocabulary).compile(Constraint("json", '{"type": "object"}'))
    matcher.sampled(ord("{"))
    spaces = 0
    while allowed(matcher)[ord(" ")]:
        matcher.sampled(ord(" "))
        spaces += 1
        assert spaces <= 1
    assert spaces == 1
    assert not allowed(matcher)[[ord("\n"), ord("\t")]].any()  # lines and indents are slow tokens


def test_l8_rows_of_the_model_that_are_no_tokens_never_come() -> None:
    shaping = Shaping(SamplingParams(), [1], [0], Constraints(ByteTokenizer().vocabulary).compile(YES))
    row = np.zeros(300, np.float32)
    shaping.shape(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [ord("n"), ord("y")]


def test_l8_nothing_left_fails_that_sequence_alone() -> None:
    form = Constraint("regex", "a")
    params = SamplingParams(constraint=form)
    matcher = Constraints(ByteTokenizer().vocabulary).compile(form)
    failing = Sequence([1], params, ByteTokenizer(), ByteTokenizer.eos_token_ids, matcher)
    logits = np.random.default_rng(0).normal(0.0, 1.0, (3, 256)).astype(np.float32)
    logits[1, ord("a")] = -np.inf
    plain = Sequence([1], SamplingParams.greedy(), ByteTokenizer())
    first, second, third = sample(logits, [plain, failing, plain])
    assert isinstance(second, ProcessorError)
    assert "no token is left" in second.message
    others = [found.token_id for found in (first, third) if isinstance(found, ScoredToken)]
    assert others == logits[[0, 2]].argmax(axis=1).tolist()


def test_l8_a_form_that_has_its_end_ends_whatever_min_tokens_says(tokenizer: HFTokenizer) -> None:
    """A grammar may name the token that ends it: then no other is left."""
    matcher = Constraints(tokenizer.vocabulary).compile(Constraint("grammar", 'start: "a" <|end|>'))
    (end,) = tokenizer.eos_token_ids
    matcher.sampled(tokenizer.encode("a")[-1])
    shaping = Shaping(SamplingParams(min_tokens=9), [1], [end], matcher)
    row = np.zeros(tokenizer.vocab_size, np.float32)
    shaping.shape(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [end]
    params = SamplingParams(max_tokens=30, min_tokens=20, constraint=Constraint("regex", "[ab]{2,4}"))
    (output,) = LLMEngine().generate(["x"], params)
    assert (output.error, output.finish_reason) == (None, "stop")
    assert len(output.text) == 4


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (Constraint("json", '{"type": "nothing"}'), "json: .*nothing"),
        (Constraint("json", "{"), "json: "),
        (Constraint("json", '{"$ref": "http://example.org/x"}'), "json: "),
        (Constraint("regex", "("), "regex: invalid regex: unclosed group$"),
        (Constraint("grammar", "nothing"), "grammar: "),
        (Constraint("grammar", "start: x"), 'unknown name: "x"$'),
        (Constraint("json", '{"$ref": "#"}'), "json: no text can have it; perhaps a .ref refers to itself"),
        (Constraint("json", "true"), "json: must be an object; for true write {}"),
        (Constraint("regex", r"(?=a)b"), r"regex: look-around .* are not supported; say what may stand there"),
    ],
    ids=lambda value: value.text[:12] if isinstance(value, Constraint) else "",
)
def test_l8_a_form_that_is_none_is_told(form: Constraint, told: str, tokenizer: HFTokenizer) -> None:
    for check in (Constraints(tokenizer.vocabulary).compile, check_constraint):
        with pytest.raises(ConfigError, match=told):
            check(form)
    with pytest.raises(ConfigError, match="1 to 200000"):
        Constraint("regex", "x" * 200_001)


def _price(**schema: Any) -> Constraint:
    return Constraint("json", json.dumps({"properties": {"price": {"anyOf": [{"type": "number"}, schema]}}}))


@pytest.mark.parametrize(
    ("form", "place", "instead"),
    [
        (
            _price(type="string", pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"),
            "pattern",
            "for a number",
        ),  # pydantic's Decimal
        (_price(type="string", pattern=r"\bfoo"), "pattern", "say what may stand there"),
        (_price(**{"not": {"type": "string"}}), "not", "say what is allowed"),
        (_price(**{"if": {}, "then": {"maxLength": 3}}), "if", "write anyOf"),
        (_price(type="array", contains={}, minContains=0, maxContains=2), "contains", "leave it out"),
        (_price(type="array", contains={}), "contains", "leave it out"),
        (_price(oneOf=[{"type": "string"}, {"type": "string", "maxLength": 3}]), "oneOf", "write anyOf"),
        (_price(type="array", uniqueItems=True), "uniqueItems", "leave it out"),
        (_price(patternProperties={"^a": {}, "(?!x)a": {}}), "patternProperties.(?!x)a", "say what may stand there"),
    ],
)
def test_l8_what_a_schema_cannot_say_is_told_with_its_place_and_what_to_write(
    form: Constraint, place: str, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_constraint(form)
    assert caught.value.message.startswith(f"json: properties.price.anyOf[1].{place}: ")
    assert instead in caught.value.message


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "objekt"}, "type: Invalid type: objekt"),
        ({"type": ["string", "objekt"]}, "type: Invalid type: objekt"),
        ({"multipleOf": 0, "type": "number"}, "multipleOf: invalid multiple of"),
        ({"minLength": -1}, "minLength: Expected positive integer"),
        ({"enum": 3}, "enum: enum must be an array"),
        ({"type": "array", "items": {"required": 3}}, "items.required: Expected array"),
        ({"$ref": "#/none"}, "$ref: Pointer '/none' does not exist"),
        ({"properties": {"enum": 5}}, "properties.enum: schema must be"),
        ({"pattern": "(a"}, "pattern: invalid regex: unclosed group"),
        ({"patternProperties": {"(a": {}}}, "patternProperties.(a: invalid regex: unclosed group"),
    ],
)
def test_l8_a_wrong_keyword_is_told_with_its_place_in_one_line(schema: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_constraint(_price(**schema))
    assert caught.value.message.startswith(f"json: properties.price.anyOf[1].{told}")
    assert "\n" not in caught.value.message


VAIN: list[dict[str, Any]] = [
    {"uniqueItems": False}, {"minItems": 0}, {"items": True}, {"items": {}}, {"prefixItems": []},
    {"additionalItems": True}, {"unevaluatedItems": True}, {"unevaluatedItems": {}}, {"contains": {}, "minContains": 0},
    {"minContains": 3}, {"maxContains": 1}, {"required": []}, {"minProperties": 0}, {"properties": {}},
    {"patternProperties": {}}, {"additionalProperties": True}, {"additionalProperties": {}},
    {"unevaluatedProperties": True}, {"propertyNames": True}, {"propertyNames": {}}, {"dependentRequired": {}},
    {"dependentSchemas": {}}, {"dependencies": {}}, {"minLength": 0}, {"pattern": ""}, {"format": "nothing"},
    {"not": False}, {"if": {"minLength": 1}}, {"then": False}, {"else": False}, {"if": {}, "then": True, "else": {}},
    {"allOf": []}, {"allOf": [{}, True]}, {"anyOf": [{}]}, {"oneOf": [True]}, {"$defs": {}}, {"$comment": "x"},
    {"readOnly": True, "writeOnly": False, "deprecated": False, "nullable": False},
    {"contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": {}},
]  # fmt: skip


@pytest.mark.parametrize("vain", thinned(VAIN, VAIN[::5]), ids=lambda vain: " ".join(map(str, vain)))
def test_l8_a_keyword_that_demands_nothing_is_taken_and_changes_nothing(vain: dict[str, Any]) -> None:
    values = (["a", "a"], {"zz": 1}, "abc", "")
    field: dict[str, Any] = {"type": ["string", "array", "object"]} | vain
    for schema in (field, {"properties": {"x": {"anyOf": [{"type": "null"}, field]}}}):
        compiled = Constraints(ByteTokenizer().vocabulary).compile(Constraint("json", json.dumps(schema)))
        for value in values if schema is field else ({"x": value} for value in values):
            matcher = compiled.copy()
            for byte in json.dumps(value).encode():
                matcher.sampled(byte)
            assert matcher.complete or allowed(matcher)[0]  # its end
    tool = Tool("f", {"type": "object", "properties": {"x": field}})
    check_constraint(forced(FORMS["hermes"], [tool], False))


def test_l8_a_value_that_looks_like_a_keyword_stays() -> None:
    for schema in ({"const": {"uniqueItems": False}}, {"enum": [{"uniqueItems": False}]}):
        matcher = Constraints(ByteTokenizer().vocabulary).compile(Constraint("json", json.dumps(schema)))
        for byte in b'{"uniqueItems": false}':
            matcher.sampled(byte)


@pytest.mark.parametrize("size", [0, 3000], ids=["looked at here", "in a process of its own"])
def test_l8_annotations_are_no_rules_and_known_formats_are(tokenizer: HFTokenizer, size: int) -> None:
    """As JSON Schema says: a `format` that is not known does not make a schema unusable."""
    formats = {"password", "binary", "byte", "path", "uri-reference", "regex", "iri", "google-datetime", "color"}
    notes = {"$comment": "x" * size, "examples": ["a"], "title": "t", "default": 1, "deprecated": True, "x-more": {}}
    fields = {name: {"type": "string", "format": name, "maxLength": 3} | notes for name in sorted(formats)}
    for schema in ({"type": "object", "properties": fields}, {"format": "color", "enum": ["a"]} | notes):
        check_constraint(Constraint("json", json.dumps(schema)))
    compile = Constraints(tokenizer.vocabulary).compile
    schema = {"type": "string", "format": "date", "description": "x" * size, "examples": [{"format": "none"}]}
    matcher = compile(Constraint("json", json.dumps(schema)))
    for text in ('"', "2024-02-"):
        for token in tokenizer.encode(text):
            matcher.sampled(token)
    assert not allowed(matcher)[tokenizer.encode("x")[-1]]
    tool = Tool("f", {"type": "object", "properties": fields, "required": ["color"]})
    check_constraint(forced(FORMS["hermes"], [tool], False))


def _chain(length: int) -> dict[str, Any]:
    """A schema whose definitions refer to one another, one after the other."""
    names = [f"d{i}" for i in range(length)]
    chain = {name: {"type": "array", "items": {"$ref": f"#/$defs/{after}"}} for name, after in pairwise(names)}
    return {"$defs": chain | {names[-1]: {"type": "null"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "form",
    [
        Constraint("grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(5000)) + '\na5000: "x"'),
        Constraint("json", json.dumps(_chain(3000))),
        Constraint("json", '{"type": "integer", "multipleOf": 99999999}'),
        pytest.param(Constraint("regex", "go ((((a{1000}){1000}){1000}){1000})"), marks=pytest.mark.long),
    ],
    ids=["deep rules", "deep references", "a huge expression", "a long step"],
)
def test_l8_a_form_that_would_end_or_stop_the_server_is_refused(form: Constraint) -> None:
    """Without a look at it elsewhere the first two end this process, and the third computes for minutes."""
    with pytest.raises(ConfigError, match=f"{form.kind}: is too complex"):
        Constraints(ByteTokenizer().vocabulary).compile(form)


def test_l8_forms_of_everyday_are_not_too_complex() -> None:
    compile = Constraints(ByteTokenizer().vocabulary).compile
    compile(Constraint("json", json.dumps(_chain(60))))
    compile(Constraint("json", json.dumps({"type": "string", "pattern": "^[a-z]{1,20}(-[0-9]+)*$"})))


def test_l8_words_that_can_be_costly_are_found_however_they_are_written() -> None:
    for text in ('{"multipleOf": 9}', r'{"mul\u0074ipleOf": 9}', '{"$ref": "#"}', " " * 2001 + "{}"):
        assert not logits_processors._plain(Constraint("json", text))
    assert logits_processors._plain(Constraint("json", r'{"type": "object", "required": ["\u00fcber"]}'))


def test_l8_a_look_at_a_form_that_cannot_be_taken_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_check, "__file__", "/nowhere/form_check.py")
    with pytest.raises(ProcessorError, match=r"cannot be checked: .*nowhere"):
        check_constraint(Constraint("regex", "never seen before"))
