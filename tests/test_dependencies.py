"""pyproject.toml names what the package imports, and its plain dependencies are imported."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.sources import PACKAGE, ROOT, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_US = {"bench", "dev"}  # extras of the repository: the package imports none of them
BROUGHT = {
    "lerobot": "lerobot", "openvino": "openvino", "ray": "ray", "paho": "paho-mqtt", "google": "protobuf",
    "opentelemetry": "opentelemetry-sdk", "requests": "opentelemetry-exporter-otlp-proto-http",
    "safetensors": "lerobot", "onnxscript": "onnxscript", "trackers": "trackers", "metaworld": "metaworld",
}  # fmt: skip
"""Imports whose distribution has another name, comes with another one, or may not be installed here."""


def names(dependencies: list[str]) -> set[str]:
    """Distributions, without versions and our own extras."""
    found = {re.split(r"[\[<>=~;! ]", told)[0].lower().replace("_", "-") for told in dependencies}
    return found - {PROJECT["name"]}


def imported() -> dict[str, str]:
    """The distribution of each import that is neither ours nor Python's, and one module that has it."""
    known, found = packages_distributions(), {}
    for module in modules().values():
        for _, name in module.imports:
            root = name.split(".")[0]
            if root not in {PACKAGE, "typing_extensions"} | sys.stdlib_module_names:  # that one is for mypy
                distribution = BROUGHT.get(root) or known.get(root, [root])[0]
                found[distribution.lower().replace("_", "-")] = module.name
    return found


def test_what_the_package_imports_is_named_once_and_nothing_else_is_plain() -> None:
    plain, extras = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    more = set().union(*(names(told) for extra, told in extras.items() if extra not in FOR_US))
    found = imported()
    wrong = [f"{name} is imported by {where}, and nowhere named" for name, where in found.items()
             if name not in plain | more]  # fmt: skip
    wrong += [f"{name} is a plain dependency that nothing imports" for name in plain - found.keys()]
    wrong += [f"{name} is plain, and part of an extra" for name in plain & more]
    assert wrong == []
