"""A kind of source is known wherever a source is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.sources import modules

from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy import spec
from reflex_runtime.robots.sources import load

PREFIXES = {value for name, value in vars(spec).items() if name.isupper() and str(value).endswith(":")}
BASES = {"PolicySource", "PolicyCheckpoint"}


def test_every_prefix_is_read_and_in_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load.Export, "load", staticmethod(lambda source: None))
    wrong = []
    for prefix in PREFIXES:
        try:
            load.read_source(f"{prefix}no/where")
            wrong.append(f"{prefix} is read as an export directory")
        except ConfigError:
            pass
        if load.is_export(f"{prefix}no/where"):
            wrong.append(f"{prefix} counts as an export directory")
        if load.directory_of(f"{prefix}no/where") not in (Path("no/where"), Path()):
            wrong.append(f"{prefix} is part of the directory")
    for command in ("serve", "doctor"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        wrong += [f"{prefix} is not in the help of {command}" for prefix in PREFIXES if prefix not in text]
    assert (wrong, len(PREFIXES)) == ([], 3)


def test_every_source_is_loaded() -> None:
    loader, wrong = modules()[load.__name__], []
    known = {name for _, name in loader.imports}
    for module in modules().values():
        if module.name.startswith("reflex_runtime.robots.sources.") and module is not loader:
            classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
            kinds = [node.name for node in classes if BASES & {ast.unparse(base) for base in node.bases}]
            wrong += [f"{module.name}.{kind}" for kind in kinds if f"{module.name}.{kind}" not in known]
    assert wrong == ["reflex_runtime.robots.sources.export_files.PolicyCheckpoint"], "a base; load imports the others"
