"""Files of `schema_version` 1, which `reflex serve --record DIR` and `--trace FILE` of 2026-11-22 wrote.

`schema_1/recording.jsonl.gz` has two policies, batches of several steps, refusals, outcomes and a split;
`schema_1/trace.jsonl.gz` has a shadow.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.cli import main
from reflex_runtime.observe.journal import JournalError, JournalReader, read_journal
from robots.bundled import V1

FILES = Path(__file__).with_name("schema_1")
RECORDING, TRACE = FILES / "recording.jsonl.gz", FILES / "trace.jsonl.gz"


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_t4_a_recording_of_version_1_has_its_requests_batches_and_notes() -> None:
    read = read_journal(RECORDING)
    assert (read.header.schema_version, read.header.payloads, read.slots) == (1, True, ["a", "b"])
    assert Counter(line.outcome for line in read.requests) == {"ok": 8, "rejected": 6, "client_error": 1}
    assert all(line.schedule is not None for line in read.requests if line.outcome == "rejected")
    assert [note.kind for note in read.notes] == ["outcome"] * 4 + ["decision"]
    assert [(slot, line.wants, len(line.batches)) for slot, line in read.warm.items()] == [("a", 6, 54), ("b", 6, 54)]
    told = read.groups["a"]
    assert (told.unit, told.budget, told.max_size, told.flush["returns"]) == ("seconds", 0.1, 256, 0.005)
    assert read.footer is not None
    assert (read.footer.total_requests, len(read.batches)) == (15, 40)
    two = next(batch for batch in read.batches if batch.size == 2)
    assert (two.group, two.reason, two.cause, two.stage) == ("b", "timeout", "idle", "prefix")
    assert [(m.id, m.client, m.state, m.outcome) for m in two.members] == [
        ("r1", "arm-1", "waiting", "more"), ("r0", "arm-0", "waiting", "more"),
    ]  # fmt: skip
    assert two.members[0].age == pytest.approx(7.7e-3, abs=1e-4)
    assert sum(m.outcome == "done" for batch in read.batches for m in batch.members) == 8


def test_t4_a_trace_of_version_1_has_its_batches_on_the_schedulers_clock() -> None:
    read = read_journal(TRACE)
    assert (read.header.schema_version, read.header.payloads, len(read.batches)) == (1, False, 36)
    first = read.batches[0]
    assert read.seconds(first) == pytest.approx(0.592, abs=1e-3)
    assert first.finished == pytest.approx(first.at + first.elapsed)
    assert [member.id for member in first.members] == ["r3", "r0", "r2"]
    assert [note.fields["request_id"] for note in read.noted("shadow")] == ["r3", "r0", "r2", "r1"]


@pytest.mark.parametrize(
    ("words", "file", "told"),
    [
        (["trace"], RECORDING, "▸arm-1 ▸arm-0"),
        (["trace"], TRACE, "▸arm-3 ▸arm-0 ▸arm-2"),
        (["report"], RECORDING, "deadline_unreachable 2 4"),
        (["report"], TRACE, "shadow: 4 pairs"),
        (["replay", "--schedule"], RECORDING, "batches 40 42"),
        (["tune"], RECORDING, "14 requests in 0.1 s"),
    ],
)
def test_t4_the_commands_read_version_1(
    words: list[str], file: Path, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([*words, str(file)]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_t5_the_requests_of_version_1_go_through_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its pictures, states, instructions and seeds are read; the demo's weights are others today."""
    out = tmp_path / "o.json"
    assert main(["replay", str(RECORDING), "--model", str(V1), "--slot", "a", "--output", str(out)]) == 0
    found = json.loads(out.read_text())["slots"]["a"]["actions"]
    assert (found["compared"], found["errors"]) == (4, {})
    assert found["cosine_min"] > 0.99


def test_replay_takes_the_bundled_policy_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no directory is called demo
    assert main(["replay", str(RECORDING), "--model", "demo", "--slot", "a"]) == 0
    assert "replayed" in capsys.readouterr().out


def test_t6_a_trace_of_version_1_says_why_its_schedule_cannot_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(TRACE), "--schedule"]) == 2
    assert "the scheduler got none of its requests" in capsys.readouterr().err


def test_t1_a_request_needs_its_number_alone(tmp_path: Path) -> None:
    """The lines of the first description: all else is optional."""
    head = {"kind": "header", "schema_version": 1, "policies": [{"slot": "a", "model_id": "pi0", "model_hash": "aa"}]}
    routing = {"slot": "a", "routing_key": "ep_xyz", "degraded": False, "cached": False}
    request = {"kind": "request", "seq": 0, "routing": routing}
    later = {"kind": "request", "seq": 1, "timestamp": "1970-01-01T00:00:02Z", "error": {"slug": "processor_failed"}}
    read = read_journal(written(tmp_path / "r.jsonl", head, request, later))
    assert [(line.slot, line.request.request_id, line.arrival, line.outcome) for line in read.requests] == [
        ("a", "0", 0.0, "ok"), ("prod", "1", 2.0, "failed"),
    ]  # fmt: skip
    assert read.requests[0].routing == routing
    assert main(["report", str(tmp_path / "r.jsonl")]) == 0


@pytest.mark.parametrize(
    ("began", "at"),
    [("2026-01-01T00:00:00", "2026-01-01T00:01:00Z"), ("", "2026-01-01T00:01:00")],
)
def test_t4_times_without_a_zone_are_refused(tmp_path: Path, began: str, at: str) -> None:
    header = {"kind": "header", "schema_version": 1, "started_at": began}
    path = written(tmp_path / "a.jsonl", header, {"kind": "request", "seq": 0, "timestamp": at})
    with pytest.raises(JournalError, match=rf"a\.jsonl, line {1 if began else 2}: .* with a timezone"):
        read_journal(path)


def test_t4_a_line_that_is_none_of_version_1_is_refused_with_its_number(tmp_path: Path) -> None:
    """Whatever a line says: it is read, or the file is refused."""
    draw, lines = random.Random(1), gzip.decompress(RECORDING.read_bytes()).splitlines()
    odd = (None, -1, 1e308, "x", [], {}, [1], {"a": 1}, True, "2026-11-22T00:00:00Z")
    refused: list[str] = []
    for file in range(200):
        chosen = [json.loads(line) for line in [lines[0], *draw.choices(lines[1:-1], k=3)]]
        line = draw.choice(chosen)
        inner = [part for part in line.values() if isinstance(part, dict) and part]
        part = draw.choice([line, line, *inner])
        part[draw.choice(list(part))] = draw.choice(odd)
        path = written(tmp_path / f"{file}.jsonl", *chosen)
        try:
            read_journal(path)
            list(JournalReader(path))
        except JournalError as error:
            refused.append(error.message)
    assert all(", line " in message for message in refused)
    assert 50 < len(refused) < 200
