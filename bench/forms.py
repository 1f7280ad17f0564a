"""Output of a given form: whether answers to many schemas are valid, and what a form costs while 32 are running.

The schemas are drawn by chance from the words that people use: nested objects, enums, ranges, patterns, alternatives,
references, tuples. Answers are sampled hot, so that a form holds because nothing else is allowed. Every schema bounds
its answer; one that is still cut off by the token limit counts as not valid.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from bench.llm import BUDGET, VOCAB, Words, fastest, write_model
from bench.report import Row, row, say
from reflex_runtime.demo import SCRIBE
from reflex_runtime.ipc.messages import Constraint
from reflex_runtime.llm import LLMEngine, SamplingParams

SCHEMAS = 500
RUNNING = 32
TOKENS = 64
ROUNDS = 9
_FORMATS = ("date", "uuid", "ipv4")
_CHECKED = ("uuid", "ipv4")  # a date holds as a pattern: 29 February in any year, and the year 0000
_PATTERNS = (r"^[A-Z]{2}-[0-9]{3}$", r"^(red|green|blue)$", r"^[a-z]{1,8}@[a-z]{1,8}\.org$")
_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"$ref": "#/$defs/state"}},
    "required": ["x"],
    "additionalProperties": False,
}
# An answer to it is never complete within TOKENS tokens.
_LONG = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


def forms(root: Path, scale: float) -> list[Row]:
    """Every row about forms."""
    return [_valid(round(SCHEMAS * scale)), *_throughput(write_model(root / "llama-bf16", "bfloat16"), scale)]


# -- answers that are valid --------------------------------------------------------------------------------------------


def schema_by_chance(rng: random.Random) -> dict[str, Any]:
    """A schema whose answers are bounded, with what it refers to."""
    found = _schema(rng, 0)
    found["$defs"] = {"point": _POINT, "state": {"enum": ["on", "off", None]}}
    return found


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves: list[Callable[[random.Random], dict[str, Any]]] = [_integer, _number, _string, _constant, _reference]
    if depth >= 3:
        return rng.choice(leaves)(rng)
    kind = rng.choice(["leaf", "leaf", "object", "object", "array", "tuple", "any", "map"])
    if kind == "leaf":
        return rng.choice(leaves)(rng)
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array", "items": _schema(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 2)
        }  # fmt: skip
    if kind == "tuple":
        items = [_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "any":
        return {"anyOf": [_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    keys = {"^[a-z]{1,3}$": _schema(rng, depth + 2)}
    most = rng.randint(0, 2)
    return {"type": "object", "patternProperties": keys, "additionalProperties": False, "maxProperties": most}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "a b", "\u00fc\u00e9", "steps", "x-y", "kind"], rng.randint(1, 5))
    required = rng.sample(names, rng.randint(0, len(names)))
    properties = {name: _schema(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + rng.randint(1, 500)}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"enum": [0.5, -1, 3e5]} if rng.random() < 0.5 else {"type": ["integer", "null"], "minimum": 0, "maximum": 9}


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)}
    return {"type": "string", "pattern": rng.choice(_PATTERNS)} if kind == 1 else {
        "type": "string", "format": rng.choice(_FORMATS)
    }  # fmt: skip


def _constant(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"const": rng.choice([None, True, "two words", 7, {"a": [1]}])}
    return {"enum": rng.sample(["a", 1, None, "\u00e9\"", 2.5, True], rng.randint(1, 4))}


def _reference(rng: random.Random) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(['point', 'state'])}"}


def invalid_answers(engine: LLMEngine, schemas: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The schemas to which the model's answer is not valid, each with what it said."""
    params = [
        SamplingParams(max_tokens=1500, temperature=1.5, seed=i, constraint=Constraint("json", json.dumps(schema)))
        for i, schema in enumerate(schemas)
    ]
    checks = jsonschema.FormatChecker(_CHECKED)
    wrong = []
    for schema, output in zip(schemas, engine.generate(["Answer: "] * len(schemas), params), strict=True):
        try:
            value = json.loads(output.text)
            jsonschema.Draft202012Validator(schema, format_checker=checks).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append((schema, f"{output.finish_reason}: {output.error or str(error)[:200]}: {output.text[:200]}"))
    return wrong


def _valid(count: int, seed: int = 11) -> Row:
    rng = random.Random(seed)
    engine = LLMEngine(SCRIBE, max_num_seqs=64)
    wrong = invalid_answers(engine, [schema_by_chance(rng) for _ in range(count)])
    engine.close()
    for schema, said in wrong[:10]:
        say(f"  not valid: {json.dumps(schema)}\n    {said}")
    return row("forms", f"valid answers to {count} schemas", [100.0 * (count - len(wrong)) / count], "%", least=100.0)


# -- what a form costs -------------------------------------------------------------------------------------------------


class Spelled(Words):
    """Every id has a spelling: the bytes, then pieces of words and of JSON, as a trained vocabulary has them."""

    def vocabulary(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Spellings()))


class _Spellings:
    eos_token_id, bos_token_id, special_token_ids = VOCAB - 1, None, (VOCAB - 1,)

    def __init__(self) -> None:
        rng, found = random.Random(1), [bytes((i,)) for i in range(256)]
        letters, marks = "etaoinshrdlucmfwyp", ['": "', '", "', '"}', '{"', "}, ", "[", "]", '":', " ", "\n  "]
        for _ in range(VOCAB - 257):
            word = "".join(rng.choice(letters) for _ in range(rng.randint(2, 7)))
            piece = rng.choice(["", " "]) + word if rng.random() < 0.9 else rng.choice(marks) + rng.choice(["", word])
            found.append(piece.encode())
        self.tokens = (*found, b"<eos>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _throughput(directory: Path, scale: float) -> list[Row]:
    """Tokens a second with and without a form, in turns."""
    from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner

    runner = OpenVinoRunner(directory, dtype=fastest(), threads=2, num_blocks=1200)
    config = {"max_num_batched_tokens": BUDGET, "max_num_seqs": RUNNING, "enable_prefix_caching": False}
    engine = LLMEngine(runner, Spelled(), **config)
    plain = SamplingParams.greedy(TOKENS, ignore_eos=True)
    formed = SamplingParams.greedy(TOKENS, constraint=Constraint("json", json.dumps(_LONG)))
    rng = random.Random(5)
    prompts = [[rng.randrange(300, VOCAB - 1) for _ in range(32)] for _ in range(RUNNING)]
    rates: dict[str, list[float]] = {"plain": [], "formed": []}
    for turn in range(-1, max(3, round(ROUNDS * scale))):
        for name, params in (("plain", plain), ("formed", formed))[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            outputs = engine.generate(prompts, params)
            taken = time.perf_counter() - began
            assert all(len(output.token_ids) == TOKENS for output in outputs), [o.finish_reason for o in outputs]
            if turn >= 0:  # the first compiles the form
                rates[name].append(RUNNING * TOKENS / taken)
    engine.close()
    ratios = [formed / plain for formed, plain in zip(rates["formed"], rates["plain"], strict=True)]
    what = f"{RUNNING} running, 42 M parameters, vocabulary {VOCAB}"
    return [
        row("forms", f"{what}, without a form", rates["plain"], "tokens/s"),
        row("forms", f"{what}, by a JSON schema", rates["formed"], "tokens/s"),
        row("forms", "by a JSON schema / without a form", ratios, "x", least=0.9),
    ]

