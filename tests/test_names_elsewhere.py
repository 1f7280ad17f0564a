"""Benchmarks, tools and examples run seldom: a name that the package has given up must not stay in them until then."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(file for folder in ("bench", "tools", "examples") for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_name_of_the_package_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reflex_runtime"):
            module = import_module(str(node.module))
            for alias in node.names:
                inside = hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}") is not None
                there = hasattr(module, alias.name) or inside
                assert there, f"line {node.lineno}: {node.module} has no {alias.name}"


def test_the_benchmarks_start() -> None:
    command = [sys.executable, "-m", "bench", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout
    assert "wires" in told
