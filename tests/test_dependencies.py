"""pyproject.toml names what the package imports, bounds what it knows too well; and the container's have hashes."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions
from itertools import chain

import pytest
from packaging.requirements import Requirement
from tests.sources import PACKAGE, ROOT, modules

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import EXTRAS
from reflex_runtime.robots.sources.lerobot_checkpoint import check_lerobot

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_US = {"bench", "dev"}  # extras of the repository: the package imports none of them
BROUGHT = {
    "lerobot": "lerobot", "openvino": "openvino", "ray": "ray", "paho": "paho-mqtt", "google": "protobuf",
    "opentelemetry": "opentelemetry-sdk", "requests": "opentelemetry-exporter-otlp-proto-http",
    "onnxscript": "onnxscript", "trackers": "trackers", "metaworld": "metaworld",
}  # fmt: skip
"""Imports whose distribution has another name, comes with another one, or may not be installed here."""

USERS = {"vllm", "starlette"}
"""What the user brings, with its parts, and only its slice imports."""
BOUNDED = {"kornia-rs", "lerobot", "openvino", "ray", "transformers", "uvicorn", "websockets"}
"""Whose private or unstable parts we touch: each has an upper bound."""
PRIVATE = {
    "openvino._offline_transformations",
    "_apply_gate",  # transformers
    # lerobot
    "_load_as_safetensor", "_normalize_action", "_normalize_observation", "_pi_aloha_encode_actions", "_prepare_batch",
    "_prepare_global_conditioning", "_preprocess_images", "_registry_name", "_tensor_stats",
    # Python's own, and its named tuples
    "_SubParsersAction", "_Unpickler", "_asdict", "_exit", "_fields", "_get_formatter", "_get_running_loop",
    "_option_string_actions", "_replace", "_set_running_loop",
}  # fmt: skip
"""All that is private to others, and used."""


def names(dependencies: list[str]) -> set[str]:
    """Distributions, without versions and our own extras."""
    found = {re.split(r"[\[<>=~;! ]", told)[0].lower().replace("_", "-") for told in dependencies}
    return found - {PROJECT["name"]}


def roots() -> dict[str, str]:
    """Each import that is neither ours nor Python's, and one module that has it."""
    ours = {PACKAGE, "typing_extensions"} | sys.stdlib_module_names  # that one is for mypy
    found = {name.split(".")[0]: module.name for module in modules().values() for _, name in module.imports}
    return {root: where for root, where in found.items() if root not in ours}


def imported() -> dict[str, tuple[str, str]]:
    """The distribution of each of them, with the import and the module."""
    known = packages_distributions()
    called = {root: BROUGHT.get(root) or known.get(root, [root])[0] for root in roots()}
    return {called[root].lower().replace("_", "-"): (root, where) for root, where in roots().items()}


def test_what_the_package_imports_is_named_once_and_nothing_else_is_plain() -> None:
    plain, extras = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    more = set().union(*(names(told) for extra, told in extras.items() if extra not in FOR_US))
    found = imported()
    wrong = [f"{name} is imported by {where}, and nowhere named" for name, (_, where) in found.items()
             if name not in plain | more | USERS]  # fmt: skip
    wrong += [f"{root}, imported by {where}, is not in EXTRAS" for name, (root, where) in found.items()
              if name not in plain | USERS and root not in EXTRAS]  # fmt: skip
    wrong += [f"{name} is a plain dependency that nothing imports" for name in plain - found.keys()]
    wrong += [f"{name} is plain, and part of an extra" for name in plain & more]
    assert wrong == []


# -- what is private ---------------------------------------------------------------------------------------------------


def private(trees: Iterable[ast.Module]) -> set[str]:
    """Attributes and modules with an underscore that nothing of these defines."""
    own: set[str] = set()
    used: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            own.add(node.value)  # of __slots__
        elif isinstance(node, ast.ImportFrom) and "._" in (node.module or ""):
            used.add(node.module or "")
    return {name for name in used - own if re.match(r"_[^_]|.*\._", name)}


def test_what_is_private_to_a_library_is_known_and_its_version_has_an_upper_bound() -> None:
    trees = [module.tree for module in modules().values()]
    assert private(trees) == PRIVATE
    lines = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    bounds = {(told.name, str(told.specifier)) for told in map(Requirement, lines) if told.name in BOUNDED}
    assert {name for name, _ in bounds} == BOUNDED
    assert [told for told in bounds if not re.search("<|~=|==", told[1])] == []


def test_the_robots_extra_installs_a_lerobot_that_serves_every_type_where_one_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [told for told in map(Requirement, PROJECT["optional-dependencies"]["robots"]) if told.name == "lerobot"]
    (newest,) = [told for told in lines if told.marker and told.marker.evaluate({"python_version": "3.12"})]
    wrong = []
    for found in ("0.4.4", "0.5.0", "0.5.10", "0.6.0", "0.6", "0.6.1", "0.6.2rc1", "0.6.10"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, found=found: found)
        try:
            check_lerobot("lerobot:x", "pi0")
            error = ""
        except ConfigError as refused:
            error = str(refused)
        if (error == "") != newest.specifier.contains(found, prereleases=True) or (error and "0.6.1" not in error):
            wrong.append((found, error))
        check_lerobot("lerobot:x", "act")
    assert wrong == []


def test_something_private_is_found() -> None:
    tree = ast.parse("from a._b import c\nd._e\nclass F:\n def _g(self): self._g()\nos.__name__")
    assert private([tree]) == {"a._b", "_e"}


# -- the container -----------------------------------------------------------------------------------------------------


def closure(wanted: Iterable[str]) -> set[str]:
    """These distributions and all that they need, as they are installed here."""
    found: set[str] = set()
    queue = list(wanted)
    while queue:
        need = Requirement(queue.pop())
        name = need.name.lower().replace("_", "-")
        if name not in found and (need.marker is None or need.marker.evaluate({"extra": ""})):
            found.add(name)
            queue += distribution(name).requires or []
    return found


def test_the_container_has_hashes_of_the_versions_that_were_tested() -> None:
    text = (ROOT / "deploy" / "requirements.txt").read_text().replace("\\\n", " ")
    pins = {words[0]: words[1:] for words in map(str.split, text.splitlines())}
    tested = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    assert sorted(pins.keys() - set(tested)) == [], "make hashes"
    unhashed = [pin for pin, rest in pins.items() if not any(word.startswith("--hash=sha256:") for word in rest)]
    assert unhashed == []
    needed = closure([*PROJECT["dependencies"], "hatchling"])
    assert needed <= {pin.partition("==")[0] for pin in pins}
