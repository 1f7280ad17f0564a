"""Who may import whom, by the arrows of the design, and how large each folder may be."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from typing import Final

import pytest
from tests import budgets
from tests.sources import PACKAGE, ROOT, SOURCE, Module, module_of, modules, of, part_of

MIDDLE = {"core", "run", "observe"}
MODULES = {"version", "pacing", "extras", "settings"}  # every part may read them
BELOW: dict[str, set[str]] = {
    "core": set(),
    "version": set(),
    "pacing": set(),
    "extras": {"core"},
    "settings": {"core"},
    "observe": {"core"},
    "run": {"core", "observe"},
    "web": {"core", "observe", "run"},
    "sim": MIDDLE,
    "feeds": MIDDLE | {"web"},
    "ipc": MIDDLE,
    "robots": MIDDLE | {"web"},
    "llm": MIDDLE | {"web", "ipc"},
    "ray": {"core", "robots", "web"},
    "vllm": MIDDLE,
    "functions": MIDDLE | {"web"},
    "client": set(),
}
TOP = {"demo", "cli", "__main__", "__init__"}  # may import everything; nobody imports cli

# Inside a slice, a sub-folder imports itself and what is to the left of it. `.` is the modules of the folder itself
# that have no place of their own.
ORDER: Final = {
    "robots": "policy sources __init__ versions serving wires openapi app analysis",
    "llm": "runners engine server api app __init__",
    "feeds": "runtime sources detectors stages outputs . __init__",
}
CORE_FORBIDDEN = {"time", "threading", "asyncio", "random", "logging", "os", "socket"}
CORE_FORBIDDEN |= {"subprocess", "multiprocessing", "concurrent", "queue", "select", "selectors", "signal", "datetime"}
CORE_FORBIDDEN |= {"secrets", "uuid", "io", "pathlib", "tempfile", "sched", "contextvars", "numpy"}
WAYS_OUT = {"open", "print", "input", "__import__", "eval", "exec", "hash", "id"}


def arrows(module: Module) -> list[tuple[int, str]]:
    """(line, part) of every import of another part of ours."""
    found = []
    for line, name in module.imports:
        part = part_of(name)
        if part is not None and part != module.part:
            found.append((line, part))
    return found


def test_every_import_is_an_arrow_of_the_design() -> None:
    parts = {module.part for module in modules().values()}
    wrong = [f"{part} has no place in the list of layers" for part in parts - BELOW.keys() - TOP]
    for module in modules().values():
        own = module.part
        allowed = BELOW.get(own, set()) | MODULES
        for line, part in arrows(module):
            if part == "cli" and own != "__main__":
                wrong.append(f"{module.name}:{line}: nobody imports cli")
            elif own not in TOP and part not in allowed:
                wrong.append(f"{module.name}:{line} imports {part}: not an arrow of the design")
    assert wrong == []


def place(slice_: str, name: str) -> int:
    """How far to the right a module of a slice stands."""
    order = ORDER[slice_].split()
    names = name.split(".")[2:] or ["__init__"]
    for length in range(len(names), 0, -1):
        if "/".join(names[:length]) in order:
            return order.index("/".join(names[:length]))
    return order.index(".")


def test_a_sub_folder_imports_what_is_to_the_left_of_it() -> None:
    wrong = []
    for slice_ in ORDER:
        for module in of(slice_):
            own = place(slice_, module.name)
            for line, name in module.imports:
                target = module_of(name)
                if target is not None and part_of(target) == slice_ and place(slice_, target) > own:
                    wrong.append(f"{module.name}:{line} imports {target}, which is to the right of it")
    assert wrong == []


def test_every_sub_folder_has_a_place_in_the_order_of_its_slice() -> None:
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    there = {str(path.parent) for path in files} | {str(path.with_suffix("")) for path in files}
    own = (".", "__init__")
    placed = {f"{slice_}/{name}" for slice_, order in ORDER.items() for name in order.split() if name not in own}
    assert {str(path.parent) for path in files if len(path.parts) > 2} - placed == set()
    assert placed - there == set()


def test_the_core_imports_value_like_standard_modules_only() -> None:
    wrong = []
    for module in of("core"):
        for line, name in module.imports:
            root = name.split(".")[0]
            if root in CORE_FORBIDDEN or root not in {PACKAGE, *sys.stdlib_module_names}:
                wrong.append(f"{module.name}:{line} imports {name}: the core is pure")
    assert wrong == []


def test_the_core_has_no_other_way_to_the_outside() -> None:
    wrong = []
    for module in of("core"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WAYS_OUT:
                wrong += [f"{module.name}:{node.lineno} calls {node.func.id}"]
    assert wrong == []


def test_the_reader_of_imports_sees_every_form() -> None:
    text = """
import reflex_runtime.robots.app
from reflex_runtime import llm
from reflex_runtime.core.cost import TimeCost
from ..sim import clock
def late():
    from reflex_runtime.cli import main
"""
    found = arrows(Module("reflex_runtime.run.batcher", text=text))
    assert [part for _, part in found] == ["robots", "llm", "core", "sim", "cli"]
    assert arrows(Module("reflex_runtime.core.cost", text="from . import batch\nfrom .batch import Batch\n")) == []
    text = "from .. import feeds\n"
    assert [part for _, part in arrows(Module("reflex_runtime.core", text=text, is_package=True))] == ["feeds"]


def test_a_language_models_server_loads_nothing_of_robot_policies() -> None:
    wanted = "llm.app", "llm.server.workers", "web.serve"
    code = "import sys\n" + "".join(f"import {PACKAGE}.{name}\n" for name in wanted)
    code += f"print([name for name in sys.modules if name.startswith('{PACKAGE}.robots')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and those for type checkers count too."""
    graph = {name: {module_of(used) for _, used in m.imports} - {name, None} for name, m in modules().items()}
    while graph:  # what needs nothing that is left, or is needed by nothing that is left, cannot be in a circle
        needed = set().union(*graph.values())
        done = {name for name, needs in graph.items() if not needs & graph.keys() or name not in needed}
        assert done, f"a circle is among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in done}


def test_x7_ray_is_imported_in_one_module_alone() -> None:
    found = {module.part for module in modules().values() for _, name in module.imports if name.split(".")[0] == "ray"}
    assert found == {"ray"}


def test_vllm_is_imported_in_one_part_alone() -> None:
    found = {module.part for module in modules().values() for _, name in module.imports if name.split(".")[0] == "vllm"}
    assert found == {"vllm"}


def test_matplotlib_is_imported_in_one_module() -> None:
    """It is an extra: the module says so where it is missing."""
    users = {m.name for m in modules().values() for _, name in m.imports if name.split(".")[0] == "matplotlib"}
    assert users == {f"{PACKAGE}.observe.picture"}


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


def test_no_tracked_file_is_a_symbolic_link() -> None:
    """One that leads out of the repository is broken on every other machine, and in an archive of it."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    found = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False)
    links = [line for line in found.stdout.splitlines() if line.startswith("120000")]
    assert links == []
