"""Every id of the contract that this release keeps has a test named after it, and every option one for its effect."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

from reflex_runtime.settings.declare import flag

from .effects import EFFECTS, OF_VERBS, options_of
from .switch_off import rows, switches

ROOT = Path(__file__).parents[2]
FILES = sorted(file for folder in ("tests", "clients") for file in (ROOT / folder).rglob("test_*.py"))
PROMISES = (ROOT / "tests" / "contract" / "PROMISES.md").read_text(encoding="utf-8")
IDS = [
    *(f"B{i}" for i in range(1, 25)),
    *(f"H{i}" for i in range(1, 15)),
    *(f"E{i}" for i in range(1, 5)),
    *(f"V{i}" for i in range(1, 14)),
    *(f"T{i}" for i in range(1, 8)),
    *(f"F{i}" for i in range(1, 15)),
    *(f"G{i}" for i in range(1, 16)),
    *(f"L{i}" for i in range(1, 11)),
    "X5",
    *re.findall(r"^\| ([WP]\d+) \|", PROMISES, re.MULTILINE),
]


def test_every_rule_has_a_test() -> None:
    names = re.findall(r"^\s*(?:async )?def (test_\w+)", "\n".join(map(source_of, FILES)), re.MULTILINE)
    assert [rule for rule in IDS if not any(name.startswith(f"test_{rule.lower()}_") for name in names)] == []


def test_h10_every_option_has_a_test_of_its_effect_that_sets_it() -> None:
    """By flag or by name, in the test or in what it uses of its file. That it fails without: `switch_off.py`."""
    wrong = []
    for kind, effects in EFFECTS.items():
        assert set(effects) == {field.name for field in fields(kind)}, kind
        for name, test in effects.items():
            if not re.search(rf"--(no-)?{flag(name)[2:]}\b|\b{name}=", text_of_one(test)):
                wrong += [f"{test} does not set {flag(name)}, or is not there once"]
    assert wrong == []


def test_every_option_was_switched_off_once_and_its_test_failed() -> None:
    table = rows()
    every = [(option, test) for option, test, *_ in switches(Path("reads"))]
    assert [option for option, test in every if f"| `{test}` |" not in table.get(option, "")] == []
    assert [option for option in table if option not in dict(every)] == []
    assert [option for option, row in table.items() if "SURVIVED" in row or "UNCLEAR" in row] == []


def test_every_option_of_a_verb_alone_has_a_test_of_its_effect_that_sets_it() -> None:
    wrong = []
    for verb, effects in OF_VERBS.items():
        assert set(effects) == set(options_of(verb)), verb
        for name, test in effects.items():
            if f"'{name}'" not in text_of_one(test):
                wrong += [f"{test} does not set {name}, or is not there once"]
    assert wrong == []


def text_of_one(test: str) -> str:
    """A test with what it uses of the one file that has it, "" if there is no such file."""
    found = [text for file in FILES if (text := text_of(file, test))]
    return found[0] if len(found) == 1 else ""


def text_of(file: Path, test: str) -> str:
    """A test with what it uses of its file, "" if it is not there."""
    if f"def {test}(" not in source_of(file):
        return ""
    texts = dict(texts_of(file))
    found, names = "", [test]
    while names:
        found += (text := texts.pop(names.pop(), ""))
        names += set(re.findall(r"\w+", text)) & texts.keys()
    return found


@cache
def source_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def texts_of(file: Path) -> dict[str, str]:
    """What stands at the top level of a file, by its name."""
    texts: dict[str, str] = {}
    for node in ast.parse(source_of(file)).body:
        text = "\n".join(ast.unparse(part) for part in (*getattr(node, "decorator_list", ()), node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            texts[node.name] = text
        elif isinstance(node, ast.Assign):
            texts |= {target.id: text for target in node.targets if isinstance(target, ast.Name)}
    return texts
