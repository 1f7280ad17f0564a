"""Ray is imported by `cluster/` alone, and where it is missing the command says which extra has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.cli import main, ray
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo.exports import export_dir


def test_x7_without_ray_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(ray, "find_spec", lambda name: None)
    assert main(["ray", str(export_dir())]) == 2
    assert "'reflex-runtime[ray]'" in capsys.readouterr().err


def test_x7_replicas_of_reflex_ray_are_rays_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`reflex serve` has a setting of that name, too: it starts processes."""
    monkeypatch.setenv("REFLEX_REPLICAS", "3")
    config, _, scale = ray._read({"source": "."})
    assert (config.replicas, scale.replicas) == (1, 3)
    config, _, scale = ray._read({"source": ".", "replicas": 4})
    assert (config.replicas, scale.replicas) == (1, 4)
    file = tmp_path / "reflex.toml"
    file.write_text("[serve]\nreplicas = 2\n")
    with pytest.raises(ConfigError, match=r"\[ray\]"):
        ray._read({"source": ".", "config": file})
