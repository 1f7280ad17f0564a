"""A class name means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.sources import PACKAGE, modules

MIRRORS = f"{PACKAGE}.client.errors"  # the client's errors are those of the server, as its callers see them


def test_a_class_name_means_one_thing() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for name, module in modules().items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and name != MIRRORS:
                found[node.name].append(name)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
