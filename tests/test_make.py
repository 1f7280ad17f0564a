"""`make test` runs all but the long tests. `make demo` installs what the demo needs and no more."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Stands in for every program: notes each call, makes the environment, and fails if it is what FAILS names.
PYTHON = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in "-m venv "*) mkdir -p "$3";; esac
case "$*" in *"-m $FAILS"*) exit 1;; esac
"""


def test_make_test_runs_all_but_what_is_long_and_fails_with_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    told = {
        "test": "-m pytest -m not long and not timing --numprocesses 4 --dist loadfile",
        "test-long": "-m pytest -m long --numprocesses 4 --dist loadfile tests clients bench",
        "test-timing": "-m pytest -m timing",
    }
    for target, command in told.items():
        for fails, status in (("nothing", 0), ("pytest", 2)):
            done = subprocess.run(
                ["make", "--old-file=setup", f"BIN={tmp_path}", target],
                cwd=ROOT, env={"PATH": "/usr/bin:/bin", "FAILS": fails}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == status, done.stderr
            assert (tmp_path / "calls").read_text().splitlines()[-1] == command


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
        environ = {"PATH": "/usr/bin:/bin", "FAILS": "nothing"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True)
        lines = [line for line in calls.read_text().splitlines() if "pip install" in line]
        if lines:  # told from the first second, and pip shows its progress
            assert done.stdout.startswith("installing what .[")
            assert "--quiet" not in lines[0]
        return [line.rsplit(" --", 1)[1].partition(" ")[2] for line in lines]

    clients = "inspect-robots-xpolicylab==0.1.0 openpi-client==0.1.2 trackers==2.6.1 "
    clients += "tritonclient==2.73.0 vla-eval==0.8.0"
    everything = [".[dev]", clients]
    assert installed("demo") == [".[demo]"]
    assert calls.read_text().endswith("\nexamples/demo\n")
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
