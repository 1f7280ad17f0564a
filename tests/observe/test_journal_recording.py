"""A journal with payloads, as --record writes it: the format of its lines."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Cause,
    Done,
    Failed,
    RequestAnswered,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import Cancelled, ConfigError, QueueFull
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import AdmittedBatch, Priority, Request, Ticket
from reflex_runtime.observe.journal import client_label, read_journal
from reflex_runtime.observe.journal_writer import (
    EARLY,
    JournalWriter,
    Recording,
    RequestRecord,
    hardware,
    info_of,
    scheduled,
    short,
)

HEADER = {
    "model_hash": "0123456789abcdef",
    "config_hash": "fedcba9876543210",
    "export_dir": "/srv/v1",
    "model_type": "flow_matching",
    "export_kind": "monolithic",
    "embodiment": "bench-arm",
    "hardware": {"cpu": "abacus"},
    "providers": ["CPUExecutionProvider"],
    "notes": "a test",
}


class Run:
    """Batches of requests, as the scheduler and a server tell of them, on a clock of its own."""

    def __init__(self, recorder: JournalWriter, now: float = 1000.0) -> None:
        self.recorder, self.now = recorder, now
        self.tickets = self.batches = 0

    def batch(
        self, *answers: RequestRecord, slot: str = "prod", stage: str = "", outcome: str = "ok", took: float = 0.0215
    ) -> None:
        """One batch that answers these. took: seconds of each, from its last byte."""
        tickets = []
        for answered in answers:
            request = Request(id=answered.request_id, group=slot, client="robot", shape="s", partition="s", stage=stage)
            ticket = Ticket(request, self.tickets, self.now - 0.001)
            ticket.started, ticket.shared = self.now, 0.00975
            ticket.admission = AdmittedBatch(self.batches + 1, len(answers), "timeout", "idle", 0.02)
            tickets.append(ticket)
            self.tickets += 1
        self.batches += 1
        grants = dict.fromkeys(tickets, 1.0)
        batch = Batch(self.batches, slot, "s", stage, Cause.IDLE, self.now, 0.02, 0.018, grants, tuple(tickets))
        self.recorder(BatchScheduled(self.now, batch, 0))
        self.now += 0.02
        self.recorder(BatchFinished(self.now, batch, 0.0195, False))
        for ticket in tickets:
            ticket.outcome = Done() if outcome == "ok" else Failed(Cancelled())
            self.recorder(RequestSettled(self.now, ticket))
        for ticket, answered in zip(tickets, answers, strict=True):
            status = 200 if outcome == "ok" else 499
            error = QueueFull("no room") if answered.actions is None else None
            told = self.now, slot, outcome, status, 0.021, ticket, answered, took, "http", error
            self.recorder(RequestAnswered(*told))


def asked(i: int, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": f"request-{i}",
        "episode_id": "ep_7",
        "instruction": "open the door",
        "state": [0.5, -0.25],
        "seed": 2**63 + i,
        "actions": np.array([[0.1, -0.2], [1 / 3, 4.0]], np.float32) * (i + 1),
        "denoising_steps": 10,
        "inference_mode": "monolithic",
    }
    return RequestRecord(**fields | changes)


PLACE = frozenset({"gzip", "images", "max_bytes"})


def recorder(directory: Path, **changes: Any) -> JournalWriter:
    """changes: of the `Recording`, and of the writer."""
    to = Recording(directory, **{name: value for name, value in changes.items() if name in PLACE})
    clock: Callable[[], float] = lambda: 999.0  # noqa: E731
    told: dict[str, Any] = {"header": HEADER, "clock": clock, "wall": lambda: 1_700_000_000.25}
    return JournalWriter(to, **told | {name: value for name, value in changes.items() if name not in PLACE})


def record(directory: Path, *batches: list[RequestRecord], **changes: Any) -> Path:
    made = recorder(directory, **changes)
    run = Run(made)
    for answers in batches:
        run.batch(*answers)
    assert made.close()
    assert made.path is not None
    return made.path


def raw(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


# -- the format --------------------------------------------------------------------------------------------------------


def test_t1_the_file_is_named_by_time_model_and_session_and_opened_at_the_first_request(tmp_path: Path) -> None:
    made = recorder(tmp_path / "new" / "dir")
    made.note("decision", action="split", split=50)  # before any request: there is no file yet
    assert made.close()
    assert list((tmp_path / "new" / "dir").iterdir()) == []
    path = record(tmp_path, [asked(0)])
    name = r"20231114-221320-0123456789abcdef-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.jsonl\.gz"
    assert re.fullmatch(name, path.name)
    assert record(tmp_path, [asked(0)], gzip=False).name.endswith(".jsonl")


def test_t1_header_and_footer_have_the_contracts_fields(tmp_path: Path) -> None:
    policies = [{"slot": s, "model_id": f"m{s}", "model_hash": f"h{s}"} for s in ("a", "b")]
    path = record(tmp_path, [asked(0), asked(1)], [asked(2)], header=HEADER | {"policies": policies, "split": 80})
    first, *_, last = raw(path)
    assert {k: first[k] for k in HEADER} == HEADER
    assert first["kind"] == "header"
    assert first["schema_version"] == 2
    assert first["payloads"] is True
    assert first["session_id"] in path.name
    assert first["started_at"] == "2023-11-14T22:13:20.250000Z"
    assert first["redaction"] == {"images": "hash_only"}
    assert first["reflex_version"]
    assert first["policies"] == policies
    assert first["split"] == 80
    assert last == {
        "kind": "footer", "ended_at": "2023-11-14T22:13:20.250000Z", "total_requests": 3, "batches": 2, "dropped": 0,
    }  # fmt: skip
    read = read_journal(path)
    assert (read.header.hash_of("b"), read.header.hash_of("prod")) == ("hb", HEADER["model_hash"])
    assert read.footer is not None
    assert read.footer.total_requests == 3


def test_a_time_that_is_no_number_is_no_null_in_the_file(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    Run(made).batch(asked(0), took=nan)
    assert made.close()
    assert made.path is not None
    (read,) = read_journal(made.path).requests
    assert (read.latency.total_ms, read.latency.batch_ms) == (0.0, 20.0)


def test_t2_a_request_line_has_the_contracts_fields(tmp_path: Path) -> None:
    routing = {"slot": "a", "routing_key": "ep_7", "degraded": False, "cached": True}
    guard = {"clamped": 1, "joints": ["0"], "held": False}
    one = asked(0, routing=routing, guard=guard, deadline_ms=150.0, rtc={"frozen": 3}, executed=4)
    path = record(tmp_path, [one, asked(1)], [asked(2, actions=None)])
    lines = [line for line in raw(path) if line["kind"] == "request"]
    assert [line["seq"] for line in lines] == [0, 1, 2]
    line = lines[0]
    assert line["timestamp"] == "2023-11-14T22:13:21.249000Z"
    assert line["arrival"] == 0.999
    assert {k: line["request"][k] for k in ("instruction", "state", "seed", "image_sha256", "image_b64")} == {
        "instruction": "open the door", "state": [0.5, -0.25], "seed": 2**63, "image_sha256": None, "image_b64": None,
    }  # fmt: skip
    assert (line["request"]["request_id"], line["request"]["episode_id"]) == ("request-0", "ep_7")
    assert line["request"]["executed"] == 4
    assert (line["response"]["num_actions"], line["response"]["action_dim"]) == (2, 2)
    assert line["latency"] == {"total_ms": 21.5, "queue_ms": 1.0, "batch_ms": 20.0}
    assert (line["denoise"], line["mode"], line["cache"], line["deadline"]) == (10, "monolithic", "off", 150.0)
    assert (line["guard"], line["rtc"], line["routing"], line["error"]) == (guard, {"frozen": 3}, routing, None)
    members = ["request-0", "request-1"]
    assert line["batch"] == {"id": 1, "size": 2, "reason": "timeout", "cause": "idle", "members": members}
    assert line["cost"] == {"estimate_ms": 20.0, "measured_ms": 9.75}
    assert line["wire"] == "http"
    assert lines[2]["error"] == {"slug": "queue_full", "message": "no room"}
    assert lines[2]["response"] is None


def test_t2_the_schedule_is_recorded_as_the_scheduler_saw_it(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    refused = Request(id="late", group="prod", client="c", priority=Priority.URGENT, time_limit=0.25, wants=6)
    made(RequestAnswered(1000.126, "prod", "rejected", 503, 0.001, None, asked(9, request_id="late"), 0.026))
    made(RequestRejected(1000.125, refused, QueueFull()))  # a driver's events may come after the answer
    run = Run(made, now=1000.1 + 1e-10)
    run.batch(asked(0), outcome="cancelled")
    assert made.close()
    assert made.path is not None
    read = read_journal(made.path)
    rejected, cancelled = read.requests
    assert rejected.schedule is not None
    assert (rejected.schedule.ticket, rejected.schedule.arrived, rejected.outcome) == (None, 1000.125, "rejected")
    assert (rejected.schedule.priority, rejected.schedule.time_limit, rejected.schedule.wants) == (0, 0.25, 6.0)
    assert cancelled.schedule is not None
    assert cancelled.schedule.arrived == 1000.1 + 1e-10 - 0.001  # to the last bit
    (batch,) = read.batches
    assert (batch.seqs, [m.seq for m in batch.entered], batch.at) == ([0], [0], 1000.1 + 1e-10)
    assert (batch.elapsed, batch.expected, batch.cause) == (0.0195, 0.018, "idle")
    ended = [(None, "rejected", 1000.125), (0, "cancelled", run.now)]
    assert [(e.ticket, e.outcome, e.at) for e in read.ended] == ended


def test_t2_actions_come_back_to_the_last_bit_whatever_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tiny = np.finfo(np.float32).smallest_subnormal
    odd = np.array([[np.nan, np.inf, -np.inf, 0.0], [-0.0, tiny, 3.4e38, 16777216.0]], np.float32)
    wide = (rng.standard_normal((50, 4)) * 10.0 ** rng.integers(-30, 30, (50, 4))).astype(np.float32)
    plain = rng.standard_normal((10, 7)).astype(np.float32)
    sent = [odd, wide, plain, np.zeros((0, 4), np.float32)]
    path = record(tmp_path, [asked(i, actions=a, state=[1.5, float("nan")]) for i, a in enumerate(sent)])
    text = gzip.decompress(path.read_bytes()).decode()
    assert text.count("NaN") == text.count('"NaN"') > 0
    read = read_journal(path)
    for actions, line in zip(sent, read.requests, strict=True):
        assert line.response is not None
        assert line.response.array().tobytes() == actions.tobytes()
    assert read.requests[0].request.state == [1.5, "NaN"]
    assert len(json.dumps(short(plain))) < 0.7 * len(json.dumps(plain.astype(float).tolist()))


def test_the_header_says_how_a_group_was_scheduled() -> None:
    told = info_of(GroupConfig("a", FlushPolicy.by_size(4, 0.01), capacity=7, weight=2.0))
    assert (told.unit, told.budget, told.max_size) == ("seconds", None, 4)
    assert told.flush["max_batch_cost"] is None  # infinite
    assert told.flush["hold_max"] == (0.0, 0.01, 0.01)
    assert told.cost is not None
    assert (told.capacity, told.weight, told.cost.stages) == (7, 2.0, [""])
    assert hardware()["cores"] >= 1


# -- notes and arguments ----------------------------------------------------------------------------------------------


def test_notes_are_kept_apart(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.note("decision", action="split", split=20)
    Run(made).batch(asked(0))
    made.note("outcome", episode_id="ep_7", slot="a", success=True, reward=0.5)
    made.note("shadow", mean=0.25)
    with pytest.raises(ValueError, match="'request' is written by the journal"):
        made.note("request")
    assert made.close()
    assert made.path is not None
    read = read_journal(made.path)
    assert len(read.requests) == 1
    (decision,), (outcome,), (other,) = (read.noted(kind) for kind in ("decision", "outcome", "shadow"))
    assert decision.fields == {"timestamp": "2023-11-14T22:13:20.250000Z", "action": "split", "split": 20}
    assert (outcome.fields["episode_id"], outcome.fields["success"], outcome.fields["reward"]) == ("ep_7", True, 0.5)
    assert other.fields["mean"] == 0.25


def test_notes_beyond_those_kept_for_the_first_request_are_counted(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    for i in range(EARLY + 3):
        made.note("decision", number=i)
    Run(made).batch(asked(0))
    assert made.close()
    assert made.path is not None
    read = read_journal(made.path)
    assert len(read.notes) == EARLY
    assert made.dropped == 3
    assert read.footer is not None
    assert read.footer.dropped == 3


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Recording\.images='some': must be one of full, hash_only, none"):
        recorder(tmp_path, images="some")
    with pytest.raises(ConfigError, match=r"JournalWriter\.capacity=0: must be >= 1"):
        recorder(tmp_path, capacity=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Recording\.directory='.*file/x': cannot be made"):
        recorder(tmp_path / "file" / "x")


@pytest.mark.parametrize("address", ["127.0.0.1", "2001:db8::1"])
def test_a_connection_is_named_in_the_journal_as_in_tables(address: str) -> None:
    made = scheduled(Request(None, client=(address, 2)), None, 0.0)
    assert made.client == client_label(made.client) == f"{address} #2"
