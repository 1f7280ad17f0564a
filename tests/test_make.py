"""`make test` runs two passes and fails if either fails. `make demo` installs what the demo needs and no more."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Stands in for every program: notes each call, makes the environment, and fails the pass that FAILS names.
PYTHON = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in "-m venv "*) mkdir -p "$3";; esac
case "$*" in *"-m $FAILS"*) exit 1;; esac
"""


@pytest.mark.parametrize(("fails", "status"), [("nothing", 0), ("not timing", 2), ("timing", 2)])
def test_make_test_runs_both_passes_and_fails_if_one_does(tmp_path: Path, fails: str, status: int) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--old-file=setup", f"BIN={tmp_path}", "test"],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "FAILS": fails}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    parallel, serial = (tmp_path / "calls").read_text().splitlines()
    assert parallel == "-m pytest -m not timing --numprocesses 2 --dist worksteal"
    passes, files = serial.split(" tests/", 1)
    assert passes == "-m pytest -m timing"
    assert f"tests/{Path(__file__).name}" not in files.split()
    assert "telemetry/test_journal_disk.py" in files


def test_make_demo_installs_the_demo_alone_and_make_setup_everything(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for program in ("python", "reflex"):
        (tmp_path / program).write_text(PYTHON)
        (tmp_path / program).chmod(0o755)
    calls = tmp_path / "calls"

    def installed(target: str) -> list[str]:
        """The extras that `make TARGET` installs."""
        calls.write_text("")
        command = ["make", f"BIN={tmp_path}", f"PYTHON={tmp_path}/python", target]
        subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "FAILS": "nothing"}, check=True)
        lines = [line for line in calls.read_text().splitlines() if "pip install" in line]
        return [line.rsplit(" --", 1)[1].partition(" ")[2] for line in lines]

    clients = "inspect-robots-xpolicylab==0.1.0 openpi-client==0.1.2 trackers==2.6.1 "
    clients += "tritonclient==2.73.0 vla-eval==0.8.0"
    everything = [".[dev]", clients]
    assert installed("demo") == [".[demo]"]
    assert calls.read_text().endswith("\ndemo\n")  # reflex demo
    assert installed("demo") == []
    assert installed("setup") == everything
    assert installed("demo") == []
    shutil.rmtree(tmp_path / ".venv")
    assert installed("setup") == everything
    assert installed("demo") == []  # dev contains it


def test_the_demo_does_not_need_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    assert not [name for name in needed if name.startswith(("torch", "transformers", "openvino", "av"))]
