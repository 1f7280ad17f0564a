"""`reflex tune` as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.observe.journal import GroupInfo, Header, Journal, read_journal
from reflex_runtime.sim import Affine, Around, Callers, Fixed, Noisy, search
from sim.journals import journal_of, write

DEVICE = Noisy(Affine(0.020, 0.002), 0.03)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few settings, simulated for a short time."""
    for name, value in (
        ("HOLDS", (0.0, 0.005, inf)), ("BUDGETS", (0.05, 0.1, 0.2)), ("SIZES", (2, 16)), ("MOST", 200), ("LEAST", 0.5),
        ("LONG", 3.0),
    ):  # fmt: skip
        monkeypatch.setattr(search, name, value)



def journal(path: Path, hold: float = 0.0, callers: int = 8, think: float = 0.003) -> Path:
    group = GroupConfig(flush=FlushPolicy.window(0.1, hold))
    return write(journal_of(group, Callers(callers, Around(think, think / 3)), DEVICE, 2.0)[0], path / "run.jsonl")


def test_it_says_what_to_set_and_what_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = journal(tmp_path)
    assert main(["tune", str(file)]) == 0
    printed = capsys.readouterr()
    assert "8 callers wait for their answer, then" in printed.out
    assert "budget 100 ms, hold \u2264 0 ms, size \u2264 256" in printed.out
    (line,) = [line for line in printed.out.splitlines() if line.startswith("set ")]
    assert "--batch-timeout-ms" in line
    now, then = (float(cell) for cell in row(printed.out, "answers/s")[:2])
    assert then > 1.2 * now


def test_it_says_nothing_to_set_where_the_simulation_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = search.Tuner(read_journal(journal(tmp_path))).tune(None)
    assert "\nset " in search.text_of(tuning, "", "f")
    monkeypatch.setattr(search.Tuning, "doubt", "off by 50%")
    assert "\nset " not in search.text_of(tuning, "", "f")


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_it_says_when_nothing_helps_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(journal(tmp_path, inf, 2, 0.9))]) == 0
    out = capsys.readouterr().out
    assert "Nothing to change: there is no load" in out
    assert "set " not in out


def test_aim_is_what_is_improved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(journal(tmp_path, inf, 2, 0.9))
    assert main(["tune", file]) == 0
    assert "\naim       p95\n" in capsys.readouterr().out
    assert main(["tune", file, "--aim", "throughput"]) == 0
    assert "\naim       throughput\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["tune", file, "--aim", "p97"])
    told = "reflex tune: --aim=p97: must be one of p50, p95, p99, throughput, on-time; did you mean p99?\n"
    assert capsys.readouterr().err == told


def test_what_is_no_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    assert main(["tune", str(tmp_path / "x.jsonl")]) == 1
    assert "not a journal" in capsys.readouterr().err
    for verb in ("tune", "trace", "report"):
        assert main([verb, str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err == f"reflex {verb}: {tmp_path / 'none'}: No such file or directory\n"


@pytest.mark.parametrize("command", [["tune"], ["report"], ["replay", "--schedule"]])
def test_a_trace_without_requests_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    file = tmp_path / "run.jsonl"
    for unit, kind in (("tokens", "a language model"), ("requests", "feeds")):
        write(Journal(file, Header(groups={"g": GroupInfo(unit, None, 4)}), [], [], [], [], {}, None, False), file)
        assert main([*command, str(file)]) == 2
        said = f": {file}: a trace of {kind}, which has batches and no requests; reflex trace reads it\n"
        assert capsys.readouterr().err.endswith(said)


def test_the_recording_of_functions_goes_through_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.jsonl"
    write(Journal(file, Header(model_type="function"), [], [], [], [], {}, None, False), file)
    assert main(["replay", str(file), "--model", "demo"]) == 2
    assert "a recording of functions, which no policy can answer; use --schedule" in capsys.readouterr().err


def test_a_server_is_watched_with_curl(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "http://127.0.0.1:8000/"]) == 2
    assert "curl -s 'http://127.0.0.1:8000/diagnostics/journal?seconds=30' > run.jsonl" in capsys.readouterr().err


def _with(line: dict[str, Any], changes: Callable[[dict[str, Any]], None]) -> str:
    changes(line)
    return json.dumps(line)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        pytest.param("request", lambda line: line.update(outcome="failed"), "was answered", id="no answers"),
        pytest.param(
            "request", lambda line: line["schedule"].update(priority=-1), "priority=-1", id="no such priority"
        ),
        pytest.param("request", lambda line: line["schedule"].update(stage="x", wants=2), "stage='x'", id="no stage"),
        pytest.param(
            "header",
            lambda line: line["groups"]["default"]["flush"].update(hold_max=None),
            "slot default",
            id="no hold",
        ),
        pytest.param("batch", lambda line: line.update(elapsed=0.0), "", id="batches that took no time"),
        pytest.param("batch", lambda line: line.update(elapsed=1e11), "took 1e+11 s", id="batches that took ages"),
    ],
)
def test_what_a_journal_cannot_mean_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, changes: Callable[[Any], None], said: str
) -> None:
    group = GroupConfig(flush=FlushPolicy.window(0.1, inf))
    file = write(journal_of(group, Callers(2, Fixed(0.003)), DEVICE, 0.5)[0], tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(_with(line, changes if line["kind"] == kind else lambda _: None) + "\n" for line in lines))
    assert main(["tune", str(file)]) == (2 if said else 0)
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("reflex tune: ")]
    assert [said in error for error in errors] == ([True] if said else [])


def test_a_latency_that_batches_do_not_explain_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by `reflex replay --schedule`: every answer came 100 ms after its batch had ended."""
    said = "p50 or throughput is off by"
    file = journal(tmp_path, inf, 2, 0.9)
    for words in (["tune"], ["replay", "--schedule"]):
        assert main([*words, str(file)]) == 0
        printed = capsys.readouterr()
        assert said not in printed.out + printed.err
    lines = [json.loads(line) for line in file.read_text().splitlines()]

    def later(line: dict[str, Any]) -> None:
        if line["kind"] == "batch":
            line["finished"] += 0.1
        elif line["kind"] == "request":
            line["latency"]["total_ms"] += 100.0

    file.write_text("".join(_with(line, later) + "\n" for line in lines))
    assert main(["tune", str(file)]) == 0
    assert f"\nwarning   simulated with the recorded settings, {said}" in capsys.readouterr().out
    out = tmp_path / "o.json"
    assert main(["replay", "--schedule", str(file), "--output", str(out)]) == 0
    assert f"reflex replay: warning: simulated with the recorded settings, {said}" in capsys.readouterr().err
    assert said in json.loads(out.read_text())["warning"]
