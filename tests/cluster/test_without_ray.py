"""Ray is imported by `cluster/` alone, and where it is missing the command says which extra has it."""

from __future__ import annotations

from typing import Any

import pytest

from reflex_runtime.cli import main, ray
from reflex_runtime.demo.exports import export_dir


def test_x7_without_ray_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(ray, "find_spec", lambda name: None)
    assert main(["ray", str(export_dir())]) == 2
    assert "'reflex-runtime[ray]'" in capsys.readouterr().err
