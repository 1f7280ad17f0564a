"""Every example runs as it stands, in a process of its own."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinned import thinned

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
QUICK = [path for path in EXAMPLES if path.stem != "pytorch_policy"]  # which imports torch


@pytest.mark.parametrize("path", thinned(EXAMPLES, QUICK), ids=lambda path: path.stem)
def test_example_runs_and_prints(path: Path) -> None:
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example that shows nothing"


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("generate_tokens", "tokenizers", "llm"), ("generate_batcher", "tokenizers", "llm"),
     ("pytorch_policy", "torch", "torch")],
)  # fmt: skip
def test_an_example_without_its_extra_ends_in_one_line(name: str, library: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / f"{library}.py").write_text(f"raise ModuleNotFoundError('no {library}', name='{library}')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    (path,) = (path for path in EXAMPLES if path.stem == name)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"in a clone, pip install '.[{extra}]'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("recording", "told"),
    [("nowhere", "nowhere: No such file"), ("recording.jsonl.gz", "episode ep-9, only of ep-0, ep-1, ep-2, ep-3")],
)
def test_an_episode_that_was_not_recorded_is_one_line(recording: str, told: str) -> None:
    (path,) = (path for path in EXAMPLES if path.stem == "rerun_episode")
    words, there = [sys.executable, path, recording, "ep-9", "out.rrd"], Path(__file__).parent / "observe" / "schema_1"
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=there)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert told in done.stderr


def test_a_recording_without_episodes_names_none(tmp_path: Path) -> None:
    recorded = gzip.decompress((Path(__file__).parent / "observe" / "schema_1" / "recording.jsonl.gz").read_bytes())
    (tmp_path / "some.jsonl").write_bytes(recorded.replace(b'"episode_id":"ep-0"', b'"episode_id":null'))
    (path,) = (path for path in EXAMPLES if path.stem == "rerun_episode")
    words = [sys.executable, path, tmp_path / "some.jsonl", "ep-9", "out.rrd"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.endswith("no request of episode ep-9, only of ep-1, ep-2, ep-3\n")


def test_examples_are_short() -> None:
    assert [path.name for path in EXAMPLES if len(path.read_text(encoding="utf-8").splitlines()) >= 60] == []
