"""The command as a shell sees it: what a user can mend is one line, a reader that leaves is no failure."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.sources import ROOT

import reflex_runtime
from reflex_runtime import cli
from reflex_runtime.cli.console import ProgressLine, status_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import EXTRAS, needed_by
from reflex_runtime.settings import LLMServeConfig, ServeConfig
from reflex_runtime.settings.declare import flag, headed
from reflex_runtime.settings.read import read_toml
from serving.exports import write_tiny

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
        ("trace {file}/x", "reflex trace: {file}/x"),
        ("replay {file}/x --schedule", "reflex replay: "),
    ],
)
def test_a_bad_path_is_one_line(
    arguments: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert cli.main([word.format(file=file) for word in arguments.split()]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says.format(file=file))


def without(package: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command where a package is not installed."""
    code = f"import sys; sys.modules[{package!r}] = None; from reflex_runtime.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        ("trace --prompts hi --out x", "matplotlib", "plots"),
        pytest.param("serve {export} --gr00t tcp://127.0.0.1:0", "zmq", "gr00t", marks=pytest.mark.long),
        pytest.param("serve {export} --oip-grpc 127.0.0.1:0", "grpc", "grpc", marks=pytest.mark.long),
        pytest.param("serve {export} --lerobot 127.0.0.1:0", "grpc", "grpc", marks=pytest.mark.long),
        ("serve scribe", "tokenizers", "llm"),
        ("feeds a={video} --onnx shapes", "av", "cameras"),
        pytest.param("feeds a=shapes: --onnx shapes --publish mqtt://h:1/x", "paho", "mqtt", marks=pytest.mark.long),
    ],
)
def test_a_missing_extra_is_named_in_one_line(arguments: str, package: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    words = arguments.format(export=write_tiny(tmp_path / "e"), video=tmp_path / "a.mp4")
    done = without(package, *words.split(), cwd=tmp_path)
    assert done.returncode != 0
    assert one_line(done).endswith(f"in a clone, pip install '.[{extra}]'")


EXTRAS_OF_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_names_what_it_brings_and_a_command_that_lacks_it_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brought = set(EXTRAS_OF_PROJECT) - {"bench", "dev"}
    assert set(EXTRAS.values()) == brought
    for module, extra in EXTRAS.items():
        monkeypatch.setitem(sys.modules, module, None)
        status = status_of(lambda name=module: int(importlib.import_module(name) is None), ["reflex", "some"])
        (line,) = capsys.readouterr().err.splitlines()
        assert status == 2
        assert line.startswith("reflex some: this needs ")
        assert line.endswith(f"in a clone, pip install '.[{extra}]'")
        with pytest.raises(ConfigError, match=rf"^a part needs .*'\.\[{extra}\]'$"), needed_by("a part"):
            importlib.import_module(module)


def test_a_module_that_no_extra_brings_is_a_traceback() -> None:
    with pytest.raises(ModuleNotFoundError):
        status_of(lambda: int(bool(importlib.import_module("nowhere_at_all"))), ["reflex"])


def test_each_module_that_needs_an_extra_names_it(tmp_path: Path) -> None:
    """All modules are imported where every library of an extra, and vLLM with its Starlette, is missing."""
    code = """if True:
        import importlib, pkgutil, sys
        from reflex_runtime.extras import EXTRAS
        import reflex_runtime
        sys.modules |= dict.fromkeys(EXTRAS)
        for module in pkgutil.walk_packages(reflex_runtime.__path__, "reflex_runtime."):
            try:
                importlib.import_module(module.name) if not module.name.endswith("__main__") else None
            except ModuleNotFoundError as error:  # the command makes one line of it
                assert (error.name or "").split(".")[0] in {*EXTRAS, "vllm", "starlette"}, (module.name, error)
            except Exception as error:
                assert type(error).__name__ == "ConfigError" and "pip install" in str(error), (module.name, error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_trace_without_the_extra_of_pictures_is_its_table(tmp_path: Path) -> None:
    assert run("trace", "--prompts", "hi", "--out", "x", "--no-picture", cwd=tmp_path).returncode == 0
    done = without("matplotlib", "trace", "x.jsonl", cwd=tmp_path)
    assert (done.returncode, "A prefill" in done.stdout) == (0, True)
    assert one_line(done) == "no picture, which needs matplotlib: in a clone, pip install '.[plots]'"
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


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


@pytest.mark.parametrize("arguments", [["--help"], ["simulate", "--duration-s", "3"], ["trace", "x"]])
@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_closed_standard_streams_are_no_failure(arguments: list[str], closed: list[int], tmp_path: Path) -> None:
    whole = run(*arguments, cwd=tmp_path)
    done = run(*arguments, cwd=tmp_path, preexec_fn=lambda: [os.close(number) for number in closed])
    assert done.returncode == whole.returncode
    assert "Traceback" not in done.stderr
    assert 2 in closed or done.stderr == whole.stderr


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
    if sys.argv[1].startswith("-"):  # these are most of what a first look would wait for
        heavy |= {"asyncio", "dataclasses", "logging", "reflex_runtime.settings"} & sys.modules.keys()
    modules = {m for m in sys.modules if m.startswith("reflex_runtime.cli.")} - {"reflex_runtime.cli.console"}
    print(sorted(heavy | modules), file=sys.stderr)
"""

    def imported(*words: str) -> str:
        done = subprocess.run([sys.executable, "-c", seen, *words], capture_output=True, text=True, check=True)
        return done.stderr.strip()

    assert imported("--version") == imported("--help") == "[]"
    assert imported("simulate", "--help") == "['reflex_runtime.cli.simulation']"
    serving = ["serve", "serving"]
    assert imported("serve", "--help") == str([f"reflex_runtime.cli.{name}" for name in serving])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("sevre", "reflex: sevre: no such command; did you mean serve?; there are serve, top, "),
        ("serve --max-batch-cots-ms=5", "reflex serve: unrecognized arguments: --max-batch-cots-ms=5; did you mean "),
        ("serve scribe --model 7", "reflex serve: unrecognized arguments: --model 7\n"),
        ("serve scribe --max-seq-len=7", "reflex serve: unrecognized arguments: --max-seq-len=7; did you mean --max-m"),
        ("serve . --max-batch-cost 5", "reflex serve: unrecognized arguments: --max-batch-cost 5; write --max-batch"),
        ("serve . --no-superv", "reflex serve: unrecognized arguments: --no-superv; write --no-supervise\n"),
        ("top --on", "reflex top: unrecognized arguments: --on; write --once\n"),
        ("--vers", "reflex: --vers: no such option; did you mean --version?"),
        ("serve scribe --kv-cache-bg 1", "reflex serve: unrecognized arguments: --kv-cache-bg 1; did you mean --kv"),
        (
            "serve scribe --gr00t :1",
            "reflex serve: unrecognized arguments: --gr00t :1; --gr00t is an option of policies",
        ),
        (
            "serve . --max-num-seqs=2",
            "reflex serve: unrecognized arguments: --max-num-seqs=2; --max-num-seqs is an option of language models",
        ),
        (
            "serve scribe scribe",
            "reflex serve: unrecognized arguments: scribe; write reflex serve MODEL_DIR; reflex serve --help shows all",
        ),
        ("feeds a=b.mp4 --relatime", "reflex feeds: unrecognized arguments: --relatime; did you mean --realtime?"),
        ("simulate --zzzz", "reflex simulate: unrecognized arguments: --zzzz"),
        ("--versoin", "reflex: --versoin: no such option; did you mean --version?"),
        (
            "serve . more",
            "reflex serve: unrecognized arguments: more; write reflex serve [SOURCE]; reflex serve --help",
        ),
        ("demo-export", "reflex demo-export: missing: DIR; write reflex demo-export DIR; reflex demo-export --help"),
        ("probe http://x --timeout-s soon", "reflex probe: --timeout-s=soon: must be a number"),
        ("report serv --format jsn", "reflex report: --format=jsn: must be one of text, json; did you mean json?"),
        ("serve . --max-queue", "reflex serve: --max-queue: expected one argument; write --max-queue N"),
    ],
)
def test_a_wrong_command_line_is_told_what_may_stand_there(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(says)


def test_serve_alone_names_every_kind_of_source() -> None:
    line = one_line(run("serve"))
    for source in ("demo", "scribe", "DIR", "FILE.onnx", "python:MODULE:NAME", "--policy-a DIR"):
        assert f" {source}" in line


def test_an_option_that_says_no_has_no_opposite() -> None:
    assert "--no-record-no-gzip" not in run("serve", "--help").stdout


def test_reflex_alone_lists_its_verbs() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    for verb, text in cli.VERBS.items():
        assert f"{verb} {text}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "simulate --arrivals Poison",
            "--arrivals=Poison: must be one of poisson, bursty, diurnal, heavy, closed; did you mean poisson?",
        ),
        ("simulate --arrivals closed --think arond:1,2", "did you mean around?"),
        ("simulate --rate fast", "--rate=fast: must be a number in [0.001, 100000] 1/s"),
        ("serve . --rtc-schedule linear", "; did you mean LINEAR?"),
        (
            "serve nowhere --no-supervise",
            "nowhere: not found, expected an export directory; bundled: "
            "reflex serve demo is a robot policy",
        ),
        ("serve more.py --no-supervise", "is a Python file; serve a function of it: reflex serve python:more:F"),
        ("serve more:arr --no-supervise", "; for a function of yours: reflex serve python:more:arr"),
        ("serve more.py:arr --no-supervise", "; for a function of yours: reflex serve python:more:arr"),
        ("serve python:more.py:arr --no-supervise", "there is no module 'more.py': leave .py out, more:arr"),
        ("doctor python:more:arr", "python:more:arr: is a function, but doctor checks policies and language models"),
        (
            "serve {export} --no-supervise --port 0 --provider gpu",
            "--provider=gpu: not in this onnxruntime, which has ",
        ),
        (
            "serve {export} --no-supervise --port 0 --provider CPUExecutionProvidr",
            "; did you mean CPUExecutionProvider?",
        ),
        ("serve {export} --no-supervise --port 0 --trace nodir/t.jsonl", "there is no directory nodir; make it first"),
        ("serve . --config {serv}", "serv: no such table; there may be serve and policies; did you mean serve?"),
        ("trace --prompts hi --priority urgnt", "--priority=urgnt: must be one of urgent, default, background"),
        (
            "trace --prompts hi ho --priority urgnt",
            "must be one of urgent, default, background, or 2 of them separated by commas, one for each prompt",
        ),
        ("trace --prompts hi --at 1,2", "--at=1,2: must be a whole number in [0, 999999999]"),
        ("trace --prompts hi --model nope", "--model=nope: no such directory; scribe is the bundled model"),
        ("trace {serv}", "serv.toml, line 1: not a journal: "),
        ("trace {serv}", "; reflex serve --trace FILE or --record DIR writes one"),
        ("replay {serv}", "give either --model DIR, to run its model, or --schedule, to run the scheduler"),
        ("feeds {serv}", "must be NAME=SOURCE, such as serv={serv}"),
        ("feeds a=shapes:seeed=3 --onnx shapes", "; did you mean seed?"),
        ("top http://nowhere.invalid", "no such host"),
        ("top http://127.0.0.1:1", "nothing listens there; start a server with reflex serve, or give another URL"),
        ("probe http://127.0.0.1:1 --wire openpi --observation {serv}", "numpy.savez(FILE, **observation) writes one"),
    ],
)
def test_an_error_says_what_to_write_next(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serv.toml").write_text("[serv]\nmax_queue = 3\n")
    Path("more.py").write_text("def arr(items: list[int]) -> list[int]:\n    return items\n")
    write_tiny(Path("tiny"))
    words = [word.format(export="tiny", serv="serv.toml") for word in arguments.split()]
    assert cli.main(words) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert says.format(serv="serv.toml") in line


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


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_has_its_texts_only(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A single % in a text of argparse takes what follows as a format, and prints the option's fields."""
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    text = capsys.readouterr().out
    assert "option_strings" not in text
    assert "%%" not in text


def test_a_file_of_settings_may_be_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As with `--config <(…)`: what tells the models and what reads the settings get the same from it."""
    reads, writes = os.pipe()
    with os.fdopen(reads), os.fdopen(writes, "w") as file:
        file.write("[serve]\nno_such = 1\n")
        file.close()
        given = ["serve", str(write_tiny(tmp_path)), "--config", f"/dev/fd/{reads}", "--port", "99999"]
        assert cli.main(given) == 2
        assert f"/dev/fd/{reads}: [serve] no_such: no such setting" in capsys.readouterr().err
        assert read_toml(Path(f"/dev/fd/{reads}")) == {"serve": {"no_such": 1}}


def test_progress_is_told_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("reflex_runtime.cli.console.time.monotonic", lambda: now[0])
    line = ProgressLine("requests")
    for done in range(1, 12):
        now[0] = float(done)
        line(done)
    line(12, 20)
    now[0] = 99.0
    line(13, 20)
    line(20, 20)
    assert capsys.readouterr().err == "5 requests\n10 requests\n13 of 20 requests\n"
