"""T1 to T6 against real servers: what `reflex serve --record DIR` leaves behind, and what can be made of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import io
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import PIL.Image
import pytest

from forked import reflex
from reflex_runtime.cli import main
from reflex_runtime.observe.journal import Journal, JournalError, RequestLine, read_journal
from reflex_runtime.robots import Export
from reflex_runtime.robots.policy.observation import seed_of
from reflex_runtime.version import __version__
from robots.tiny import EMBODIMENT, picture, write_export
from serving.exports import WEIGHTS, write_tiny
from serving.harness import PATIENCE, STATE, Answer, Server, changed
from serving.pair import admin
from serving.requests import busy, marked, queued
from sim.measured import replay_measured
from thinned import thinned

PACKED = {"Content-Type": "application/msgpack", "Accept": "application/json"}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy in two graphs that needs an image and words, with an embodiment whose ranges clamp."""
    embodiment = EMBODIMENT | {"action_ranges": [[0.2, 0.3], [-0.5, 0.5]]}
    return write_export(tmp_path_factory.mktemp("seeing"), "decomposed", embodiment=embodiment)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of a policy, alike but for their names."""
    root = tmp_path_factory.mktemp("versions")
    return write_tiny(root / "v1", model_id="one"), write_tiny(root / "v2", model_id="two", batch=1)


def two(versions: tuple[Path, Path], there: Path, *options: str) -> Server:
    a, b = map(str, versions)
    return Server(a, "--policy-a", a, "--policy-b", b, "--no-rtc", "--record", str(there), *options)


def test_t3_at_sighup_trace_and_recording_go_on_in_new_files(there: Path, tmp_path: Path) -> None:
    export, trace = write_tiny(tmp_path / "v1"), tmp_path / "t.jsonl"
    with Server(export, "--trace", str(trace), "--record", str(there), "--record-no-gzip") as server:
        assert server.act(request_id="one").status == 200
        wait(lambda: any("one" in path.read_text() for path in (there.iterdir() if there.is_dir() else ())))
        server.process.send_signal(signal.SIGHUP)
        wait(lambda: Path(f"{trace}.1").exists() and '"footer"' in Path(f"{trace}.1").read_text())
        wait(lambda: any('"footer"' in path.read_text() for path in there.iterdir()))  # each has a thread that writes
        assert server.act(request_id="two").status == 200
        assert server.stop() == 0
    traced = [[m.id for b in read_journal(path).batches for m in b.members] for path in (Path(f"{trace}.1"), trace)]
    assert traced == [["one"], ["two"]]
    asked = [[r.request.request_id for r in read_journal(path).requests] for path in (Path(f"{trace}.1"), trace)]
    assert asked == [["one"], ["two"]]
    parts = sorted(map(read_journal, there.iterdir()), key=lambda found: found.header.part)
    assert [[line.request.request_id for line in part.requests] for part in parts] == [["one"], ["two"]]


def test_t3_record_max_mb_bounds_a_file(there: Path, tmp_path: Path) -> None:
    sent = base64.b64encode(np.random.default_rng(0).bytes(400_000)).decode()
    seen = {"image": sent, "instruction": "open the door", "state": STATE}
    options = ("--record-images", "full", "--record-no-gzip", "--record-max-mb", "1")
    with Server(write_tiny(tmp_path / "v1"), "--record", str(there), *options) as server:
        for i in range(6):
            server.post(seen | {"request_id": str(i)})
        assert server.stop() == 0
    assert len(list(there.iterdir())) > 1


def only(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def recording(server: Server, directory: Path) -> Journal:
    """Stop the server and read what it wrote."""
    assert server.stop() == 0
    return read_journal(only(directory))


def raw(file: Path) -> list[dict[str, Any]]:
    """The lines as they stand there."""
    data = file.read_bytes()
    text = gzip.decompress(data) if file.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def line_of(found: Journal, request_id: str) -> RequestLine:
    (line,) = [r for r in found.requests if r.request.request_id == request_id]
    return line


def packed(server: Server, **fields: Any) -> Answer:
    return server.ask("POST", "/act", msgpack.packb(fields), PACKED)


def array(values: Any) -> dict[str, Any]:
    """An array as msgpack carries it."""
    kind = {"float32": "<f4", "uint8": "|u1"}[str(values.dtype)]
    return {"dtype": kind, "shape": list(values.shape), "data": values.tobytes()}


def png(seed: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(picture(seed)).save(file, kind)
    return file.getvalue()


def wait(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        changed()


def robots(server: Server, bodies: Sequence[Sequence[dict[str, Any]]]) -> list[Answer]:
    """One connection each, asking again as soon as it is answered."""
    found: list[Answer] = []

    def ask(mine: Sequence[dict[str, Any]]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        for body in mine:
            connection.request("POST", "/act", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            found.append(Answer(response.status, dict(response.getheaders()), response.read()))
        connection.close()

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == sum(map(len, bodies))
    return found


# -- T1 ----------------------------------------------------------------------------------------------------------------


def test_t1_the_file_is_opened_at_the_first_request_and_named_after_it(tiny: Path, there: Path) -> None:
    with Server(tiny, "--record", str(there)) as server:
        assert server.post(b"{").status == 400
        assert server.get("/health").json["recording"] == {
            "recorded": 0, "dropped": 0, "cpu_s": 0.0, "file": None, "error": None,
        }  # fmt: skip
        assert list(there.iterdir()) == []  # made at start-up, so that a wrong path is told then
        before = datetime.now(UTC).replace(microsecond=0)
        assert server.act().status == 200
        found = recording(server, there)
    model_hash = Export.load(tiny).model_hash
    name = re.fullmatch(rf"(\d{{8}}-\d{{6}})-{model_hash}-([0-9a-f-]{{36}})\.jsonl\.gz", found.path.name)
    assert name is not None
    opened = datetime.strptime(name[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    assert before <= opened <= datetime.now(UTC)
    assert name[2] == found.header.session_id


def test_t1_the_header_says_what_was_served(seeing: Path, there: Path) -> None:
    with Server(seeing, "--record", str(there), "--record-no-gzip") as server:
        server.post({})
        server.stop()
    lines = raw(only(there))
    assert only(there).suffix == ".jsonl"
    assert [line["kind"] for line in lines] == ["header", "warm", "request", "footer"]
    header, export = lines[0], Export.load(seeing)
    assert header["schema_version"] == 2
    told = {key: header[key] for key in ("model_hash", "config_hash", "model_type", "export_kind", "embodiment")}
    assert told == {
        "model_hash": export.model_hash, "config_hash": export.config_hash, "model_type": "flow_matching",
        "export_kind": "decomposed", "embodiment": "bench-arm",
    }  # fmt: skip
    robot = {key: header[key] for key in ("control_rate_hz", "state_names", "action_names")}
    assert robot == {key: EMBODIMENT[key] for key in robot}
    assert (header["export_dir"], header["reflex_version"]) == (str(seeing), __version__)
    assert header["hardware"]["cores"] >= 1
    assert header["providers"] == ["CPUExecutionProvider"]
    assert header["redaction"] == {"images": "hash_only"}
    assert header["notes"] == ""
    assert header["policies"] is None
    age = datetime.now(UTC) - datetime.fromisoformat(header["started_at"])
    assert timedelta() < age < timedelta(minutes=5)
    assert lines[3]["total_requests"] == 1
    assert datetime.fromisoformat(lines[3]["ended_at"]) >= datetime.fromisoformat(header["started_at"])


def test_t1_two_policies_are_both_named(versions: tuple[Path, Path], there: Path) -> None:
    with two(versions, there, "--split", "70") as server:
        server.act()
        found = recording(server, there)
    exports = [Export.load(path) for path in versions]
    assert found.header.policies is not None
    assert [(p.slot, p.model_id, p.model_hash) for p in found.header.policies] == [
        ("a", "one", exports[0].model_hash),
        ("b", "two", exports[1].model_hash),
    ]
    assert found.header.split == 70
    assert set(found.groups) == set(found.warm) == {"a", "b"}


def test_t1_a_directory_that_cannot_be_made_is_told_at_start_up(tiny: Path, tmp_path: Path) -> None:
    from serving.harness import refusal

    (tmp_path / "file").write_text("")
    assert f"--record={tmp_path}/file/r: cannot be made" in refusal(tiny, "--record", str(tmp_path / "file" / "r"))


# -- T2 ----------------------------------------------------------------------------------------------------------------


def test_t2_every_field_of_an_answered_request(versions: tuple[Path, Path], there: Path) -> None:
    with two(versions, there) as server:
        asked_at = datetime.now(UTC)
        sent = {
            "request_id": "r1", "episode_id": "ep_abc", "robot_id": "arm 7", "instruction": "öffne", "seed": 5,
            "deadline_ms": 60_000, "executed": 2,
        }  # fmt: skip
        told = server.act(**sent)
        assert told.status == 200
        server.stop()
    line = next(line for line in raw(only(there)) if line["kind"] == "request")
    answer = told.json
    assert line["seq"] == 0
    assert line["request"] == {
        "request_id": "r1", "episode_id": "ep_abc", "robot_id": "arm 7", "instruction": "öffne", "state": STATE,
        "seed": 5, "executed": 2, "past": None, "image_sha256": None, "image_b64": None,
    }  # fmt: skip
    assert np.float32(line["response"]["actions"]).tolist() == np.float32(answer["actions"]).tolist()
    assert (line["response"]["num_actions"], line["response"]["action_dim"]) == (3, 2)
    assert line["latency"]["total_ms"] == answer["timing"]["total_ms"]
    assert line["latency"]["queue_ms"] == pytest.approx(answer["timing"]["queue_ms"], abs=0.002)
    assert line["latency"]["batch_ms"] == pytest.approx(answer["timing"]["batch_ms"], abs=0.002)
    assert (line["denoise"], line["mode"], line["cache"]) == (1, "monolithic", "off")
    assert line["guard"] == answer["guard"] == {"clamped": 0, "joints": [], "held": False}
    assert (line["deadline"], line["rtc"], line["error"]) == (60_000.0, None, None)
    assert line["routing"] == {"slot": "b", "routing_key": "ep_abc", "degraded": False, "cached": False}
    assert (line["slot"], line["outcome"], line["status"]) == ("b", "ok", 200)
    told = [answer["batch"][key] for key in ("id", "size", "reason")]
    assert [line["batch"][key] for key in ("id", "size", "cause")] == told
    assert [line["batch"][key] for key in ("cause", "reason", "members")] == ["idle", "timeout", ["r1"]]
    assert line["cost"]["estimate_ms"] == pytest.approx(answer["batch"]["cost_ms"], abs=0.001)
    assert 0.0 < line["cost"]["measured_ms"] <= answer["timing"]["batch_ms"]
    at = datetime.fromisoformat(line["timestamp"])
    assert asked_at <= at <= asked_at + timedelta(seconds=5)
    assert 0.0 < line["arrival"] < 60.0
    schedule = line["schedule"]
    assert (schedule["ticket"], schedule["client"], schedule["priority"]) == (0, "arm 7", 1)
    assert 30.0 < schedule["time_limit"] <= 60.0


def test_t2_routing_says_how_it_was_found(versions: tuple[Path, Path], there: Path) -> None:
    with two(versions, there) as server:
        keys = [{"episode_id": "ep_xyz"}, {"episode_id": "ep_xyz"}, {"episode_id": "req_42"}, {}]
        for i, sent in enumerate(keys):
            answer = server.act(request_id=f"r{i}", **sent)
            assert answer.headers["x-reflex-policy-slot"] in "ab"
        found = recording(server, there)
    assert [r.seq for r in found.requests] == [0, 1, 2, 3]
    told = [r.routing for r in found.requests]
    assert told[0] == {"slot": "b", "routing_key": "ep_xyz", "degraded": False, "cached": False}
    assert told[1] == {"slot": "b", "routing_key": "ep_xyz", "degraded": False, "cached": True}
    assert told[2] == {"slot": "a", "routing_key": "req_42", "degraded": False, "cached": False}
    assert told[3] is not None
    assert told[3]["degraded"] is True
    assert told[3]["routing_key"].startswith("127.0.0.1:")
    assert [r.slot for r in found.requests] == [r["slot"] for r in told if r]
    assert found.footer is not None
    assert (found.footer.total_requests, found.footer.dropped) == (4, 0)


def test_t2_with_one_policy_there_is_no_routing(tiny: Path, there: Path) -> None:
    with Server(tiny, "--record", str(there)) as server:
        server.act(request_id="plain")
        found = recording(server, there)
    (line,) = found.requests
    assert (line.routing, line.slot) == (None, "prod")
    assert line.request.seed == seed_of("plain")


def test_t2_errors_stand_with_their_slug_and_message(tiny: Path, there: Path) -> None:
    ids = [f"id-{i}" for i in range(20)]
    bad = min(marked("raise", 0.5, ids))
    full, late, gone = [i for i in ids if i not in marked("raise", 0.5, ids)][:3]
    options = ("--record", str(there), "--max-queue", "1", "--deadline-ms", "200000")
    with Server(tiny, *options, "--inject-fault", "prod:raise:0.5", held=True) as server:
        answers = {bad: server.act(request_id=bad), "wrong": server.act(request_id="wrong", state=[1.0])}
        nan = b'{"request_id":"nan","state":[NaN,0]}'
        answers["nan"] = server.post(nan)
        with busy(server) as plug:
            with server.burst([{"state": STATE, "request_id": gone}]) as burst:
                burst.send()
                server.reach(queued(1))
                answers[full] = server.act(request_id=full)
                burst.hang_up([0])
                server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 1)
            answers[late] = server.act(request_id=late, deadline_ms=60)
            server.release()
            assert plug.answers()[0].status == 200
        found = recording(server, there)
    codes = {name: answer.json["error"] for name, answer in answers.items()}
    assert codes == {
        bad: "processor_failed", "wrong": "invalid_request", "nan": "invalid_request", late: "deadline_exceeded",
        full: "queue_full",
    }  # fmt: skip
    for name, answer in answers.items():
        line = line_of(found, name)
        assert line.error is not None
        assert (line.error.slug, line.error.message) == (answer.json["error"], answer.json["message"])
        assert (line.status, line.response) == (answer.status, None)
    outcomes = {r.request.request_id: r.outcome for r in found.requests}
    assert outcomes == {
        bad: "failed", "wrong": "client_error", "nan": "client_error", "plug": "ok", late: "expired",
        full: "rejected", gone: "cancelled",
    }  # fmt: skip
    assert line_of(found, "nan").request.state == ["NaN", 0.0]
    assert line_of(found, late).deadline == 60.0
    assert line_of(found, "plug").deadline == 200_000.0  # what requests are given that bring none
    refused = line_of(found, full).schedule
    assert refused is not None
    assert refused.ticket is None
    assert sorted(e.outcome for e in found.ended) == ["cancelled", "expired", "failed", "rejected"]


def test_t2_what_msgpack_sent_wrong_is_refused_and_recorded(seeing: Path, there: Path) -> None:
    """What cannot be made an array for the policy cannot be made one for the recording either."""
    wrong: dict[str, Any] = {
        "state": {"dtype": "<c8", "shape": [2], "data": b"\0" * 16},
        "image": {"dtype": "|u1", "shape": [2, 2, 3], "data": b"\0"},
    }
    with Server(seeing, "--record", str(there), "--record-images", "full") as server:
        for field, value in wrong.items():
            good: dict[str, Any] = {"image": png(1), "instruction": "open", "state": STATE}
            answer = packed(server, request_id=field, **(good | {field: value}))
            assert (answer.status, answer.json["field"]) == (422, field)
        flat = {"dtype": "|u1", "shape": [12], "data": b"\0" * 12}
        assert packed(server, request_id="flat", image=flat, instruction="open", state=STATE).status == 422
        found = recording(server, there)
    assert [r.outcome for r in found.requests] == ["client_error"] * 3
    assert line_of(found, "state").request.state is None
    assert line_of(found, "image").request.images() == line_of(found, "flat").request.images() == {}


def test_t2_guard_cache_rtc_and_steps_are_those_of_the_answer(seeing: Path, there: Path) -> None:
    with Server(seeing, "--record", str(there), "--rtc", "--rtc-horizon", "3") as server:
        answers = {}
        for i in range(4):
            sent = {"image": array(picture(i // 2)), "instruction": "open the door", "state": array(np.float32(STATE))}
            sent |= {"episode_id": "e", "request_id": f"r{i}", "executed": 1}
            answers[f"r{i}"] = packed(server, **sent).json
        found = recording(server, there)
    assert [a["cache"] for a in answers.values()] == ["miss", "hit", "miss", "hit"]
    assert any(a["guard"]["clamped"] for a in answers.values())
    assert [a["rtc"] is None for a in answers.values()] == [True, False, False, False]
    for name, answer in answers.items():
        line = line_of(found, name)
        assert (line.cache, line.guard, line.rtc) == (answer["cache"], answer["guard"], answer["rtc"])
        assert (line.denoise, line.mode) == (answer["denoising_steps"], "decomposed") == (5, "decomposed")
        assert line.request.state == [float(np.float32(v)) for v in STATE]
        assert line.request.executed == 1
        assert line.response is not None
        assert line.response.array().tolist() == np.float32(answer["actions"]).tolist()


@pytest.mark.parametrize("mode", ["full", "hash_only", "none"])
def test_t3_images_as_sent_as_hashes_or_not_at_all(seeing: Path, there: Path, mode: str) -> None:
    pixels, jpeg = picture(3), png(2, "JPEG")
    with Server(seeing, "--record", str(there), "--record-images", mode) as server:
        good: dict[str, Any] = {"instruction": "open the door", "state": STATE}
        text = base64.b64encode(png(1)).decode()
        url = f"data:image/png;base64,{text}"
        sent: dict[str, dict[str, Any]] = {"json": {"image": text}, "url": {"images": {"front": url}}}
        for name, images in sent.items():
            assert server.post(good | images | {"request_id": name}).status == 200
        assert packed(server, request_id="bytes", image=jpeg, **good).status == 200
        assert packed(server, request_id="array", image=array(pixels), **good).status == 200
        found = recording(server, there)
    assert found.header.redaction == {"images": mode}
    data = {"json": png(1), "url": png(1), "bytes": jpeg, "array": pixels.tobytes()}
    for name, content in data.items():
        asked = line_of(found, name).request
        image = "front" if name == "url" else "image"
        if mode == "none":
            assert asked.hashes() == {}
        else:
            assert asked.hashes()[image] == hashlib.sha256(content).hexdigest()
        if mode != "full":
            assert asked.image_b64 is None
        elif name != "array":
            assert asked.images()[image] == content
        else:
            assert np.asarray(PIL.Image.open(io.BytesIO(asked.images()[image]))).tolist() == pixels.tolist()
    if mode == "hash_only":
        assert line_of(found, "json").request.image_sha256 == hashlib.sha256(png(1)).hexdigest()


# -- T3, T4 ------------------------------------------------------------------------------------------------------------

FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
"""


@pytest.mark.parametrize("how", ["full", "gone"])
def test_t3_a_disk_error_ends_the_recording_and_nothing_else(tiny: Path, there: Path, how: str) -> None:
    options = ("--record", str(there), "--record-no-gzip")
    with Server(tiny, *options, before=FULL if how == "full" else "") as server:
        seen = server.metrics()
        assert seen("reflex_recording_failed") == seen("reflex_recording_dropped_total") == 0
        if how == "gone":
            there.rmdir()
        asked = 0

        def failed() -> bool:
            nonlocal asked
            asked += 1
            assert server.act().status == 200
            return bool(server.get("/health").json["recording"]["error"])

        wait(failed)
        line = server.wait_log("nothing more is written")
        assert ("File too large" if how == "full" else "there is no directory") in line
        assert f"ERROR reflex.observe reflex-record: {there}" in line
        told = server.get("/health")
        assert (told.status, told.json["state"]) == (200, "ready")
        assert ("File too large" if how == "full" else "there is no directory") in told.json["recording"]["error"]
        before = server.metrics()
        assert before("reflex_recording_failed", embodiment="unknown", policy_slot="prod") == 1
        assert all(server.act().status == 200 for _ in range(10))
        lost = server.metrics()("reflex_recording_dropped_total", embodiment="unknown", policy_slot="prod")
        assert lost - before("reflex_recording_dropped_total") == 20  # ten requests, ten batches
        assert server.get("/health").json["recording"]["dropped"] == lost
        assert server.metrics()("reflex_requests_total", outcome="ok") == asked + 10
        assert server.stop() == 0
    if how == "full":
        kept = read_journal(only(there))  # what had been written is still a recording
        assert kept.footer is None


@pytest.mark.parametrize("suffix", thinned([".jsonl", ".jsonl.gz"], [".jsonl.gz"]))
def test_t4_after_kill_9_all_but_the_torn_line_is_read(tiny: Path, there: Path, suffix: str) -> None:
    plain = ("--record-no-gzip",) if suffix == ".jsonl" else ()
    with Server(tiny, "--record", str(there), *plain) as server:
        for i in range(200):
            assert server.act(request_id=f"r{i}").status == 200
        wait(lambda: len(read_journal(only(there)).requests) == 200)  # while it is being written
        with beside(server):
            wait(lambda: len(read_journal(only(there)).requests) > 300)
            server.kill()
            server.process.wait()
    file = only(there)
    assert file.name.endswith(suffix)
    found = read_journal(file)
    assert found.footer is None
    assert [r.seq for r in found.requests] == list(range(len(found.requests)))
    assert len(found.requests) > 300
    file.write_bytes(file.read_bytes()[:-25])
    cut = read_journal(file)
    assert cut.torn
    lines = [len(f.requests) + len(f.batches) for f in (found, cut)]
    assert lines[0] - (1 if suffix == ".jsonl" else 60) <= lines[1] < lines[0]
    if suffix == ".jsonl":
        with file.open("ab") as more:
            more.write(b"\n{}\n")
        with pytest.raises(JournalError, match=r", line \d+: "):
            read_journal(file)


@contextmanager
def beside(server: Server) -> Iterator[None]:
    """Requests without end, until the server is gone."""

    def ask() -> None:
        while True:
            try:
                server.act()
            except (OSError, http.client.HTTPException):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        server.kill()
        thread.join()


def test_t1_after_sigterm_the_footer_counts_every_request(tiny: Path, there: Path) -> None:
    names = {"plug", *(f"r{i}" for i in range(40))}
    with Server(tiny, "--record", str(there), held=True) as server, busy(server) as plug:
        with server.burst([{"state": STATE, "request_id": f"r{i}"} for i in range(40)]) as burst:
            burst.send()
            server.reach(queued(40))
            server.process.terminate()  # what is queued is answered, and recorded
            server.wait_log("draining: 41 requests")
            server.release()
            assert {a.status for a in (*plug.answers(), *burst.answers())} == {200}
        assert server.wait() == 0
    found = read_journal(only(there))
    assert found.footer is not None
    assert (found.footer.total_requests, found.footer.dropped, found.torn) == (41, 0, False)
    assert {r.request.request_id for r in found.requests} == names
    for line in found.requests:  # everybody is told the same of their company
        assert line.batch is not None
        together = {r.request.request_id for r in found.requests if r.batch and r.batch.id == line.batch.id}
        assert set(line.batch.members) == together
        assert line.batch.size == len(together)


# -- T5, T6 ------------------------------------------------------------------------------------------------------------


def pictured(i: int, n: int = 12) -> list[dict[str, Any]]:
    """What one robot asks: every second picture is the one before."""
    return [
        {
            "image": base64.b64encode(png(100 * i + k // 2)).decode(), "instruction": "open the door",
            "state": [0.1 * i, -0.2 * k], "episode_id": f"episode-{i}", "request_id": f"request-{i}-{k}", "executed": 1,
        }
        for k in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("options", thinned([(), ("--rtc", "--adaptive-steps")], [("--rtc", "--adaptive-steps")]))
def test_t5_a_run_with_images_replayed_in_its_batches_is_equal_to_the_last_bit(
    seeing: Path, there: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    with Server(seeing, "--record", str(there), "--record-images", "full", *options) as server:
        answers = robots(server, [pictured(i) for i in range(6)])
        assert {a.status for a in answers} == {200}
        server.stop()
    file, out = only(there), tmp_path / "out.json"
    assert max(len(b.members) for b in read_journal(file).batches) > 1
    done = reflex(
        "replay", file, "--model", seeing, "--compose", "recorded", "--diff", "actions", "--fail-on", "actions",
        "--output", out,
    )  # fmt: skip
    assert done.returncode == 0, done
    told = json.loads(out.read_text())["all"]["actions"]
    assert told["equal"] == told["compared"] == told["composed"] == 72, done.stdout


def test_t5_a_changed_model_is_told_and_exits_3(seeing: Path, there: Path, tmp_path: Path) -> None:
    with Server(seeing, "--record", str(there), "--record-images", "full") as server:
        robots(server, [pictured(0, 4)])
        server.stop()
    changed = write_export(tmp_path / "changed", "decomposed", lambda c: c["action_norm"].update(std=[0.501, 0.125]))
    call = ("replay", only(there), "--model", changed, "--compose", "recorded")
    assert reflex(*call).returncode == 0
    done = reflex(*call, "--fail-on", "actions")
    assert done.returncode == 3, done
    assert "different in actions" in done.stderr
    hashes = reflex("replay", there / "missing", "--model", changed)
    assert hashes.returncode == 2


def test_t5_without_images_the_flag_that_is_missing_is_named(seeing: Path, there: Path) -> None:
    with Server(seeing, "--record", str(there)) as server:
        robots(server, [pictured(0, 2)])
        server.stop()
    done = reflex("replay", only(there), "--model", seeing)
    assert done.returncode == 2
    assert "--record-images full" in done.stderr


def stated(i: int, n: int) -> list[dict[str, Any]]:
    return [{"state": [0.1 * i, 0.01 * k], "episode_id": f"episode-{i}"} for k in range(n)]


def test_t6_the_schedule_of_two_slots_with_holds_is_the_same_again(
    versions: tuple[Path, Path], there: Path, tmp_path: Path
) -> None:
    # Seven robots of eight ask a, and the eighth soon ends: while its batch runs they are back, and nobody is waited
    # for. Whether the seven come back one by one is chance, and so there are some tries.
    options = ("--split", "88", "--inject-latency-ms", "100", "--batch-timeout-ms", "200")
    for attempt in range(6):
        with two(versions, there / str(attempt), *options) as server:
            answers = robots(server, [stated(i, 3 if i == 3 else 12) for i in range(8)])
            assert {a.status for a in answers} == {200}
            server.stop()
        recording = only(there / str(attempt))
        found = read_journal(recording)
        assert {b.group for b in found.batches} == {"a", "b"}
        if any(b.looked for b in found.batches):
            break
    assert any(b.looked for b in found.batches)  # it did hold
    out = tmp_path / "out.json"
    done = reflex("replay", recording, "--schedule", "--max-batch-cost-ms", "50", "--output", out)
    assert done.returncode == 0, done
    told = json.loads(out.read_text())
    again, n = replay_measured(found), len(found.batches)
    assert (again.same, again.same_cause, again.early, again.unknown, again.late) == (n, n, 0, 0, 0.0)
    assert list(told["reports"]) == ["recorded", "replayed", "50 ms"]


def test_t6_denoise_steps_deadlines_and_hang_ups_are_the_same_again(seeing: Path, there: Path, tmp_path: Path) -> None:
    with Server(seeing, "--record", str(there), "--inject-latency-ms", "20", "--max-batch-size", "3") as server:
        for prepared in count(5, 5):  # until they leave in time: on a busy machine all may have been answered
            with server.burst([pictured(i, 1)[0] for i in range(10, 15)]) as leaving:
                leaving.send()
                server.reach(lambda m, n=prepared: m("reflex_prepare_seconds_count") == n)
                leaving.hang_up([0, 4])
                leaving.answers([1, 2, 3])
            seen = server.reach(lambda m: m("reflex_in_flight_requests") == 0)
            if seen("reflex_requests_total", outcome="cancelled"):
                break
        late = [[body | {"deadline_ms": 150} for body in pictured(i, 6)] for i in (4, 5)]
        robots(server, [pictured(i, 6) for i in range(4)] + late)
        server.stop()
    found = read_journal(only(there))
    outcomes = {r.outcome for r in found.requests}
    assert outcomes >= {"ok", "cancelled"}
    assert outcomes & {"expired", "shed", "rejected"}
    assert "cancelled" in {e.outcome for e in found.ended}
    again = replay_measured(found)
    assert (again.same, again.same_cause, again.early) == (len(found.batches), len(found.batches), 0)


def test_t5_answers_of_the_policies_before_and_after_an_exchange_are_not_mixed(
    there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recording over `/admin/load`: the model is compared with what itself answered, or with what is chosen."""
    old, new, other = (
        write_tiny(tmp_path / name, weights=(times * WEIGHTS).astype(np.float32))
        for name, times in (("v1", 1), ("v2", 2), ("v3", 3))
    )
    with Server(old, "--record", str(there)) as server:
        for i in range(5):
            if i == 3:
                assert admin(server, "load", slot="prod", path=str(new)).status == 200
            assert server.act(request_id=str(i)).status == 200
        found = recording(server, there)
    hashes = [Export.load(path).model_hash for path in (old, new)]
    assert [line.model_hash for line in found.requests] == [hashes[0]] * 3 + [hashes[1]] * 2
    for path, n in ((old, 3), (new, 2)):
        for how in ("alone", "recorded"):
            out = tmp_path / "out.json"
            command = ["replay", str(only(there)), "--model", str(path), "--compose", how, "--output", str(out)]
            assert main([*command, "--fail-on", "actions"]) == 0
            told = json.loads(out.read_text())
            assert (told["all"]["requests"], told["all"]["actions"]["close"]) == (n, n)
            assert told["left_out"] == {"answered by another model": 5 - n}
    capsys.readouterr()
    assert main(["replay", str(only(there)), "--model", str(other)]) == 2
    line = capsys.readouterr().err
    assert "--recorded-by" in line
    assert all(f"{found} (" in line for found in hashes)
    command = ["replay", str(only(there)), "--model", str(other), "--recorded-by", hashes[1]]
    assert main([*command, "--fail-on", "actions"]) == 3
    assert "2 replayed" in capsys.readouterr().out
