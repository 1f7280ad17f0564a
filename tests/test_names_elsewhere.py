"""Benchmarks, tools and examples run seldom: a name that the package has given up must not stay in them until then."""

from __future__ import annotations

import ast
from functools import cache

from tests.sources import PACKAGE, ROOT, modules, tree

import reflex_runtime

FILES = sorted(file for folder in ("bench", "tools", "examples") for file in (ROOT / folder).rglob("*.py"))


@cache
def names_of(module: str) -> set[str]:
    """What a module binds, wherever in it: also below a condition."""
    if module == PACKAGE:
        return set(reflex_runtime.__all__)
    found: set[str] = set()
    for node in ast.walk(modules()[module].tree) if module in modules() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_every_name_of_the_package_that_they_import_is_there() -> None:
    wrong = []
    for file in FILES:
        for node in ast.walk(tree(file)):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                for name in (alias.name for alias in node.names):
                    if f"{node.module}.{name}" not in modules() and name not in names_of(str(node.module)):
                        wrong += [f"{where}: {node.module} has no {name}"]
            elif isinstance(node, ast.Import):
                ours = [alias.name for alias in node.names if alias.name.startswith(f"{PACKAGE}.")]
                wrong += [f"{where}: there is no {name}" for name in ours if name not in modules()]
    assert wrong == []
