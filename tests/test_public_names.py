"""The names at the top of the package: complete for users of `Batcher` and `@batched`, typed, and cheap to import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import reflex_runtime
from reflex_runtime import (
    BatchConfig,
    BatchCoordinator,
    BatchedCoroutine,
    BatchedFunction,
    Batcher,
    Event,
    FunctionProcessor,
    GroupConfig,
    ReflexError,
)
from reflex_runtime.core import errors

USED = (Batcher, BatchedFunction, BatchedCoroutine, BatchCoordinator, FunctionProcessor)
PUBLIC = ("__init__", "__call__", "__aenter__", "__enter__")


def classes_in(hint: Any) -> Iterator[type]:
    """Our own classes that a hint mentions, however deep."""
    if isinstance(hint, type) and hint.__module__.startswith("reflex_runtime."):
        yield hint
    for part in get_args(hint):
        if isinstance(part, list):
            for each in part:
                yield from classes_in(each)
        else:
            yield from classes_in(part)


def mentioned(owner: Any) -> set[str]:
    """Names of our classes in the parameters and results of what a user may call."""
    methods = [m for name, m in inspect.getmembers(owner, inspect.isfunction) if name in PUBLIC or name[0] != "_"]
    hints = [hint for method in methods for hint in get_type_hints(method).values()]
    if is_dataclass(owner):
        hints += [get_type_hints(owner)[field.name] for field in fields(owner)]
    return {found.__name__ for hint in hints for found in classes_in(hint)}


def test_what_a_user_passes_or_gets_is_importable_from_the_top() -> None:
    for owner in (*USED, GroupConfig, BatchConfig):
        names = {name for name in mentioned(owner) if not name.startswith("_")}
        assert names, owner
        assert names - set(reflex_runtime.__all__) == set(), owner


def test_every_event_and_every_error_of_a_request_is_importable_from_the_top() -> None:
    assert isinstance(Event, UnionType)
    events = {kind.__name__ for kind in get_args(Event)}
    raised = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ReflexError)}
    assert not (events | raised) - set(reflex_runtime.__all__)


def test_type_checkers_know_the_names_that_there_are() -> None:
    tree = ast.parse(Path(reflex_runtime.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    known = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert known == {(f"reflex_runtime.{module}", name) for name, module in reflex_runtime._MODULES.items()}


def test_the_names_for_own_functions_import_the_standard_library_only() -> None:
    """What takes long to import (arrays, servers, pictures) is imported by what needs it."""
    program = """
import sys
before = set(sys.modules)
from reflex_runtime import Batcher, BatchFinished, Done, Expired, Priority, Request, TimeCost, batched
found = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(name for name in found if not name.startswith("_")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['reflex_runtime']"
