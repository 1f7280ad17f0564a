"""A class name means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "reflex_runtime"

# The client's errors are those of the server, as its callers see them.
MIRRORS = "client/errors.py"


def classes() -> dict[str, list[str]]:
    """Files by the class that they define."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and name != MIRRORS:
                found[node.name].append(name)
    return found


def test_a_class_name_means_one_thing() -> None:
    twice = {name: files for name, files in classes().items() if len(files) > 1}
    assert twice == {}
