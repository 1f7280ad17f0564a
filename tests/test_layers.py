"""Who may import whom. The arrows are those of the design; any other one fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import budgets

PACKAGE = "reflex_runtime"
SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE

MIDDLE = {"core", "processors", "drivers", "telemetry"}
MODULES = {"version", "pacing", "checked", "options", "rendezvous", "placing"}  # every part may read them
BELOW: dict[str, set[str]] = {
    "core": set(),
    "version": set(),
    "pacing": set(),
    "rendezvous": set(),
    "placing": set(),
    "checked": set(),
    "options": set(),
    "processors": {"core"},
    "telemetry": {"core"},
    "drivers": {"core", "processors", "telemetry"},
    "web": {"core", "drivers"},
    "sim": MIDDLE,
    "feeds": MIDDLE | {"web"},
    "ipc": MIDDLE,
    "policies": MIDDLE | {"web"},
    "llm": MIDDLE | {"web", "ipc"},
    "cluster": MIDDLE | {"web", "policies"},
    "replicas": MIDDLE | {"web", "ipc", "policies"},
    "client": set(),
    "config": set(),
    "sources": {"config"},
}
# A tree of frozen values; besides these only those at the top read it.
READS_CONFIG = {"web", "policies", "llm", "feeds", "cluster", "replicas"}
# What is wrong in a file or a setting is a ConfigError.
ALONE = {(own, f"{PACKAGE}.core.errors") for own in ("config", "options", "sources", "checked")}
TOP = {"demo", "bench", "cli", "__main__", "__init__"}  # may import everything; nobody imports cli

CORE_FORBIDDEN = {"time", "threading", "asyncio", "random", "logging", "os", "socket"}
CORE_FORBIDDEN |= {"subprocess", "multiprocessing", "concurrent", "queue", "select", "selectors", "signal", "datetime"}
CORE_FORBIDDEN |= {"secrets", "uuid", "io", "pathlib", "tempfile", "sched", "contextvars", "numpy"}


def part_of(module: str) -> str | None:
    """core for reflex_runtime.core.cost; __init__ for the package itself; None for anything that is not ours."""
    names = module.split(".")
    if names[0] != PACKAGE:
        return None
    return names[1] if len(names) > 1 else "__init__"


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level + (1 if is_package else 0) or None]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            if base == PACKAGE:  # from reflex_runtime import core
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            else:
                yield node.lineno, base


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        names = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
        if names[-1] == "__init__" and len(names) > 2:
            names.pop()
        found.append((".".join(names), path))
    return found


def arrows(module: str, text: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, part) of every import of another part of ours."""
    own = part_of(module)
    for line, name in imports(ast.parse(text), module, is_package):
        part = part_of(name)
        if part is not None and part != own and (own, name) not in ALONE:
            yield line, part


@pytest.mark.parametrize(("module", "path"), modules(), ids=[m for m, _ in modules()])
def test_every_import_is_an_arrow_of_the_design(module: str, path: Path) -> None:
    own = part_of(module)
    assert own in BELOW or own in TOP, f"{own} has no place in the list of layers"
    for line, part in arrows(module, path.read_text(), path.stem == "__init__"):
        where = f"{path.name}:{line} imports {part}"
        assert part != "cli" or own == "__main__", f"{where}: nobody imports cli"
        if own not in TOP:
            allowed = BELOW[own] | MODULES | ({"config", "sources"} if own in READS_CONFIG else set())
            assert part in allowed, f"{where}: not an arrow of the design"


def test_what_a_policy_is_depends_on_nothing_that_reads_or_serves_one() -> None:
    own = f"{PACKAGE}.policies.policy"
    for module, path in modules():
        if module.startswith(own):
            for line, name in imports(ast.parse(path.read_text()), module, path.stem == "__init__"):
                above = name.startswith(f"{PACKAGE}.policies") and not name.startswith(own)
                assert not above, f"{path.name}:{line} imports {name}"


@pytest.mark.parametrize(
    ("module", "path"), [m for m in modules() if part_of(m[0]) == "core"], ids=lambda value: str(value).split(".")[-1]
)
def test_the_core_imports_value_like_standard_modules_only(module: str, path: Path) -> None:
    for line, name in imports(ast.parse(path.read_text()), module, path.stem == "__init__"):
        root = name.split(".")[0]
        where = f"{path.name}:{line} imports {name}"
        assert root == PACKAGE or root in sys.stdlib_module_names, f"{where}: a third-party package"
        assert root not in CORE_FORBIDDEN, f"{where}: the core is pure"


def test_the_core_has_no_other_way_to_the_outside() -> None:
    for module, path in modules():
        if part_of(module) == "core":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in {"open", "print", "input", "__import__", "eval", "exec", "hash", "id"}, (
                        f"{path.name}:{node.lineno} calls {node.func.id}"
                    )


def test_the_reader_of_imports_sees_every_form() -> None:
    text = """
import reflex_runtime.policies.serving.app
from reflex_runtime import llm
from reflex_runtime.core.time_cost import TimeCost
from ..sim import clock
def late():
    from reflex_runtime.cli import main
"""
    assert [part for _, part in arrows("reflex_runtime.drivers.batcher", text, False)] == [
        "policies",
        "llm",
        "core",
        "sim",
        "cli",
    ]
    assert list(arrows("reflex_runtime.core.cost", "from . import batch\nfrom .batch import Batch\n", False)) == []
    assert [p for _, p in arrows("reflex_runtime.core", "from .. import feeds\n", True)] == ["feeds"]


def test_a_language_models_server_loads_nothing_of_robot_policies() -> None:
    wanted = "llm.serving.server", "llm.serving.local_models", "llm.workers.workers", "web.serve"
    code = "import sys\n" + "".join(f"import {PACKAGE}.{name}\n" for name in wanted)
    code += f"print([name for name in sys.modules if name.startswith('{PACKAGE}.policies')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and those for type checkers count too."""
    files = dict(modules())
    graph = {name: {m for m in _needed(path, files) if m != name} for name, path in files.items()}
    while graph:  # what needs nothing that is left, or is needed by nothing that is left, cannot be in a circle
        needed = set().union(*graph.values())
        done = {name for name, needs in graph.items() if not needs & graph.keys() or name not in needed}
        assert done, f"a circle is among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in done}


def _needed(path: Path, files: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in files else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in files}
    return found & files.keys()


def test_x7_ray_is_imported_in_cluster_alone() -> None:
    for module, path in modules():
        found = {name.split(".")[0] for _, name in imports(ast.parse(path.read_text()), module, False)}
        assert "ray" not in found or part_of(module) == "cluster", module


def test_no_folder_is_larger_than_its_budget() -> None:
    assert budgets.faults(budgets.sizes(), budgets.ceilings()) == []


def test_a_budget_only_falls() -> None:
    ceilings = {"core": 100, "gone": 10, "grown": 100, "small": 100, "total lines": 300}
    sizes = {"core": 95, "grown": 101, "new": 20, "small": 89, "total lines": 305}
    assert [line.split(";")[0] for line in budgets.faults(sizes, ceilings)] == [
        "gone: 0, more than 10% below its ceiling of 10",
        "grown: 101, above its ceiling of 100",
        "new: 20, and no ceiling: python tests/budgets.py --write",
        "small: 89, more than 10% below its ceiling of 100",
        "total lines: 305, above its ceiling of 300",
    ]
    assert budgets.lowered(sizes, ceilings) == {"core": 95, "grown": 100, "new": 20, "small": 89, "total lines": 300}
