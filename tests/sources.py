"""The package's own source for tests about it: each file is read and parsed once in a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "reflex_runtime"
SOURCE = ROOT / "src" / PACKAGE


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


class Module:
    """A module of the package, or a text that stands for one."""

    def __init__(self, name: str, file: Path | None = None, text: str = "", is_package: bool = False) -> None:
        self.name, self._file, self._text = name, file, text
        self._is_package = is_package if file is None else file.stem == "__init__"

    @property
    def part(self) -> str:
        """core for reflex_runtime.core.cost; __init__ for the package itself."""
        return part_of(self.name) or ""

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self._text) if self._file is None else tree(self._file)

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, absolute name) of everything that it imports, wherever in it the import stands. A name that is taken
        from one of our modules is joined to it: it may be a module."""
        return list(self._imports())

    def _imports(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = self.name.split(".")[: -node.level + (1 if self._is_package else 0) or None]
                    base = ".".join([*parents, base]) if base else ".".join(parents)
                for alias in node.names if base.split(".")[0] == PACKAGE else ():
                    yield node.lineno, f"{base}.{alias.name}"
                if base.split(".")[0] != PACKAGE:
                    yield node.lineno, base


def part_of(name: str) -> str | None:
    """core for reflex_runtime.core.cost; None for anything that is not ours."""
    names = name.split(".")
    if names[0] != PACKAGE:
        return None
    return names[1] if len(names) > 1 else "__init__"


@cache
def modules() -> dict[str, Module]:
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        names = [PACKAGE, *file.relative_to(SOURCE).with_suffix("").parts]
        if names[-1] == "__init__" and len(names) > 2:
            names.pop()
        found[".".join(names)] = Module(".".join(names), file)
    return found


def of(part: str) -> list[Module]:
    return [module for module in modules().values() if module.part == part]


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is, or is in."""
    while name:
        if name in modules():
            return name
        name = name.rpartition(".")[0]
    return None
