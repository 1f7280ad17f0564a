"""Recordings as episodes: the frames of each together and in order, whatever else was served at the same time.

A recording holds requests in the order of their answers, those of many robots among each other. Its frames go once
through a temporary file, as large as the pictures in the recording; in memory stay 20 bytes a frame.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.policy.observation import image_size
from reflex_runtime.telemetry.journal import Header, JournalError, Note, RequestLine
from reflex_runtime.telemetry.journal_reader import JournalReader
from reflex_runtime.web.errors import InvalidRequest

Advance = Callable[[int], None]
"""Called with the frames done so far."""

Source = Literal["told", "assumed", "unknown"]

_LENGTH = 8  # bytes before each frame in the temporary file


def journals_in(paths: Iterable[Path], policy: str | None = None) -> dict[Path, Header]:
    """The journals among files and directories with their headers, in the order in which they were written.

    policy: the one of several to read. ConfigError where it is not there, or where there are several and it is None.
    JournalError for a file that is no journal, or when there is none.
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


class FrameShape(msgspec.Struct, frozen=True):
    """What frames must have in common to stand in one dataset. state: its length, 0 without one.

    cameras: (name, height, width), by name.
    """

    state: int
    cameras: tuple[tuple[str, int, int], ...]
    action: int

    def text(self) -> str:
        """For people: `state 8, top 480×640, action 7`."""
        state = [f"state {self.state}"] if self.state else ["no state"]
        cameras = [f"{name} {height}×{width}" for name, height, width in self.cameras] or ["no pictures"]
        return ", ".join([*state, *cameras, f"action {self.action}"])


class RecordedFrame(msgspec.Struct):
    """One request and its answer. at: when it came, seconds since the epoch. turn: its number in the episode.

    state: float32 [n], or None. chunk: float32 [num_actions, action_dim] as answered. executed: actions of the
    episode's last chunk that were executed before, as the caller said or, with --rtc, the server assumed; None where
    neither is known.
    """

    at: float
    turn: int
    latency_s: float
    task: str
    slot: str
    executed: int | None
    dims: tuple[int, int]
    state_bytes: bytes | None
    chunk_bytes: bytes
    pictures: dict[str, bytes]

    @property
    def state(self) -> NDArray[np.float32] | None:
        return None if self.state_bytes is None else np.frombuffer(self.state_bytes, np.float32)

    @property
    def chunk(self) -> NDArray[np.float32]:
        return np.frombuffer(self.chunk_bytes, np.float32).reshape(self.dims)


def executed_between(frame: RecordedFrame, after: RecordedFrame | None, rate: float) -> tuple[int, Source]:
    """How many actions of a chunk were executed before the episode's next request, and how that is known.

    The next request says so, or it is the time from the answer to that request at the control rate. Of the last chunk
    of an episode, and of one after which an answer was left out, only the first action is taken: how it went on is not
    known.
    """
    if after is None or after.turn != frame.turn + 1:
        return 1, "unknown"
    if after.executed is not None:
        return min(after.executed, len(frame.chunk)), "told"
    done = int((after.at - frame.at - frame.latency_s) * rate + 1e-6)
    return min(max(done, 0), len(frame.chunk)), "assumed"


@dataclass(slots=True)
class RecordedEpisode:
    """The frames of one episode of one robot in one run of a server.

    turns: its answered requests, those left out included. success: as reported; None without a report, or if several
    robots used the id, because a report has no robot.

    The same id in two runs is two episodes: robots may count anew after a restart.
    """

    session_id: str
    episode_id: str
    robot: str
    turns: int = 0
    slots: set[str] = field(default_factory=set)
    success: bool | None = None
    times: array[float] = field(default_factory=lambda: array("d"))
    places: array[int] = field(default_factory=lambda: array("Q"))
    shapes: array[int] = field(default_factory=lambda: array("L"))

    def of_shape(self, number: int) -> list[int]:
        """Where its frames of that shape are in the temporary file, in the order of their times."""
        chosen = [i for i, shape in enumerate(self.shapes) if shape == number]
        return [self.places[i] for i in sorted(chosen, key=self.times.__getitem__)]

    def intervals(self, number: int) -> NDArray[np.float64]:
        """Seconds between its frames of that shape."""
        times = sorted(self.times[i] for i, shape in enumerate(self.shapes) if shape == number)
        return np.diff(np.array(times, np.float64))


@dataclass(slots=True)
class _ShapeSeen:
    frames: int = 0
    longest: int = 0  # most actions in a chunk


class RecordedEpisodes:
    """All episodes of recordings. A context: the temporary file is gone at its end.

        with RecordedEpisodes(paths, scratch=DIR) as found:
            for episode in found.episodes:
                for frame in found.frames(episode): …

    only: keep the episode with this id; "" keeps the first one, None all. left_out: requests by the reason why they are
    no frame. shape: the most frequent; frames of others are left out. longest: most actions in one of its chunks.

    policy: the one of several whose episodes these are. ConfigError when there is no frame, or none has its pictures;
    JournalError for a file that cannot be read.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        scratch: Path,
        only: str | None = None,
        advance: Advance = lambda done: None,
        policy: str | None = None,
    ) -> None:
        self.journals = journals_in(paths, policy)
        self._policy = policy
        self.left_out: Counter[str] = Counter()
        self.requests = 0
        self._only, self._advance = only, advance
        self._episodes: dict[tuple[str, str, str], RecordedEpisode] = {}
        self._outcomes: dict[tuple[str, str], bool] = {}
        self._shapes: dict[FrameShape, _ShapeSeen] = {}
        self._hashes_only = 0
        self._file: Any = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 (`__exit__` closes it)
        try:
            for path, header in self.journals.items():
                self._read(path, header)
            self._choose()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    @property
    def total(self) -> int:
        """Frames of the chosen shape."""
        return self._shapes[self.shape].frames

    def frames(self, episode: RecordedEpisode) -> Iterator[RecordedFrame]:
        """Its frames of the chosen shape, in the order of their times."""
        for place in episode.of_shape(self._number):
            self._file.seek(place)
            length = int.from_bytes(self._file.read(_LENGTH), "little")
            yield _decode(self._file.read(length))

    def count(self, episode: RecordedEpisode) -> int:
        """How many `frames` has."""
        return sum(shape == self._number for shape in episode.shapes)

    def interval(self) -> float | None:
        """Median seconds between two frames of an episode; None if no episode has two."""
        between = [gaps for episode in self.episodes if len(gaps := episode.intervals(self._number))]
        found = float(np.median(np.concatenate(between))) if between else 0.0
        return found if found > 0.0 else None

    @property
    def control_rate(self) -> float | None:
        """Actions a second, as the first recording that knows it says."""
        return next((h.control_rate_hz for h in self.journals.values() if h.control_rate_hz), None)

    def state_names(self) -> list[str]:
        """Of the elements of a state, as the first recording that knows them says, else numbered."""
        return self._names([h.state_names for h in self.journals.values()], self.shape.state, "state")

    def action_names(self) -> list[str]:
        """Of the elements of an action, likewise."""
        return self._names([h.action_names for h in self.journals.values()], self.shape.action, "action")

    def _names(self, told: list[list[str]], dim: int, kind: str) -> list[str]:
        return next((list(names) for names in told if len(names) == dim), [f"{kind}_{i}" for i in range(dim)])

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self, path: Path, header: Header) -> None:
        if not header.payloads:
            raise ConfigError(
                f"{path}: holds no payloads, as --trace writes it; record with --record DIR --record-images full"
            )
        if header.redaction.get("images") == "none":
            raise ConfigError(f"{path}: holds no pictures; record with --record-images full")
        reader = JournalReader(path, self._policy)
        begun = _seconds(header.started_at)
        for line in reader:
            if isinstance(line, RequestLine):
                self.requests += 1
                self._advance(self.requests)
                why = self._add(line, header.session_id, begun)
                if why:
                    self.left_out[why] += 1
            elif isinstance(line, Note) and line.kind == "outcome":
                self._ended(header.session_id, line.fields)

    def _add(self, line: RequestLine, session: str, begun: float) -> str:
        """Keep it as a frame; returns why it is none, else ""."""
        asked, given = line.request, line.response
        if given is None or given.actions is None:
            return line.outcome
        if not asked.episode_id:
            return "no episode_id"
        if self._only == "":
            self._only = asked.episode_id
        if self._only is not None and asked.episode_id != self._only:
            return "another episode"
        key = session, asked.episode_id, asked.robot_id or ""
        episode = self._episodes.setdefault(key, RecordedEpisode(*key))
        episode.turns += 1
        if asked.hashes() and not asked.image_b64:
            self._hashes_only += 1
            return "pictures recorded as hashes only"
        try:
            chunk = given.array()
            state = None if asked.state is None else np.array([float(v) for v in asked.state], np.float32)
        except ValueError:
            return "numbers that cannot be read"
        if not len(chunk):
            return "no actions"
        if not np.isfinite(chunk).all() or (state is not None and not np.isfinite(state).all()):
            return "numbers that are not finite"
        try:
            pictures = asked.images()
            cameras = tuple((name, *image_size(pictures[name], name)) for name in sorted(pictures))
        except (InvalidRequest, ValueError):
            return "unreadable picture"
        executed = line.rtc.get("executed") if asked.executed is None and line.rtc else asked.executed
        frame = RecordedFrame(
            at=begun + line.arrival,
            turn=episode.turns,
            latency_s=line.latency.total_ms / 1e3,
            task=asked.instruction or "",
            slot=line.slot,
            executed=executed,
            dims=(len(chunk), chunk.shape[1]),
            state_bytes=None if state is None else state.tobytes(),
            chunk_bytes=chunk.tobytes(),
            pictures=pictures,
        )
        shape = FrameShape(0 if state is None else len(state), cameras, chunk.shape[1])
        self._keep(episode, frame, shape)
        return ""

    def _keep(self, episode: RecordedEpisode, frame: RecordedFrame, shape: FrameShape) -> None:
        seen = self._shapes.setdefault(shape, _ShapeSeen())
        seen.frames += 1
        seen.longest = max(seen.longest, frame.dims[0])
        episode.slots.add(frame.slot)
        episode.times.append(frame.at)
        episode.places.append(self._file.tell())
        episode.shapes.append(list(self._shapes).index(shape))
        data = _encode(frame)
        self._file.write(len(data).to_bytes(_LENGTH, "little") + data)

    def _ended(self, session: str, told: dict[str, Any]) -> None:
        """The first outcome of an episode counts."""
        if isinstance(told.get("success"), bool):
            self._outcomes.setdefault((session, str(told.get("episode_id", ""))), told["success"])

    def _choose(self) -> None:
        """The shape of which there are most frames."""
        where = ", ".join(map(str, self.journals))
        if not self._shapes and self._hashes_only:
            raise ConfigError(f"{where}: holds hashes of the pictures only; record with --record-images full")
        if not self._shapes:
            reasons = "; ".join(f"{n} {why}" for why, n in self.left_out.most_common()) or "no request"
            raise ConfigError(f"{where}: no answered request that belongs to an episode ({reasons})")
        self.shape = max(self._shapes, key=lambda shape: self._shapes[shape].frames)
        self._number = list(self._shapes).index(self.shape)
        self.longest = self._shapes[self.shape].longest
        for shape, seen in self._shapes.items():
            if shape != self.shape:
                self.left_out[f"another shape ({shape.text()})"] += seen.frames
        robots = Counter((episode.session_id, episode.episode_id) for episode in self._episodes.values())
        for episode in self._episodes.values():
            name = episode.session_id, episode.episode_id
            episode.success = self._outcomes.get(name) if robots[name] == 1 else None
        self.episodes = [episode for episode in self._episodes.values() if self._number in episode.shapes]


def _seconds(stamp: str) -> float:
    """Since the epoch; 0 where there is no time."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RecordedFrame).decode
