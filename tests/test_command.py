"""The command as a shell sees it: what a user can mend is one line, a reader that leaves is no failure."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import reflex_runtime
from reflex_runtime import cli
from reflex_runtime.config import LLMServeConfig, ServeConfig
from reflex_runtime.options import flag, headed

REFLEX = [sys.executable, "-m", "reflex_runtime"]


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as a shell has it
    return subprocess.run(
        [*REFLEX, *arguments], stderr=subprocess.PIPE, text=True, timeout=100, check=False, env=env,
        **({"stdout": subprocess.PIPE} | more),
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("demo-export {file}/x", "reflex demo-export: {file}/x: Not a directory"),
        ("simulate --duration-s 3 --picture {file}/x.svg", "reflex simulate: --picture={file}/x.svg: cannot make"),
        ("simulate --duration-s 3 --picture /proc/no/x", "reflex simulate: --picture=/proc/no/x: cannot make"),
        ("demo --out {file}/x", "reflex demo: {file}/x: Not a directory"),
        ("trace {file}/x", "reflex trace: {file}/x"),
        ("replay {file}/x --schedule", "reflex replay: "),
    ],
)
def test_a_bad_path_is_one_line(arguments: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = run(*(word.format(file=file) for word in arguments.split()))
    assert one_line(done).startswith(says.format(file=file))
    assert done.returncode != 0


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    done = run(
        "demo-export", str(tmp_path / "export"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )  # fmt: skip
    assert done.returncode == 1
    assert one_line(done).endswith(os.strerror(errno.EFBIG))
    with open("/dev/full", "w") as full:
        done = run("simulate", "--duration-s", "3", stdout=full)
    assert (done.returncode, one_line(done)) == (1, "reflex simulate: No space left on device")


@pytest.mark.parametrize("arguments", [["--help"], ["simulate", "--duration-s", "3"], ["trace", "--prompts", "hello"]])
def test_a_reader_that_leaves_is_no_failure(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(*arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_while_the_command_is_still_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == "reflex: interrupted\n"


def test_importing_the_package_imports_nothing_but_its_version() -> None:
    seen = "import sys, reflex_runtime; print(sorted(m for m in sys.modules if m.startswith('reflex_runtime')))"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['reflex_runtime', 'reflex_runtime.version']"


def test_every_public_name_is_there_and_no_other() -> None:
    for name in reflex_runtime.__all__:
        assert getattr(reflex_runtime, name) is not None
    assert dir(reflex_runtime) == sorted(reflex_runtime.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = reflex_runtime.Nothing


def test_a_verb_imports_no_other_and_version_imports_none() -> None:
    seen = """
import sys
from reflex_runtime.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"numpy", "rich", "onnxruntime", "matplotlib"} & sys.modules.keys()
    print(sorted(heavy | {m for m in sys.modules if m.startswith("reflex_runtime.cli.")}), file=sys.stderr)
"""

    def imported(*words: str) -> str:
        done = subprocess.run([sys.executable, "-c", seen, *words], capture_output=True, text=True, check=True)
        return done.stderr.strip()

    assert imported("--version") == "[]"
    assert imported("simulate", "--help") == "['reflex_runtime.cli.simulate']"
    assert imported("serve", "--help") == "['reflex_runtime.cli.serve', 'reflex_runtime.cli.serving']"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("sevre", "reflex: sevre: no such verb; did you mean serve?; there are serve, status, "),
        ("serve --max-batch-cots-ms=5", "reflex serve: unrecognized arguments: --max-batch-cots-ms=5; did you mean "),
        ("serve scribe --kv-cache-bg 1", "reflex serve: unrecognized arguments: --kv-cache-bg 1; did you mean --kv"),
        (
            "serve scribe --gr00t :1",
            "reflex serve: unrecognized arguments: --gr00t :1; --gr00t is an option of policies",
        ),
        (
            "serve . --max-num-seqs=2",
            "reflex serve: unrecognized arguments: --max-num-seqs=2; --max-num-seqs is an option of language models",
        ),
        ("feeds a=b.mp4 --relatime", "reflex feeds: unrecognized arguments: --relatime; did you mean --realtime?"),
        ("simulate --zzzz", "reflex simulate: unrecognized arguments: --zzzz"),
    ],
)
def test_a_misspelt_verb_or_option_is_told_the_nearest(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.parametrize(("words", "kind"), [(["serve"], ServeConfig), (["serve", "scribe"], LLMServeConfig)])
def test_help_has_every_option_below_its_heading(
    words: list[str], kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    text = capsys.readouterr().out
    place = 0
    for heading, options in headed(kind).items():
        place = text.index(f"\n{heading}:\n", place)
        for field in options:
            place = text.index(f"\n  {flag(field.name)}", place)
    assert len(headed(kind)) >= 7
