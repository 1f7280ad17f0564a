"""Model replay: real recordings of real policies, run again alone and in their recorded batches."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import POLICY
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.observe.journal_writer import hardware
from reflex_runtime.robots import Policy, load_policy, served_by
from reflex_runtime.robots.analysis.replay import DIFFS, ModelReplay, ReplayedRequest, distance, replay_model
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.run.processor import Processor
from robots.bundled import V1
from robots.tiny import picture, write_export

from .recorded import Served, serve

EACH = 8  # requests of one caller


def callers(n: int, slots: Sequence[str] = ("prod",), **changes: Any) -> list[Callable[[Served], Awaitable[None]]]:
    """Robots that ask again as soon as they are answered; every second picture is the one before."""

    def one(i: int) -> Callable[[Served], Awaitable[None]]:
        async def ask(served: Served) -> None:
            for k in range(EACH):
                fields = {
                    "images": {"image": picture(100 * i + k // 2, 9, 7)},
                    "instruction": "open the door",
                    "state": np.array([0.1 * i, -0.2 * k], np.float32),
                    "episode_id": f"episode-{i}",
                    "request_id": f"request-{i}-{k}",
                }
                await served.ask(slots[i % len(slots)], **(fields | changes))

        return ask

    return [one(i) for i in range(n)]


class Around(Processor):
    """A processor around another one, on the same thread as any other."""

    repeatable = True

    def __init__(self, inner: Processor) -> None:
        self._inner = inner

    def start(self) -> None:
        self._inner.start()

    def stop(self) -> None:
        self._inner.stop()

    def drop(self, tickets: Any) -> None:
        self._inner.drop(tickets)


class Slow(Around):
    """Each batch takes so long that others ask meanwhile."""

    def run(self, batch: Batch) -> Sequence[Any]:
        threading.Event().wait(0.005)
        return self._inner.run(batch)


class Company(Around):
    """Answers depend on who was in every batch on the way, and where: as kernels of another size round differently."""

    def __init__(self, inner: Processor) -> None:
        super().__init__(inner)
        self._met: dict[str, float] = {}

    def run(self, batch: Batch) -> Sequence[Any]:
        names = [ticket.id for ticket in batch.grants]
        results = []
        for place, (name, result) in enumerate(zip(names, self._inner.run(batch), strict=True)):
            mine = sum(2.0 ** -(1 + len(other) + i) for i, other in enumerate(names)) + place + 0.1 * len(batch.stage)
            self._met[name] = 1.5 * self._met.get(name, 0.0) + mine + 0.01 * sum(map(ord, "".join(names))) % 7
            if isinstance(result, Done):
                chunk = result.value
                result = Done(replace(chunk, actions=chunk.actions + np.float32(1e-3 * self._met.pop(name))))
            results.append(result)
        return results


def record(
    directory: Path, export: Path, kind: str = "plain", slots: Sequence[str] = ("prod",), n: int = 6, **options: Any
) -> Path:
    """A recorded run of an export; kind `company` makes answers depend on the batches, `slow` lets these take time."""
    policies = [load_policy(export, slot) for slot in slots]
    served: dict[str, Processor] = {p.slot: served_by(p) for p in policies}
    if kind != "plain":
        served = {slot: (Company if kind == "company" else Slow)(inner) for slot, inner in served.items()}
    return serve(Served(directory, policies, processors=served, **options), *callers(n, slots))


def again(path: Path, export: Path, kind: str = "plain", **options: Any) -> ModelReplay:
    def make(slot: str) -> tuple[Policy, Processor]:
        policy = load_policy(export, slot)
        return policy, Company(served_by(policy)) if kind == "company" else served_by(policy)

    return replay_model(read_journal(path), make, **options)


@pytest.fixture(scope="module", params=["monolithic", "decomposed"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("export") / request.param, request.param)


# -- in the recorded batches -------------------------------------------------------------------------------------------


def test_t5_composed_as_recorded_the_answers_are_equal_to_the_last_bit(tmp_path: Path, tiny: Path) -> None:
    """The answers tell who was in every batch on the way: alone they differ, in the recorded batches not by a bit."""
    path = record(tmp_path, tiny, "company")
    recording = read_journal(path)
    assert max(len(b.members) for b in recording.batches) > 1
    replay = again(path, tiny, "company", compose="recorded")
    assert len(replay.items) == 6 * EACH
    assert all(item.equal and item.composed and item.max_abs == 0.0 for item in replay.items)
    assert not replay.failed("actions")
    assert not replay.failed("cache")
    assert {item.cache for item in replay.items} == ({"hit", "miss"} if "decomposed" in tiny.name else {"off"})
    assert len(replay.timed) == len(recording.batches)
    alone = again(path, tiny, "company", compose="alone")
    assert sum(item.equal for item in alone.items) < 6 * EACH


def test_t5_requests_that_joined_at_different_steps_are_composed_again(tmp_path: Path) -> None:
    """The bundled policy in two graphs. A second robot asks while the first is between two steps: every denoise batch
    waits until it has."""
    export = V1
    policy = load_policy(export)
    held = Held(Company(served_by(policy)))

    def sent(i: int, k: int) -> dict[str, Any]:
        return {
            "images": {"image": picture(100 * i + k // 2, 64, 64)}, "instruction": "open the door",
            "state": [0.1 * i, 0.2, 0.3, 0.4], "episode_id": f"episode-{i}", "request_id": f"request-{i}-{k}",
        }  # fmt: skip

    async def first(served: Served) -> None:
        held.loop = asyncio.get_running_loop()
        for k in range(EACH):
            await served.ask(**sent(0, k))
        held.over()

    async def second(served: Served) -> None:
        asking = []
        for k in range(EACH):
            await held.stepping.wait()
            asking.append(asyncio.create_task(served.ask(**sent(1, k))))
            await asyncio.sleep(0)  # it is submitted now
            held.go_on()
        held.over()
        await asyncio.gather(*asking)

    path = serve(Served(tmp_path, [policy], processors={"prod": held}), first, second)
    recording = read_journal(path)
    joined = [
        b for b in recording.batches
        if b.stage == "denoise" and len({_steps(recording, b, m) for m in b.seqs}) > 1
    ]  # fmt: skip
    assert joined, "no request joined another between its steps: the run proves nothing"
    replay = again(path, export, "company", compose="recorded")
    assert [item.equal and item.composed for item in replay.items] == [True] * 2 * EACH


class Held(Around):
    """Every denoise batch waits, before it runs, until the test says `go_on`."""

    def __init__(self, inner: Processor) -> None:
        super().__init__(inner)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stepping = asyncio.Event()
        self._go, self._over = threading.Event(), False

    def run(self, batch: Batch) -> Sequence[Any]:
        if batch.stage == "denoise" and not self._over:
            assert self.loop is not None
            self.loop.call_soon_threadsafe(self.stepping.set)
            assert self._go.wait(20.0)
            self._go.clear()
        return self._inner.run(batch)

    def go_on(self) -> None:
        self.stepping.clear()
        self._go.set()

    def over(self) -> None:
        self._over = True
        self._go.set()


def _steps(recording: Any, batch: Any, member: int) -> int:
    """How many steps the member has behind it."""
    return sum(member in b.seqs and b.at < batch.at and b.stage == "denoise" for b in recording.batches)


def test_t5_steps_that_were_spared_are_spared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.robots.policy.decomposed.STEADY", 0.5)
    export = write_export(tmp_path / "export", "decomposed")
    path = serve(Served(tmp_path / "r", [load_policy(export, adaptive=True)]), *callers(4))
    assert {line.denoise for line in read_journal(path).requests} & {2, 3, 4}
    for compose in ("recorded", "alone"):
        assert all(item.equal for item in again(path, export, compose=compose).items), compose


def test_t5_a_prefix_of_the_batch_that_was_running_is_there_for_who_hit_it(tmp_path: Path) -> None:
    """The cache is filled before a batch has ended: a request may hit what a batch put there that still ran."""
    export = write_export(tmp_path / "export", "decomposed")
    path = record(tmp_path, export, "company")
    recording = read_journal(path)
    hit = next(line for line in recording.requests if line.cache == "hit")
    miss = next(
        line for line in recording.requests
        if line.request.episode_id == hit.request.episode_id and line.request.image_sha256 == hit.request.image_sha256
    )  # fmt: skip
    assert miss.schedule is not None
    assert hit.schedule is not None
    ran = next(b for b in recording.batches if miss.schedule.ticket in b.seqs)
    assert (miss.cache, ran.stage) == ("miss", "prefix")
    hit.schedule.arrived = 0.5 * (ran.at + ran.finished)

    def make(slot: str) -> tuple[Policy, Processor]:
        policy = load_policy(export, slot)
        return policy, Company(served_by(policy))

    assert all(item.equal for item in replay_model(recording, make, compose="recorded").items)


def test_t5_carried_over_chunks_are_carried_over_again(tmp_path: Path) -> None:
    export = write_export(tmp_path / "export", "decomposed")

    async def robot(served: Served) -> None:
        for k in range(EACH):
            await served.ask(
                images={"image": picture(k)}, instruction="open the door", state=[0.1, 0.2 * k],
                episode_id="episode", request_id=f"request-{k}", executed=None if k % 3 else 1,
            )  # fmt: skip

    policy = load_policy(export, rtc=Rtc("LINEAR", 3))
    path = serve(Served(tmp_path / "r", [policy]), robot)
    recording = read_journal(path)
    assert sum(line.rtc is not None for line in recording.requests) >= 2
    for compose in ("recorded", "alone"):
        replay = again(path, export, compose=compose)
        assert [item.equal for item in replay.items] == [True] * EACH, compose


def test_t5_what_lacks_a_companion_is_told_and_not_called_equal(tmp_path: Path, tiny: Path) -> None:
    path = record(tmp_path, tiny, "company", gzip=False)
    lines = path.read_bytes().splitlines(keepends=True)
    batch = next(json.loads(line) for line in lines if b'"kind":"batch"' in line and json.loads(line)["members"][1:])
    lost = batch["members"][0]["seq"]
    kept = [line for line in lines if f'"ticket":{lost},"arrived"'.encode() not in line]
    assert len(kept) == len(lines) - 1
    path.write_bytes(b"".join(kept))
    replay = again(path, tiny, "company", compose="recorded")
    apart = [item for item in replay.items if not item.composed]
    assert apart
    assert len(apart) < len(replay.items)
    assert all(item.equal for item in replay.items if item.composed)


# -- each alone --------------------------------------------------------------------------------------------------------


def test_t5_another_model_differs_item_by_item(tmp_path: Path) -> None:
    v1, v2 = V1, POLICY
    policy = load_policy(v1)
    asks = callers(2, state=[0.1, 0.2, 0.3, 0.4])
    path = serve(Served(tmp_path, [policy]), *asks)
    same, other = again(path, v1), again(path, v2)
    assert not same.failed("actions")
    assert same.summary()["actions"]["close"] == 2 * EACH
    assert other.failed("actions")
    told = other.summary()["actions"]
    assert told["compared"] == 2 * EACH
    assert told["cosine_min"] < 0.999 or told["max_abs"] > 1e-3


def test_t5_both_bounds_hold_item_by_item() -> None:
    a = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    assert distance(a, a) == (1.0, 0.0)
    cosine, largest = distance(a, a * np.float32(1.1))
    assert cosine > 0.9999
    assert largest == pytest.approx(0.4)
    assert distance(a, -a)[0] == pytest.approx(-1.0)
    assert distance(a * 0, a * 0) == (1.0, 0.0)
    nan = np.array([[np.nan, 1.0]], np.float32)
    assert distance(nan, nan) == (1.0, 0.0)
    assert distance(nan, np.array([[0.0, 1.0]]))[1] == float("inf")
    for cosine, largest, close in ((1.0, 1e-3, True), (0.999, 0.0, True), (0.998, 0.0, False), (1.0, 1.1e-3, False)):
        assert ReplayedRequest(0, "", "a", cosine, largest).close is close


@pytest.mark.parametrize("items", [[], [ReplayedRequest(0, "r", "a", error="not taken", recorded_cache="hit")]])
def test_t5_where_nothing_was_compared_nothing_is_the_same(items: list[ReplayedRequest]) -> None:
    replay = ModelReplay("alone", items)
    assert [diff for diff in DIFFS if replay.failed(diff)] == ["actions", "cache"]


def test_t5_n_looks_at_the_first_and_slot_at_one(tmp_path: Path, tiny: Path) -> None:
    path = record(tmp_path, tiny, slots=("a", "b"), n=4)
    assert len(again(path, tiny, limit=5).items) == 5
    assert len(again(path, tiny, limit=1).items) == 1  # of one slot, and none of the other
    for compose in ("alone", "recorded"):
        only = again(path, tiny, slots=("b",), compose=compose)
        assert {item.slot for item in only.items} == {"b"}
        assert len(only.items) == 2 * EACH
        assert all(item.equal for item in only.items)
    assert len(again(path, tiny, limit=5, compose="recorded").items) == 5


def test_t5_unanswered_requests_are_left_out_and_counted(tmp_path: Path, tiny: Path) -> None:
    async def ask(served: Served) -> None:
        await served.ask(images={}, request_id="bad")
        await served.ask(images={"image": picture(1)}, instruction="x", state=[0.0, 1.0], request_id="good")

    path = serve(Served(tmp_path, [load_policy(tiny)]), ask)
    replay = again(path, tiny)
    assert [item.request_id for item in replay.items] == ["good"]
    assert dict(replay.left_out) == {"client_error": 1}


def test_t5_without_images_the_flag_is_named(tmp_path: Path, tiny: Path) -> None:
    path = record(tmp_path, tiny, images="hash_only")
    with pytest.raises(ConfigError, match=r"holds no images, and .* record with --record-images full"):
        again(path, tiny)


def test_t5_without_the_images_of_one_slot_the_others_are_named(tmp_path: Path, tiny: Path) -> None:
    recording = read_journal(record(tmp_path, tiny, slots=("a", "b"), n=2))
    for line in recording.requests:
        line.request.image_b64 = line.request.image_b64 if line.slot == "b" else None
    with pytest.raises(ConfigError, match=r"slot a holds no images; choose one with --slot: a, b$"):
        replay_model(recording, lambda slot: (policy := load_policy(tiny, slot), served_by(policy)))


def test_t5_latency_is_judged_within_five_percent_and_not_on_other_hardware(tmp_path: Path, tiny: Path) -> None:
    path = record(tmp_path, tiny)
    replay = again(path, tiny, compose="recorded")
    replay.timed = [replace(t, recorded=1.0, replayed=r) for t, r in zip(replay.timed, [1.04] * 99, strict=False)]
    assert not replay.failed("latency")
    replay.timed = [replace(t, replayed=1.06) for t in replay.timed]
    assert replay.failed("latency")
    assert not replay.failed("latency", same_hardware=False)
    few = replay.timed[0]
    times = [(1.0, 1.0), (1.0, 1.0), (10.0, 30.0), (10.0, 30.0), (10.0, 30.0)]
    replay.timed = [replace(few, recorded=r, replayed=n) for r, n in times]
    told = replay.summary()["latency"]
    assert (told["recorded_ms"], told["replayed_ms"], told["ratio"]) == (10_000.0, 30_000.0, 3.0)
    replay.timed = [replace(few, recorded=r, replayed=n) for r, n in [(1.0, 2.0), (4.0, 4.0), (9.0, 9.0)]]
    assert replay.summary()["latency"]["ratio"] == 1.0  # of 4 and 4, as they stand beside it
    replay.timed = []
    assert not replay.failed("latency")


# -- the command -------------------------------------------------------------------------------------------------------


def test_t5_the_command_exits_with_0_1_2_and_3(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path / "r", tiny, slots=("a", "b"), n=4)
    out = tmp_path / "diff.json"
    call = ["replay", str(path), "--model", str(tiny)]
    assert main([*call, "--fail-on", "actions", "--output", str(out), "--slot", "a"]) == 0
    told = json.loads(out.read_text())
    assert (told["failed"], list(told["slots"]), told["all"]["actions"]["equal"]) == ([], ["a"], 2 * EACH)
    assert {item["slot"] for item in told["items"]} == {"a"}
    assert f"a: {2 * EACH} replayed, alone" in capsys.readouterr().out
    assert main([*call, "--compose", "recorded"]) == 0
    text = capsys.readouterr().out
    assert f"actions  {2 * EACH} of {2 * EACH} the same, {2 * EACH} to the last bit" in text
    assert "b: 16 replayed, recorded" in text
    other = write_export(tmp_path / "other", change=lambda c: c.update(action_norm={"mean": [9.0, 9.0], "std": [1, 1]}))
    call[3] = str(other)
    assert main([*call, "--diff", "actions"]) == 0
    assert main([*call, "--diff", "actions", "--fail-on", "all"]) == 3
    assert "different in actions" in capsys.readouterr().err


def status(*argv: str) -> int:
    """Of the command; argparse exits by itself."""
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def test_t5_bad_calls_exit_with_2_and_name_what_is_wrong(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path / "r", tiny, images="none")
    model = ["--model", str(tiny)]
    calls: list[tuple[list[str], str]] = [
        ([], "give either --model DIR, to run its model, or --schedule"),
        ([*model, "--schedule"], "give either --model DIR, to run its model, or --schedule"),
        ([*model, "--diff", "taste"], "--diff=taste: must be one of actions, latency, cache, all"),
        ([*model, "--fail-on", "x"], "--fail-on=x: must be one of"),
        ([*model, "--n", "0"], "--n=0: must be a whole number >= 1"),
        ([*model, "--compose", "x"], "--compose=x: must be one of alone, recorded"),
        ([*model, "--slot", "z"], "--slot=z: not in this recording, which has prod"),
        ([*model, "--threads", "0"], "--threads=0: must be a whole number in [1, 256]"),
        (["--model", str(tmp_path)], "reflex_config.json: not found"),
        (model, "record with --record-images full"),
        (["--schedule", "--max-batch-cost-ms", "5"], "--max-batch-cost-ms=5: must be a whole number in [10, 10000]"),
        (["--schedule", "--batch-timeout-ms", "x"], "--batch-timeout-ms=x: must be a whole number in [0, 1000]"),
    ]
    for arguments, says in calls:
        assert status("replay", str(path), *arguments) == 2, arguments
        assert says in capsys.readouterr().err
    assert status("replay", str(path), *model, "--recorded-by", "abc") == 2
    assert re.search("--recorded-by=abc: no model of this recording, which has [0-9a-f]{16}\n", capsys.readouterr().err)
    assert status("replay", str(tmp_path), *model) == 2
    path.write_bytes(b"")
    assert main(["replay", str(path), *model]) == 1
    assert "line 1" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "gone.jsonl"), *model]) == 2


def test_t5_other_hardware_is_a_warning(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = load_policy(tiny)
    served = Served(tmp_path, [policy], hardware=hardware() | {"cpu": "an abacus"})
    path = serve(served, *callers(4))
    lines = read_journal(path)
    assert lines.header.hardware["cpu"] == "an abacus"
    call = ["replay", str(path), "--model", str(tiny), "--compose", "recorded", "--fail-on", "latency"]
    assert main([*call, "--output", str(tmp_path / "o.json")]) == 0  # whatever the ratio is
    assert json.loads((tmp_path / "o.json").read_text())["same_hardware"] is False


# -- options of the command that nothing above shows -------------------------------------------------------------------


@pytest.fixture
def replay(tmp_path: Path, tiny: Path) -> Callable[..., dict[str, Any]]:
    """Call the command through the model, or with --schedule, and return its whole result."""
    path, out = record(tmp_path / "r", tiny, "slow"), tmp_path / "out.json"

    def call(*words: str) -> dict[str, Any]:
        through = [] if "--schedule" in words else ["--model", str(tiny)]
        assert main(["replay", str(path), *through, "--output", str(out), *words]) == 0
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return call


def test_t5_n_is_how_many_requests_are_replayed(replay: Callable[..., dict[str, Any]]) -> None:
    assert len(replay("--n", "3")["items"]) == 3 < len(replay()["items"])


def test_t5_diff_is_what_is_shown(
    replay: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    replay("--diff", "cache")
    out = capsys.readouterr().out
    assert [f"  {kind} " in out for kind in ("actions", "cache", "latency")] == [False, True, False]


def test_t5_provider_and_threads_are_the_models(
    replay: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def loaded(spec: Any, slot: str, device: Any) -> Policy:
        asked.append((device.provider, device.threads))
        return load_policy(spec, slot)

    monkeypatch.setattr("reflex_runtime.robots.load_policy", loaded)
    replay("--provider", "cuda", "--threads", "3")
    assert asked == [("CUDAExecutionProvider", 3)]


def test_t6_changed_settings_are_another_schedule(replay: Callable[..., dict[str, Any]]) -> None:
    found = replay("--schedule", "--max-batch-size", "1")["reports"]
    assert list(found) == ["recorded", "replayed", "size 1"]
    assert list(found["size 1"]["sizes"]) == ["1"]
    assert max(map(int, found["replayed"]["sizes"])) > 1
    found = replay("--schedule", "--max-batch-cost-ms", "10", "--batch-timeout-ms", "0")["reports"]
    assert list(found)[2] == "10 ms, 0 ms hold"
