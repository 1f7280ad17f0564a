"""A failing run of the tests says so at once: its failures stand in the output before the tests that come later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinned import thinned

TESTS = """
def test_first() -> None:
    assert 1 == 2, "the first one"

def test_second() -> None:
    print("the second one ran")
"""


@pytest.mark.parametrize("processes", thinned(["0", "1"], ["0"]))
def test_a_failure_is_shown_before_the_next_test_runs(tmp_path: Path, processes: str) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_two.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "xdist", "-n", processes],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    shown = done.stdout.index("the first one")
    assert shown < done.stdout.index("test_two.py::test_second PASSED" if processes == "0" else "PASSED")
    assert shown < done.stdout.index("= FAILURES =")
