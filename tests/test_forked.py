"""A fork that has the command's imports behind it ends as the command does, and has all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from forked import PATIENCE, Forked, reflex
from reflex_runtime.version import __version__
from serving.exports import write_tiny
from serving.harness import Server

# Run in the process: when it ends it tells what it has imported that the fork did not have.
LATER = """
import atexit, json, sys
had = set(sys.modules)
atexit.register(lambda: print("later:", json.dumps(sorted(sys.modules.keys() - had)), file=sys.stderr))
"""
FEW = 5  # modules; each that is missing in the fork, every server of a test imports again


def later(line: str) -> list[str]:
    found: list[str] = json.loads(line.removeprefix("later: "))
    return found


def test_it_is_given_words_and_surroundings_and_answers_with_both_streams_and_a_status(tmp_path: Path) -> None:
    done = reflex("--version", env={"SAID": "yes"}, before="import os, sys; print(os.environ['SAID'], file=sys.stderr)")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"reflex {__version__}\n", "yes\n")
    done = reflex("trace", "nothing.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("reflex trace: nothing.jsonl: ")


def test_its_threads_are_awaited_and_what_it_leaves_with_is_told() -> None:
    code = """
import sys, threading
threading.Thread(target=lambda: (threading.main_thread().join(), print("after", end=""))).start()
sys.exit("wrong")
"""
    process = Forked(code, env={}, stdout=subprocess.PIPE)
    assert process.communicate(PATIENCE) == (b"after", b"wrong\n")
    assert process.returncode == 1


def test_it_ends_with_the_tests_however_those_end() -> None:
    forks = "from forked import Forked; Forked({!r}, env={{}}, stdout=1).wait()"
    code = forks.format("import signal; print('up', flush=True); signal.pause()")
    folder = Path(__file__).parent
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=folder) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == b"up\n"
        tests.kill()
        assert tests.communicate(timeout=PATIENCE) == (b"", None)  # nothing holds it any more


def test_a_server_of_a_policy_imports_little_more(tmp_path: Path) -> None:
    with Server(write_tiny(tmp_path / "tiny"), before=LATER) as server:
        assert server.act().status == 200
        server.process.terminate()
        assert len(later(server.wait_log("later: "))) <= FEW, server.log


def test_feeds_import_little_more(tmp_path: Path) -> None:
    done = reflex("feeds", "a=shapes:seed=1", "--onnx", "shapes", "--duration-s", "0.1", cwd=tmp_path, before=LATER)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("later: "))
    assert len(later(line)) <= FEW, line
