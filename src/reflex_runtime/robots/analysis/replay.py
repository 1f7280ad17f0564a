"""Runs recorded requests again through a model, and compares its answers, its speed and its cache hits.

Requests run alone, or in the recorded batches (`compose="recorded"`). Kernels may round differently in a batch of
another size. With the recorded members of its batches, on the machine of the recording, an answer is equal bit by bit.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Apart, Batch, Cause, Done, Failed, More
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.journal import BatchLine, Journal, JournalRequest, RequestLine
from reflex_runtime.robots.policy.base import Policy, TimedBatch, advance, run_through
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.policy.episodes import ChunkTails, Lru, Rtc
from reflex_runtime.robots.policy.observation import ActionChunk, Observation, ObservationHistory
from reflex_runtime.run.processor import Processor, run_batch
from reflex_runtime.web.errors import InvalidRequest

COSINE = 0.999  # least cosine of recorded and replayed actions that count as the same
MAX_ABS = 1e-3  # their largest difference, in the robot's units
LATENCY = 0.05  # share by which the time of batches may differ
WARM_SIZES = 16  # batch sizes at most that are warmed up before anything is timed
MOMENTS = 64  # earlier observations that are kept decoded

Compose = Literal["alone", "recorded"]
Diff = Literal["actions", "latency", "cache"]
DIFFS: tuple[Diff, ...] = get_args(Diff)
Make = Callable[[str], tuple[Policy, Processor]]
"""The model for a slot, and the processor that serves it."""


def replay_model(
    recording: Journal,
    make: Make,
    *,
    compose: Compose = "alone",
    slots: Sequence[str] = (),
    recorded_by: str = "",
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ModelReplay:
    """Run recorded requests again and compare.

    make: the model for a slot. slots: only these; empty for all. recorded_by: only answers of the model with this hash;
    "": if a slot had several models, only answers of the one that `make` gives. limit: most answered requests to
    replay. progress: called with (requests done, requests to do).

    ConfigError if the model reads images and the recording has none, or if a slot's model is none of the recorded ones.
    A request that the model refuses is an item with an error.
    """
    if not recording.header.payloads:
        raise ConfigError(
            f"{recording.path}: holds no payloads, as --trace writes it; only recordings of --record DIR can go "
            "through a model"
        )
    wanted = [line for line in recording.requests if not slots or line.slot in slots]
    answered = [line for line in wanted if line.response is not None]
    replay = ModelReplay(compose)
    replay.left_out.update(line.outcome for line in wanted if line.response is None)
    hashes = {line.model_hash or recording.header.hash_of(line.slot) for line in answered}
    if recorded_by and recorded_by not in hashes:
        there = ", ".join(sorted(hashes)) or "none"
        raise ConfigError(f"--recorded-by={recorded_by}: no model of this recording, which has {there}")
    models = {slot: make(slot) for slot in sorted({line.slot for line in answered})}
    for slot, (policy, _) in models.items():
        chosen = recorded_by or _one_model(recording, slot, policy.spec.model_hash)
        others = {line.seq for line in answered if line.slot == slot and chosen and line.model_hash not in ("", chosen)}
        replay.left_out["answered by another model"] += len(others)
        answered = [line for line in answered if line.seq not in others]
    replay.left_out = +replay.left_out
    if limit is not None:
        answered = answered[:limit]
    for slot, (policy, _) in models.items():
        requests = [line.request for line in answered if line.slot == slot]
        if policy.spec.images and requests and not any(request.image_b64 for request in requests):
            if any(line.request.image_b64 for line in recording.requests):  # it is another policy's slot
                there = ", ".join(recording.slots)
                raise ConfigError(f"{recording.path}: slot {slot} holds no images; choose one with --slot: {there}")
            raise ConfigError(
                f"{recording.path}: holds no images, and {policy.spec.source} cannot be replayed without; record with "
                "--record-images full"
            )
    runner = _Runner if compose == "alone" else _Composed
    runner(recording, models, replay, answered, progress).run()
    return replay


def _one_model(recording: Journal, slot: str, model_hash: str) -> str:
    """The hash of the model whose answers count; "" if one model answered all requests of the slot."""
    hashes = Counter(line.model_hash for line in recording.requests if line.slot == slot and line.response is not None)
    if len(hashes) < 2:
        return ""
    if model_hash in hashes:
        return model_hash
    there = ", ".join(f"{found} ({n} requests)" for found, n in hashes.most_common())
    raise ConfigError(
        f"{recording.path}: slot {slot}: its policy was exchanged while this was recorded, and none of them is "
        f"{model_hash}; choose one with --recorded-by: {there}"
    )


class _Tails(ChunkTails):
    """The last chunks, continued with the recorded times in place of the replay's."""

    def __init__(self, rtc: Rtc, control_hz: float | None) -> None:
        super().__init__(rtc, lambda: 0.0, control_hz)
        self._newest: dict[str, tuple[NDArray[np.float32], NDArray[np.float32] | None]] = {}

    def remember(
        self, episode: str, actions: NDArray[np.float32], latency: float, state: NDArray[np.float32] | None = None
    ) -> None:
        self._newest[episode] = actions, state
        super().remember(episode, actions, latency, state)

    def prepare(
        self, episode: str, report: Mapping[str, Any] | None, executed: int | None
    ) -> tuple[int | None, int | None]:
        """`executed` and `delay` of a request, from the report of its recorded anchor."""
        if report is None:
            self.forget(episode)
            return executed, None
        if episode in self._newest:
            actions, state = self._newest[episode]
            super().remember(episode, actions, report["delay_ms"] / 1e3, state)
        return int(report["executed"]), report.get("delay")


class _Past(ObservationHistory):
    """The recorded earlier observations of a request."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.moments: tuple[Observation, ...] = ()

    def before(self, episode: str, moment: Observation) -> tuple[Observation, ...]:
        return self.moments[1 - self.steps :]

    def remember(self, episode: str, moment: Observation) -> None:
        pass


def _as_recorded(policy: Policy, lines: Sequence[RequestLine]) -> None:
    """Switch on what these answers used: earlier observations, real-time chunking, adaptive steps."""
    if policy.history is not None and any(line.request.past for line in lines):
        policy.history = _Past(policy.history.steps)
    if not isinstance(policy, DecomposedPolicy):
        return
    report = next((line.rtc for line in lines if line.rtc is not None), None)
    if report is not None:
        rtc = Rtc(report["schedule"], report["horizon"])
        policy.tails = _Tails(rtc, policy.spec.embodiment.control_rate_hz)
    policy.adaptive = any(line.response and 0 < line.denoise < policy.spec.num_denoising_steps for line in lines)


def _prepared(
    policy: Policy, recorded: JournalRequest, executed: int | None = None, delay: int | None = None
) -> Observation:
    return policy.prepare(
        images=recorded.images(),
        instruction=recorded.instruction,
        state=None if recorded.state is None else [float(v) for v in recorded.state],
        episode_id=recorded.episode,
        request_id=recorded.request_id,
        seed=recorded.seed,
        executed=executed,
        delay=delay,
    )


class _Runner:
    """Runs every request alone, in the order of the recording, and compares answers."""

    def __init__(
        self,
        recording: Journal,
        models: dict[str, tuple[Policy, Processor]],
        replay: ModelReplay,
        answered: Sequence[RequestLine],
        progress: Callable[[int, int], None],
    ) -> None:
        self._recording, self._models, self._replay, self._answered = recording, models, replay, answered
        self._progress = progress
        self._items = {
            line.seq: ReplayedRequest(line.seq, line.request.request_id, line.slot, recorded_cache=line.cache)
            for line in answered
        }
        replay.items = sorted(self._items.values(), key=lambda item: item.seq)
        for slot, (policy, _) in models.items():
            _as_recorded(policy, [line for line in recording.requests if line.slot == slot])
        self._batches_of = defaultdict[int, list[BatchLine]](list)
        for batch in recording.batches:
            for seq in batch.seqs:
                self._batches_of[seq].append(batch)
        self._line_by_id: dict[tuple[str, str], RequestLine] = {}
        for line in recording.requests:
            self._line_by_id.setdefault((line.slot, line.request.request_id), line)
        self._seen: Lru[tuple[str, str], Observation] = Lru(MOMENTS)

    def run(self) -> None:
        self._warm((1,))
        for done, line in enumerate(self._answered):
            self._progress(done, len(self._answered))
            item = self._items[line.seq]
            try:
                ticket = Ticket(self._request(line), line.seq, 0.0)
            except ReflexError as error:
                item.error = error.message
                continue
            policy, processor = self._models[line.slot]
            try:
                ran = run_through(processor, [ticket], policy.stages, group=line.slot)
            except ReflexError as error:
                self._compare(item, line, Failed(error))
                continue
            assert isinstance(ticket.outcome, Done)
            self._compare(item, line, ticket.outcome)
            self._time(line, ran)
        self._progress(len(self._answered), len(self._answered))

    def _time(self, line: RequestLine, times: Sequence[TimedBatch]) -> None:
        """Compare times, if the request was alone in all of its recorded batches, too."""
        ticket = _ticket(line)
        ran = [] if ticket is None else self._batches_of[ticket]
        if [b.stage for b in ran] == [now.stage for now, _ in times] and all(b.size == 1 for b in ran):
            pairs = zip(ran, times, strict=True)
            self._replay.timed += [Timed(line.slot, b.elapsed, seconds) for b, (_, seconds) in pairs]

    def _request(self, line: RequestLine) -> Request:
        """The request as it was submitted; InvalidRequest if the model does not take it."""
        recorded, (policy, _) = line.request, self._models[line.slot]
        if isinstance(policy.history, _Past):
            moments = [self._moment(policy, policy.history, line.slot, past) for past in recorded.past or ()]
            policy.history.moments = tuple(moments)
        tails = getattr(policy, "tails", None)
        executed, delay = recorded.executed, None
        if isinstance(tails, _Tails):
            executed, delay = tails.prepare(recorded.episode, line.rtc, executed)
        return policy.request(_prepared(policy, recorded, executed, delay))

    def _moment(self, policy: Policy, history: _Past, slot: str, request_id: str) -> Observation:
        """The observation of an earlier request; InvalidRequest if the recording lacks it."""
        key = (slot, request_id)
        if key not in self._seen:
            if key not in self._line_by_id:
                raise InvalidRequest(f"it looks back to request {request_id}, which is not in the recording", "past")
            history.moments = ()
            moment = _prepared(policy, self._line_by_id[key].request).moment
            assert moment is not None
            self._seen[key] = moment
        return self._seen[key]

    def _warm(self, sizes: Iterable[int]) -> None:
        """Run the smallest `WARM_SIZES` of these sizes before anything is timed."""
        smallest = sorted(set(sizes))[:WARM_SIZES]
        for policy, _ in self._models.values():
            policy.warm_up(smallest or (1,), repeats=1)

    def _compare(self, item: ReplayedRequest, line: RequestLine, outcome: Done | Failed) -> None:
        if isinstance(outcome, Failed):
            error = outcome.error
            item.error = f"{error.code}: {error.message}" if isinstance(error, ReflexError) else repr(error)
            return
        assert line.response is not None
        chunk: ActionChunk = outcome.value
        recorded = line.response.array()
        item.cache = item.cache or chunk.cache
        if chunk.actions.shape == recorded.shape:
            item.cosine, item.max_abs = distance(recorded, chunk.actions)
            item.equal = recorded.tobytes() == np.asarray(chunk.actions, np.float32).tobytes()


class _Composed(_Runner):
    """Runs every recorded batch, step by step, with its recorded members.

    Requests are made in the order of their arrival, between the batches that had ended by then, so that the prefix
    cache has the same content. If a member's request is not in the file, all members of the batch are
    `composed = False`. Failed calls are left out; their members ran again in other batches.
    """

    def run(self) -> None:
        answered = self._answered
        slots, hashes = {line.slot for line in answered}, {line.model_hash for line in answered}
        self._tickets: dict[int, Ticket] = {}
        self._broken: set[int] = set()  # tickets that lacked a recorded batch member
        self._line_of: dict[int, RequestLine] = {}  # of every ticket that may share a batch with these
        arrivals = []
        for line in self._recording.requests:
            if line.slot in slots and line.model_hash in hashes and line.schedule and line.schedule.ticket is not None:
                self._line_of[line.schedule.ticket] = line
                arrivals.append((line.schedule.arrived, line.schedule.ticket))
        self._arrivals = sorted(arrivals, reverse=True)
        last = {_ticket(line) for line in answered}
        until = max((b.finished for b in self._recording.batches if last.intersection(b.seqs)), default=-inf)
        found = [b for b in self._recording.batches if b.group in slots and b.finished <= until]
        batches = sorted(found, key=lambda b: b.at)
        self._last = {seq: b.id for b in batches for seq in b.seqs}
        self._warm(b.size for b in batches)
        done = 0
        for batch in batches:
            self._progress(done, len(answered))
            self._arrive(batch)
            done += self._run_batch(batch)
        for line in answered:
            item = self._items[line.seq]
            if not item.error and item.max_abs == inf and not item.composed:
                none = _ticket(line) not in self._last
                where = "none of its batches is in the file" if none else "its batches cannot be formed"
                item.error = f"{where}: it can only be replayed alone"
        self._progress(len(answered), len(answered))

    def _arrive(self, batch: BatchLine) -> None:
        """Make the requests that had arrived when the batch was formed, and those that arrived while it ran and missed
        the cache. A request that arrived while it ran and hit the cache is made after it."""
        later = []
        while self._arrivals and self._arrivals[-1][0] <= batch.finished:
            arrived, seq = self._arrivals.pop()
            if arrived > batch.at and self._line_of[seq].cache in ("hit", "hit_stale"):
                later.append((arrived, seq))
            else:
                self._make(self._line_of[seq], seq, arrived)
        self._arrivals += reversed(later)

    def _make(self, line: RequestLine, seq: int, arrived: float) -> None:
        assert line.schedule is not None
        item = self._items.get(line.seq)
        try:
            request = self._request(line)
        except ReflexError as error:
            if item is not None:
                item.error = error.message
            return
        if item is not None:
            item.cache = request.payload.cache
        if request.stage != line.schedule.stage and request.stage:
            request = self._forced(line, request)
        if request.stage == line.schedule.stage:
            self._tickets[seq] = Ticket(request, seq, arrived)

    def _forced(self, line: RequestLine, request: Request) -> Request:
        """Compute a prefix that the recording computed, although this cache has it."""
        policy = self._models[line.slot][0]
        cache = getattr(policy, "cache", None)
        if cache is None or request.payload.cache == "miss":
            return request
        cache.forget(policy.slot, line.request.episode)
        return self._request(line)

    def _run_batch(self, recorded: BatchLine) -> int:
        """Run a batch; returns how many requests it answered."""
        present = [seq for seq in recorded.seqs if seq in self._tickets]
        if len(present) < recorded.size:
            self._broken.update(present)
        if recorded.apart or (recorded.crashed and recorded.cause != Cause.APART) or not present:
            return 0
        grants = {self._tickets[seq]: 1.0 for seq in present}
        entered = tuple(self._tickets[m.seq] for m in recorded.entered if m.seq in self._tickets)
        cause = Cause(recorded.cause)
        batch = Batch(recorded.id, recorded.group, "", recorded.stage, cause, recorded.at, 0.0, 0.0, grants, entered)
        began = time.perf_counter()
        outcomes = run_batch(self._models[recorded.group][1], batch)
        elapsed = time.perf_counter() - began
        if len(present) == recorded.size:
            self._replay.timed.append(Timed(recorded.group, recorded.elapsed, elapsed))
        answered = 0
        for seq, outcome in zip(present, outcomes, strict=True):
            answered += self._settle(recorded, seq, Failed(outcome.error) if isinstance(outcome, Apart) else outcome)
        return answered

    def _settle(self, recorded: BatchLine, seq: int, outcome: Done | More | Failed) -> bool:
        ticket, line = self._tickets[seq], self._line_of[seq]
        ended = self._last[seq] == recorded.id
        if isinstance(outcome, More):
            advance(ticket, outcome)
            if not ended:
                return False
            self._models[recorded.group][1].drop([ticket])  # it was cancelled, or the recorded model did fewer steps
            outcome = Failed(ReflexError("the recorded model answered after fewer steps"))
        del self._tickets[seq]
        item = self._items.get(line.seq)
        if item is None:
            return False
        self._compare(item, line, outcome)
        item.composed = ended and seq not in self._broken
        return True


def _ticket(line: RequestLine) -> int | None:
    return None if line.schedule is None else line.schedule.ticket


# -- the result --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReplayedRequest:
    """One answered request, recorded against replayed.

    cosine, max_abs: of the actions; max_abs in the robot's units, inf if they have another shape. equal: to the last
    bit. recorded_cache, cache: the prefix cache's results. composed: all its batches had their recorded members.
    error: why nothing can be compared, else "".
    """

    seq: int
    request_id: str
    slot: str
    cosine: float = 0.0
    max_abs: float = inf
    equal: bool = False
    recorded_cache: str = ""
    cache: str = ""
    composed: bool = False
    error: str = ""

    @property
    def close(self) -> bool:
        """Whether the actions are the same within the bounds."""
        return not self.error and self.cosine >= COSINE and self.max_abs <= MAX_ABS


@dataclass(frozen=True, slots=True)
class Timed:
    """The seconds of one batch that had the same members both times."""

    slot: str
    recorded: float
    replayed: float


@dataclass(slots=True)
class ModelReplay:
    """The result. left_out: recorded requests without an answer to compare, by how they ended."""

    compose: Compose
    items: list[ReplayedRequest] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def failed(self, diff: Diff, same_hardware: bool = True) -> bool:
        """Whether the replay differs. Latency counts only on the same hardware. If nothing can be compared, `actions`
        and `cache` fail, and `latency` does not."""
        found = self.summary()
        actions, ratio = found["actions"], found["latency"]["ratio"]
        if diff == "actions":
            return not self.items or actions["close"] < len(self.items)
        if diff == "cache":
            return not actions["compared"] or found["cache"]["same"] < actions["compared"]
        return same_hardware and ratio is not None and abs(ratio - 1.0) > LATENCY

    def summary(self, slot: str | None = None) -> dict[str, Any]:
        """Figures of one slot, or of all, JSON-safe. Latency: medians of the batches that had the same members."""
        items = [item for item in self.items if slot in (None, item.slot)]
        compared = [item for item in items if not item.error]
        kinds = Counter(f"{item.recorded_cache} → {item.cache}" for item in compared)
        timed = [t for t in self.timed if slot in (None, t.slot)]
        recorded = median([t.recorded for t in timed] or [0.0])
        replayed = median([t.replayed for t in timed] or [0.0])
        return {
            "requests": len(items),
            "actions": {
                "compared": len(compared),
                "close": sum(item.close for item in compared),
                "equal": sum(item.equal for item in compared),
                "composed": sum(item.composed for item in compared),
                "cosine_min": _number(min((i.cosine for i in compared), default=None)),
                "max_abs": _number(max((i.max_abs for i in compared), default=None)),
                "errors": dict(Counter(item.error for item in items if item.error).most_common()),
            },
            "cache": {
                "same": sum(item.cache == item.recorded_cache for item in compared),
                "changes": {kind: n for kind, n in kinds.items() if len(set(kind.split(" → "))) > 1},
            },
            "latency": {
                "batches": len(timed),
                "recorded_ms": recorded * 1e3 if timed else None,
                "replayed_ms": replayed * 1e3 if timed else None,
                "ratio": replayed / recorded if recorded > 0.0 else None,
            },
        }

    def lines(self, diffs: Sequence[Diff]) -> list[str]:
        """These differences for people, slot by slot."""
        lines = [] if self.items else ["no answered request to replay"]
        for slot in sorted({item.slot for item in self.items}):
            found = self.summary(slot)
            lines.append(f"{slot}: {found['requests']} replayed, {self.compose}")
            if "actions" in diffs:
                lines += _of_actions(found["actions"])
            if "cache" in diffs:
                changes = ", ".join(f"{kind} {n}" for kind, n in found["cache"]["changes"].items())
                lines.append(f"  cache    {found['cache']['same']} as recorded" + (f"; {changes}" if changes else ""))
            if "latency" in diffs:
                lines.append(f"  latency  {_of_latency(found['latency'], self.compose)}")
        if self.left_out:
            ends = ", ".join(f"{how} {n}" for how, n in self.left_out.most_common())
            lines.append(f"not answered, and left out: {ends}")
        return lines


def _of_actions(found: dict[str, Any]) -> list[str]:
    line = f"  actions  {found['close']} of {found['compared']} the same, {found['equal']} to the last bit"
    if found["cosine_min"] is not None:
        far = "another shape" if found["max_abs"] is None else f"largest difference {found['max_abs']:.3g}"
        line += f"; least cosine {found['cosine_min']:.6f}, {far}"
    lines = [line]
    if found["composed"]:
        lines.append(f"           {found['composed']} of them with their recorded batch members at every step")
    return lines + [f"           {n} not compared: {error[:200]}" for error, n in found["errors"].items()]


def _of_latency(found: dict[str, Any], compose: Compose) -> str:
    if found["ratio"] is None:
        more = "" if compose == "recorded" else ": none ran alone in the recording; see --compose recorded"
        return f"no batch to compare{more}"
    within = "within" if abs(found["ratio"] - 1.0) <= LATENCY else "outside of"
    return (
        f"{found['batches']} batches, median {found['recorded_ms']:.2f} ms recorded, "
        f"{found['replayed_ms']:.2f} ms now; ratio {found['ratio']:.3f}, {within} 1 ± {LATENCY:g}"
    )


def distance(recorded: NDArray[np.float32], replayed: NDArray[Any]) -> tuple[float, float]:
    """(cosine, largest absolute difference) of two chunks of one shape.

    Values that are not finite must be the same in both, and are then left out; else the distance is infinite.
    """
    a, b = recorded.astype(np.float64).ravel(), np.asarray(replayed, np.float64).ravel()
    finite = np.isfinite(a)
    if not (finite == np.isfinite(b)).all() or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return 0.0, inf
    a, b = a[finite], b[finite]
    if not a.size:
        return 1.0, 0.0
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    both_zero = not a.any() and not b.any()
    cosine = 1.0 if both_zero else (float(a @ b) / norms if norms > 0.0 else 0.0)
    return min(1.0, cosine), float(np.abs(a - b).max())


def _number(value: float | None) -> float | None:
    return value if value is None or isfinite(value) else None
