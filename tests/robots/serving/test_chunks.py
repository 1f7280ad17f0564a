"""E2 and E3 over HTTP: what reaches into a chunk of actions shows in its answer, in the trace and in the metrics."""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from reflex_runtime.demo import POLICY
from reflex_runtime.observe.journal import BatchLine
from robots.bundled import V1
from robots.policy.test_chunks import _steady_export
from robots.tiny import EMBODIMENT, picture, write_export
from serving.exports import write_tiny
from serving.harness import STATE, Server, refusal
from serving.requests import busy, marked, observe, traced

CHUNK = 16  # of the bundled policy
HZ = 2.0  # of `slow`: a chunk lasts 8 s, long enough for three answers of a busy machine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled policy at `HZ`."""
    export = Path(shutil.copytree(POLICY, tmp_path_factory.mktemp("slow") / "slow"))
    robot = json.loads((export / "embodiment.json").read_text())
    (export / "embodiment.json").write_text(json.dumps(robot | {"control_rate_hz": HZ}))
    return export


def continuing(schedule: str, horizon: int, *options: str, export: Path | None = None) -> Server:
    """A policy in two graphs, the bundled one unless said, with --rtc."""
    rtc = ("--rtc", "--rtc-schedule", schedule, "--rtc-horizon", str(horizon))
    return Server(export or POLICY, *rtc, *options)


def actions(answer: Any) -> NDArray[np.float32]:
    return np.array(answer["actions"], np.float32)


def noted(batches: list[BatchLine], name: str) -> float:
    """The sum of a note over all batches."""
    return sum(batch.notes.get(name, 0) for batch in batches)


def close(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.abs(a - b).max() < 1e-4)


# -- E2 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "horizon"), [("ONES", 16), ("ONES", 5), ("LINEAR", 10), ("EXP", 10), ("ZEROS", 9)]
)
def test_e2_the_next_chunk_continues_the_last_and_the_answer_says_how(
    schedule: str, horizon: int, file: Path, slow: Path
) -> None:
    with continuing(schedule, horizon, "--inject-latency-ms", "8", "--trace", str(file), export=slow) as server:
        first = observe(server, 10)
        second = observe(server, 10, executed=4, seed=None)
        alone = observe(server, 10, episode="another", seed=2)
        assert server.metrics()("reflex_rtc_total", policy_slot="prod") == 1
        batches = traced(server, file)
    assert first["rtc"] is alone["rtc"] is None
    told = second["rtc"]
    assert 48.0 < told["delay_ms"] <= first["timing"]["total_ms"]  # a prefix and five steps of 8 ms each
    overlap = CHUNK - 4
    delay = math.ceil(told["delay_ms"] / 1e3 * HZ)
    frozen = min(delay, overlap)
    within = min(frozen, horizon)
    assert told == {
        "executed": 4, "overlap": overlap, "frozen": frozen if schedule == "ONES" else within,
        "delay": delay, "delay_ms": told["delay_ms"], "horizon": horizon, "schedule": schedule,
    }  # fmt: skip
    kept = horizon if schedule == "ONES" else within
    tail = actions(first)[4:]
    assert close(actions(second)[: min(kept, overlap)], tail[: min(kept, overlap)])
    assert not close(actions(second), actions(alone))
    if schedule in ("LINEAR", "EXP"):  # then it falls: each place is drawn to the old chunk, the nearer the more
        pulled = np.abs(actions(second)[:overlap] - tail).max(axis=1)
        free = np.abs(actions(alone)[:overlap] - tail).max(axis=1)
        assert pulled[within] < free[within]
    assert [b.notes["rtc"] for b in batches if "rtc" in b.notes] == [1]
    assert next(b for b in batches if "rtc" in b.notes).members[0].outcome == "done"


def test_e2_another_horizon_gives_another_chunk() -> None:
    answers = []
    for horizon in (3, 12):
        with continuing("LINEAR", horizon) as server:
            observe(server, 10)
            answers.append(observe(server, 10, executed=2, seed=2))
    near, far = answers
    assert (near["rtc"]["horizon"], far["rtc"]["horizon"]) == (3, 12)
    assert not close(actions(near), actions(far))


def test_e2_the_request_may_say_how_many_actions_were_executed() -> None:
    with continuing("ONES", CHUNK) as server:
        last = observe(server, 10)
        for executed in (0, 3, 15):
            answer = observe(server, 10, executed=executed, seed=executed + 5)
            assert answer["rtc"]["executed"] == executed
            assert answer["rtc"]["overlap"] == CHUNK - executed
            assert close(actions(answer)[: CHUNK - executed], actions(last)[executed:])
            last = answer
        assert observe(server, 10, executed=16)["rtc"] is None  # nothing is left of it
        wrong = server.act(executed=-1)
        assert (wrong.status, wrong.json["field"]) == (422, "executed")


def test_e2_without_a_word_they_are_counted_by_the_control_rate(slow: Path) -> None:
    with continuing("ONES", CHUNK, "--inject-latency-ms", "90", export=slow) as server:
        observe(server, 10)
        meanwhile = observe(server, 10, episode="clock")["timing"]["total_ms"]  # the first robot executes meanwhile
        answer = observe(server, 10)
    assert 1 <= math.floor(meanwhile / 1e3 * HZ) <= answer["rtc"]["executed"] < CHUNK


def test_e2_nothing_is_carried_over_between_episodes_or_without_one() -> None:
    with continuing("ONES", CHUNK) as server:
        observe(server, 10, episode="one")
        other = observe(server, 10, episode="two", executed=4)
        nobody = [observe(server, 10, episode=None, executed=4) for _ in range(2)]
        assert observe(server, 10, episode="one", executed=4)["rtc"] is not None
        assert server.metrics()("reflex_rtc_total") == 1
    assert other["rtc"] is nobody[0]["rtc"] is nobody[1]["rtc"] is None
    with Server(POLICY) as plain:
        observe(plain, 10, episode="one")
        assert observe(plain, 10, episode="two", executed=4)["actions"] == other["actions"]


def test_e2_two_slots_keep_their_own_tails_and_a_moved_episode_begins_anew(file: Path) -> None:
    a, b = str(V1), str(POLICY)
    options = ("--rtc", "--rtc-per-episode", "--rtc-schedule", "ONES", "--rtc-horizon", "16", "--trace", str(file))
    with Server(a, "--policy-a", a, "--policy-b", b, *options) as server:
        episodes = {"a": "req_42", "b": "ep_xyz"}  # V2: buckets 20 and 77
        for slot, episode in episodes.items():
            first = observe(server, 10, episode=episode)
            second = observe(server, 10, episode=episode, executed=4, seed=2)
            assert second["rtc"]["executed"] == 4
            assert close(actions(second)[:12], actions(first)[4:])
            assert server.metrics()("reflex_rtc_total", policy_slot=slot) == 1
        assert server.ask("POST", "/admin/rollback", b"{}").status == 200
        moved = observe(server, 10, episode="ep_xyz", executed=4)
        assert (moved["rtc"], moved["policy_changed"]) == (None, True)
        assert observe(server, 10, episode="ep_xyz", executed=4)["rtc"] is not None  # its new slot has its own
        batches = traced(server, file)
    assert [batch.group for batch in batches if "rtc" in batch.notes] == ["a", "b", "a"]


@pytest.mark.parametrize("flag", ["--rtc", "--adaptive-steps"])
def test_e2_e3_a_monolithic_export_is_refused_before_the_port_opens(flag: str, tiny: Path) -> None:
    why = "only decomposed policies denoise step by step"
    assert refusal(tiny, flag).endswith(f"{flag}: {tiny} is monolithic, and {why}; leave {flag} out")


def test_e2_options_out_of_range_are_one_line(tiny: Path) -> None:
    assert "--rtc-schedule=SIN: must be one of ZEROS, ONES, LINEAR, EXP" in refusal(tiny, "--rtc-schedule", "SIN")
    assert "--rtc-horizon=0: must be in [1, 1000]" in refusal(tiny, "--rtc-horizon", "0")


# -- E3 ----------------------------------------------------------------------------------------------------------------


def seen(**more: Any) -> dict[str, Any]:
    """A request to an export of `policies.tiny`."""
    image = io.BytesIO()
    PIL.Image.fromarray(picture(1)).save(image, "PNG")
    sent = {"image": base64.b64encode(image.getvalue()).decode(), "instruction": "open the door", "state": STATE}
    return sent | more


def test_e3_adaptive_steps_stop_where_the_velocity_is_steady(tmp_path: Path, file: Path) -> None:
    for name, curved, steps in (("steady", False, 2), ("curved", True, 5)):
        export = _steady_export(tmp_path / name, curved)
        with Server(export, "--adaptive-steps", "--trace", str(file)) as server:
            answer = server.post(seen()).json
            assert answer["denoising_steps"] == steps
            moved = server.metrics()
            batches = traced(server, file)
        assert moved("reflex_denoise_steps_total", policy_slot="prod") == steps
        assert moved("reflex_denoise_steps_spared_total", policy_slot="prod") == 5 - steps
        assert [b.stage for b in batches] == ["prefix"] + ["denoise"] * steps
        assert noted(batches, "steps_spared") == 5 - steps
        assert batches[-1].members[0].outcome == "done"


def test_e3_deadline_ms_shows_in_the_code_the_trace_and_the_outcome(tiny: Path, file: Path) -> None:
    with Server(tiny, "--deadline-ms", "60000", "--trace", str(file), held=True) as server:
        with busy(server), server.burst([{"state": STATE, "request_id": "brief", "deadline_ms": 100}]) as burst:
            burst.send()
            (late,) = burst.answers()
            server.release()
        assert server.act(request_id="own", deadline_ms=30_000).status == 200
        moved = server.metrics()
        batches = traced(server, file)
    assert (late.status, late.code) == (504, "deadline_exceeded")
    assert moved("reflex_requests_total", outcome="expired") == 1
    limits = {m.id: m.limit for b in batches for m in b.members}
    assert "brief" not in limits  # it was never computed
    assert {name: math.ceil(limit / 30.0) for name, limit in limits.items()} == {"own": 1, "plug": 2}  # what was left


def test_e3_without_a_deadline_the_trace_says_none(tiny: Path, file: Path) -> None:
    with Server(tiny, "--trace", str(file)) as server:
        server.act()
        batches = traced(server, file)
    assert batches[0].members[0].limit is None


def test_e3_injected_latency_shows_in_the_answer_the_trace_and_the_metrics(tiny: Path, file: Path) -> None:
    with Server(tiny, "--inject-latency-ms", "30", "--trace", str(file)) as server:
        answers = [server.act().json for _ in range(3)]
        moved = server.metrics()
        batches = traced(server, file)
    assert all(a["injected"] == {"latency_ms": 30.0} and a["timing"]["batch_ms"] >= 30.0 for a in answers)
    assert [b.notes["injected_ms"] for b in batches] == [30.0] * 3
    assert all(b.elapsed >= 0.030 for b in batches)
    assert moved("reflex_injected_latency_seconds_total", policy_slot="prod") == pytest.approx(0.09)


def test_e3_a_repeated_call_is_not_counted_again(tmp_path: Path, file: Path) -> None:
    """One bad item of a batch: its members are called several times, and the guard sees each of the others once."""
    ids = [f"id-{i}" for i in range(40)]
    bad = min(marked("raise", 0.05, [f"id-{i}" for i in range(1000)]))
    fine = [i for i in ids if i not in marked("raise", 0.05, ids)][:4]
    export = write_tiny(tmp_path / "narrow", embodiment="embodiment.json")
    (export / "embodiment.json").write_text(json.dumps(EMBODIMENT | {"action_ranges": [[0.0, 0.01], [-1.0, 1.0]]}))
    options = ("--inject-fault", "prod:raise:0.05", "--trace", str(file))
    with Server(export, *options, held=True) as server:
        with busy(server):
            answers = server.behind([{"state": STATE, "request_id": i} for i in (*fine[:2], bad, *fine[2:])])
        moved = server.metrics()
        batches = traced(server, file)
    assert [a.status for a in answers] == [200, 200, 500, 200, 200]
    assert {m.outcome for m in batches[1].members} == {"apart"}
    assert "clamped" not in batches[1].notes
    assert sum(b.notes.get("clamped", 0) for b in batches[2:]) == 4
    assert moved("reflex_guard_total", result="clamped") == noted(batches, "clamped") == 5


def test_e3_the_guard_clamps_and_reports_it(tmp_path: Path, file: Path) -> None:
    embodiment = EMBODIMENT | {"action_ranges": [[0.2, 0.3], [-0.5, 0.5]]}
    for kind in ("monolithic", "decomposed"):
        export = write_export(tmp_path / kind, kind, embodiment=embodiment)
        with Server(export, "--trace", str(file)) as server:
            answer = server.post(seen()).json
            moved = server.metrics()
            batches = traced(server, file)
        assert answer["guard"]["clamped"] >= 1
        assert (answer["guard"]["joints"], answer["guard"]["held"]) == (["shoulder"], False)
        assert all(np.float32(0.2) <= np.float32(row[0]) <= np.float32(0.3) for row in answer["actions"])
        assert noted(batches, "clamped") == 1
        counts = {r: moved("reflex_guard_total", result=r, policy_slot="prod") for r in ("clamped", "held", "refused")}
        assert counts == {"clamped": 1, "held": 0, "refused": 0}


@pytest.mark.parametrize("on_bad_action", ["error", "hold"])
def test_e3_bad_actions_show_in_the_answer_the_trace_and_the_metrics(
    tiny: Path, file: Path, on_bad_action: str
) -> None:
    ids = [f"id-{i}" for i in range(40)]
    bad = sorted(marked("nan", 0.2, ids))
    good = min(i for i in ids if i not in bad)
    options = ("--inject-fault", "prod:nan:0.2", "--on-bad-action", on_bad_action, "--trace", str(file))
    with Server(tiny, *options) as server:
        first = server.act(request_id=good, episode_id="e").json
        second = server.act(request_id=bad[0], episode_id="e")
        nothing = server.act(request_id=bad[1], episode_id="new")  # no good action to hold
        moved = server.metrics()
        batches = traced(server, file)
    assert first["guard"] == {"clamped": 0, "joints": [], "held": False}
    assert (nothing.status, nothing.code) == (500, "processor_failed")
    held = int(on_bad_action == "hold")
    if held:
        assert second.json["guard"] == {"clamped": 6, "joints": ["0", "1"], "held": True}
        assert second.json["actions"] == [first["actions"][-1]] * 3
    else:
        assert (second.status, second.code) == (500, "processor_failed")
    assert (noted(batches, "held"), noted(batches, "refused")) == (held, 2 - held)
    assert moved("reflex_guard_total", result="held", policy_slot="prod") == held
    assert moved("reflex_guard_total", result="refused", policy_slot="prod") == 2 - held
    assert moved("reflex_requests_total", outcome="failed") == 2 - held
