"""Compares versions A and B from journals: success rates with their evidence, latency, errors, and a timeline.

The comparison is the server's own (`robots/versions/comparison.py`). It gets the recorded outcomes in their order, and
so has the server's last result.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import percentile
from reflex_runtime.observe.journal import Header, JournalError, JournalReader, Note, RequestLine, episode_key
from reflex_runtime.robots.versions.comparison import Comparison, wilson

WIDTH = 80


@dataclass(slots=True)
class SlotReport:
    """One slot. latencies: of answered requests, milliseconds, ascending in a finished report.

    started: episodes with a request. finished, successes: of the reported outcomes. clamped, held: answers that the
    guard changed. errors: by slug. outcomes: of all requests. loaded: when the last of `models` was loaded, 0.0 for the
    first one; successes and finished count from then, the rest from the beginning.
    """

    slot: str
    models: list[str] = field(default_factory=list)
    loaded: float = 0.0
    requests: int = 0
    latencies: list[float] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    successes: int = 0
    finished: int = 0
    clamped: int = 0
    held: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, line: RequestLine) -> None:
        self.requests += 1
        self.outcomes[line.outcome] += 1
        if line.request.episode:
            self.started.add(line.request.episode)
        if line.error is not None:
            self.errors[line.error.slug] += 1
        if line.outcome == "ok" and line.error is None:
            self.latencies.append(line.latency.total_ms)
        if line.guard is not None:
            self.clamped += bool(line.guard.get("clamped")) and not line.guard.get("held")
            self.held += bool(line.guard.get("held"))

    def latency(self, share: float) -> float | None:
        """Nearest-rank percentile, in milliseconds; None without answers."""
        return percentile(self.latencies, share) if self.latencies else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "models": self.models,
            "requests": self.requests,
            "outcomes": dict(self.outcomes.most_common()),
            "errors": dict(self.errors.most_common()),
            "episodes": {
                "started": len(self.started),
                "finished": self.finished,
                "successes": self.successes,
                "rate": self.successes / self.finished if self.finished else None,
                "interval": list(wilson(self.successes, self.finished)),
            },
            "latency_ms": {"p50": self.latency(0.50), "p99": self.latency(0.99)},
            "guard": {"clamped": self.clamped, "held": self.held},
        }


@dataclass(frozen=True, slots=True)
class Event:
    """A decision on the timeline. at: seconds since the epoch."""

    at: float
    action: str
    what: str
    fields: dict[str, Any]


@dataclass(slots=True)
class RolloutReport:
    """The report. timeline: in order of time. mixed: episodes of two slots. robots: policies, which have episodes and
    guards, were served."""

    files: list[Path]
    slots: dict[str, SlotReport] = field(default_factory=dict)
    comparison: Comparison | None = None
    timeline: list[Event] = field(default_factory=list)
    divergence: list[dict[str, Any]] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    dropped: int = 0
    unfinished: int = 0
    mixed: int = 0
    robots: bool = True

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "files": [str(path) for path in self.files],
            "started_at": _iso(self.started),
            "ended_at": _iso(self.ended),
            "slots": {name: slot.as_dict() for name, slot in self.slots.items()},
            "comparison": None if self.comparison is None else self.comparison.snapshot(),
            "episodes_of_two_slots": self.mixed,
            "shadow": self.shadow(),
            "timeline": [{"at": _iso(e.at), "action": e.action, "what": e.what, **e.fields} for e in self.timeline],
            "lines_dropped": self.dropped,
            "files_without_footer": self.unfinished,
        }

    def shadow(self) -> dict[str, Any] | None:
        """Distance of the shadow's actions from the served ones, in the robot's units; None without any pair."""
        pairs = [d for d in self.divergence if isinstance(d.get("mean"), int | float)]
        if not pairs:
            return None
        joints = [d["per_joint"] for d in pairs if isinstance(d.get("per_joint"), list)]
        wide = min((len(j) for j in joints), default=0)
        return {
            "pairs": len(pairs),
            "mean": sum(d["mean"] for d in pairs) / len(pairs),
            "largest": max(d.get("largest", d["mean"]) for d in pairs),
            "per_joint": [sum(j[i] for j in joints) / len(joints) for i in range(wide)],
        }

    def text(self) -> str:
        """The report for people, in 80 columns."""
        parts = [self._head(), self._table()]
        if self.comparison is not None:
            parts.append(self._verdict(self.comparison))
        if (shadow := self.shadow()) is not None:
            text = f"shadow: {shadow['pairs']} pairs, mean difference {shadow['mean']:.3g}, "
            text += f"largest {shadow['largest']:.3g}"
            joints = ", ".join(f"{v:.3g}" for v in shadow["per_joint"])
            parts.append(text + (f"\n  per joint {joints}" if joints else ""))
        if self.timeline:
            parts.append("\n".join(["timeline (UTC)", *map(_event, self.timeline)]))
        return "\n\n".join(parts)

    def _head(self) -> str:
        files = f"{len(self.files)} recordings" if len(self.files) > 1 else str(self.files[0])
        seconds = self.ended - self.started
        long = f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60:.0f} minutes"
        lines = [_plain(files)[:WIDTH], f"{_clock(self.started)} to {_clock(self.ended)} UTC, {long}"]
        if self.dropped:
            lines.append(f"{self.dropped:,} lines were dropped: the disk could not keep up")
        if self.unfinished:
            lines.append(f"{self.unfinished} without a footer: still written, or the server was killed")
        return "\n".join(lines)

    def _table(self) -> str:
        rows = [self._cells(slot) for slot in self.slots.values()]
        errors = sorted({slug for slot in self.slots.values() for slug in slot.errors})
        for cells, slot in zip(rows, self.slots.values(), strict=True):
            cells |= {f"  {_plain(slug)}": f"{slot.errors[slug]:,}" for slug in errors}
        names = list(rows[0]) if rows else []
        width = (WIDTH - max(map(len, names), default=0)) // max(1, len(rows)) - 2
        texts = [[_plain(text) for text in row.values()] for row in rows]
        short = [[text if len(text) <= width else text[: width - 1] + "…" for text in column] for column in texts]
        columns = [[text.ljust(max(map(len, column))) for text in column] for column in [names, *short]]
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    def _cells(self, slot: SlotReport) -> dict[str, str]:
        """A slot's column, by the names of the rows."""
        cells = {"": slot.slot, "model": slot.models[-1] if slot.models else "–"}
        if any(one.loaded for one in self.slots.values()):
            cells["  loaded (UTC)"] = _clock(slot.loaded) if slot.loaded else "–"
        cells |= {"requests": f"{slot.requests:,}", "  answered": f"{len(slot.latencies):,}"}
        if self.robots:
            low, high = wilson(slot.successes, slot.finished)
            cells["episodes"] = f"{len(slot.started):,}, {slot.finished:,} with an outcome"
            cells["success"] = cells["  95 % interval"] = "–"
            if slot.finished:
                share = slot.successes / slot.finished
                cells["success"] = f"{slot.successes} of {slot.finished}, {share:.1%}"
                cells["  95 % interval"] = f"{low:.1%} to {high:.1%}"
        for share in (0.50, 0.99):
            latency = slot.latency(share)
            cells[f"latency p{share * 100:.0f}, ms"] = "–" if latency is None else f"{latency:.1f}"
        if self.robots:
            cells |= {"guard clamped": f"{slot.clamped:,}", "guard held": f"{slot.held:,}"}
        return cells

    def _verdict(self, found: Comparison) -> str:
        verdict = {"a_better": "a is better", "b_better": "b is better"}.get(found.verdict, "undecided")
        margin, decided = f"b is not worse by {found.margin * 100:g} points", ", decided" if found.not_inferior else ""
        lines = [
            f"a against b: {verdict} (a verdict needs an e-value of {1.0 / found.alpha:,.0f})",
            f"  {'a is better':<28}e = {evidence(found.e['a_better'])}",
            f"  {'b is better':<28}e = {evidence(found.e['b_better'])}",
            f"  {margin:<28}e = {evidence(found.e['not_inferior'])}{decided}",
            f"  {found.blocks:,} blocks of episodes compared, {found.left_out:,} episodes left out of the test",
        ]
        if any(s.loaded for s in self.slots.values()):
            lines.append("  success and comparison count from the last load, everything else from the beginning")
        if self.mixed:
            lines.append(f"  {self.mixed:,} episodes were answered by two policies and count for neither")
        return "\n".join(lines)


def journals_in(paths: Iterable[Path], policy: str | None = None) -> dict[Path, Header]:
    """The journals among files and directories with their headers, in the order in which they were written.

    policy: the one of several to read. ConfigError if a journal lacks it, or has several and it is None. JournalError
    for a file that is no journal, or if there is none.
    """
    paths = list(paths)
    headers = {path: JournalReader(path, policy).header for path in _files(paths)}
    for path, header in headers.items():
        if header.served:
            raise ConfigError(f"{path}: has several policies: choose {' or '.join(header.served)} with --policy NAME")
    if not headers:
        raise JournalError(f"{', '.join(map(str, paths))}: no recordings (.jsonl, .jsonl.gz) there")
    return dict(sorted(headers.items(), key=lambda found: (found[1].started_at, found[1].session_id, found[1].part)))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
        else:
            yield path


def report(paths: Sequence[Path], margin: float = 0.05, policy: str | None = None) -> RolloutReport:
    """The report of journals: files, or directories of them.

    margin: of the `Comparison`. policy: the one of several to report. Raises JournalError for a file that is no
    journal, or if there is none; ConfigError if files have different models in a slot.
    """
    headers = journals_in(paths, policy)
    files = list(headers)
    found = RolloutReport(files, robots=any(header.model_type != "function" for header in headers.values()))
    notes: list[Note] = []
    for path in files:
        notes += _read(path, found, policy)
    if not found.slots:
        for path, header in headers.items():
            header.without_requests(path)
    _add_models(found, headers)
    for slot in found.slots.values():
        slot.latencies.sort()
    found.slots = dict(sorted(found.slots.items()))
    if {"a", "b"} <= set(found.slots):
        first = next((h.split for h in headers.values() if h.split is not None), None)
        found.comparison = Comparison(50 if first is None else first, margin=margin)
    _follow(found, notes)
    return found


def _read(path: Path, found: RolloutReport, policy: str | None) -> list[Note]:
    """Count a file's requests, and return its notes."""
    reader = JournalReader(path, policy)
    notes = []
    begun = _seconds(reader.header.started_at)
    found.started = min(found.started or begun, begun)
    found.ended = max(found.ended, begun)
    for line in reader:
        if isinstance(line, RequestLine):
            slot = found.slots.setdefault(line.slot, SlotReport(line.slot))
            slot.add(line)
            found.ended = max(found.ended, line.timestamp.timestamp() + line.latency.total_ms / 1e3)
        elif isinstance(line, Note):
            notes.append(line)
            found.ended = max(found.ended, _seconds(line.at))
    if reader.footer is None:
        found.unfinished += 1
    else:
        found.dropped += reader.footer.dropped
    return notes


def _add_models(found: RolloutReport, headers: Mapping[Path, Header]) -> None:
    """Add the models of each slot. ConfigError if files begin with different ones: a load is a note in a file."""
    seen: dict[str, tuple[str, Path]] = {}
    for path, header in headers.items():
        policies = {p.slot: (p.model_hash, f"{p.model_id}@{p.model_hash}") for p in header.policies or ()}
        served = policies or {"prod": (header.model_hash, header.model_hash)}
        for name, (model, label) in served.items():
            first, where = seen.setdefault(name, (model, path))
            if model != first:
                raise ConfigError(
                    f"slot {name} is model {first} in {where.name} and {model} in {path.name}: make a report for each "
                    "pair of versions"
                )
            if policies or name in found.slots:
                found.slots.setdefault(name, SlotReport(name)).models += filter(None, [label])


def _follow(found: RolloutReport, notes: Sequence[Note]) -> None:
    """Add outcomes and decisions, in order, to the comparison and the timeline."""
    owners = defaultdict[str, set[str]](set)
    for name, slot in found.slots.items():
        for episode in slot.started:
            owners[episode].add(name)
    ended: set[str] = set()
    for note in sorted(notes, key=lambda n: n.at):
        at = _seconds(note.at)
        if note.kind == "decision":
            _decided(found, at, note.fields)
        elif note.kind == "shadow":
            found.divergence.append(note.fields)
        elif note.kind == "outcome":
            episode = episode_key(note.fields.get("robot_id"), str(note.fields.get("episode_id", "")))
            if episode in ended:
                continue
            ended.add(episode)
            _ended(found, owners[episode], note.fields)


def _ended(found: RolloutReport, owners: set[str], fields: dict[str, Any]) -> None:
    """Count the first outcome of an episode. An episode that two slots answered counts for none."""
    name = fields.get("slot") or (next(iter(owners)) if len(owners) == 1 else None)
    if len(owners - {"shadow"}) > 1 or fields.get("counted") is False:
        found.mixed += 1
        return
    if name not in found.slots:
        return
    slot, success = found.slots[name], bool(fields.get("success"))
    slot.finished += 1
    slot.successes += success
    if found.comparison is not None and name in ("a", "b"):
        found.comparison.add(name, success)


def _decided(found: RolloutReport, at: float, fields: dict[str, Any]) -> None:
    """Add a decision: `action`, `why`, and `split` (a's percent) or `share` (b's) in it or in its `numbers`."""
    numbers = fields.get("numbers")
    everything = {**numbers, **fields} if isinstance(numbers, dict) else fields
    split = everything.get("split")
    if split is None and isinstance(everything.get("share"), int) and everything.get("action") != "hold":
        split = 100 - everything["share"]
    if found.comparison is not None and isinstance(split, int) and 0 <= split <= 100:
        found.comparison.set_split(split)
    action = str(fields.get("action", "decision"))
    if action == "load" and everything.get("slot") in found.slots:
        _loaded(found, at, found.slots[everything["slot"]], str(everything.get("version", "?")))
    parts = [str(fields["why"])] if fields.get("why") else []
    if split is not None:
        parts.append(f"split {split}")
    elif fields.get("slot"):
        parts.append(str(fields["slot"]))
    rest = {key: value for key, value in fields.items() if key not in ("timestamp", "action")}
    found.timeline.append(Event(at, action, "; ".join(parts), rest))


def _loaded(found: RolloutReport, at: float, slot: SlotReport, version: str) -> None:
    """Add another policy to a slot, whose counts of episodes start again."""
    slot.finished = slot.successes = 0
    slot.models.append(version)
    slot.loaded = at
    if found.comparison is not None:
        before = found.comparison
        found.comparison = Comparison(before.split, before.alpha, before.margin)


# -- text --------------------------------------------------------------------------------------------------------------


def evidence(value: float) -> str:
    """An e-value for people: three digits, a power of ten only from 1e8 on."""
    return f"{float(f'{value:.3g}'):,.0f}" if 100.0 <= value < 1e8 else f"{value:.3g}"


def _event(event: Event) -> str:
    indent = f"  {_clock(event.at)}  {_plain(event.action)[:16]:<9} "
    words = _plain(event.what) or "–"  # for an empty text `fill` returns nothing, not even the indent with the action
    return textwrap.fill(words, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "·" for c in text)


def _seconds(stamp: str) -> float:
    """Seconds since the epoch; 0 where there is no time."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _clock(at: float) -> str:
    return _iso(at)[11:19]
