"""One recorded episode as a file for the Rerun viewer: pictures, curves of state and actions, latency.

Everything stands on the timeline `time`: seconds since the episode's first request, on the server's clock. Needs
rerun-sdk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.records.episodes import RecordedEpisodes, RecordedFrame, executed_between


@dataclass(slots=True)
class RerunWritten:
    """What was written. seconds: from the first request to the last. others: requests of other episodes."""

    path: Path
    episode: str
    requests: int
    actions: int
    seconds: float
    others: int

    def text(self) -> str:
        """For people."""
        more = f"; {self.others:,} requests are of others (--episode ID)" if self.others else ""
        return (
            f"{self.path}: episode {self.episode}, {self.requests:,} requests in {self.seconds:.1f} s, "
            f"{self.actions:,} actions{more}"
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "path"} | {"path": str(self.path)}


def write_rerun(
    found: RecordedEpisodes, path: Path, advance: Callable[[int, int], None] = lambda done, total: None
) -> RerunWritten:
    """Write the first episode of those found into a new file, for its owner alone: it has the pictures.

    advance: called with (requests written, requests in all). ConfigError if the file exists or cannot be written.
    """
    rerun = need_rerun()
    episode = found.episodes[0]
    _create(path)
    try:
        rerun.set_strict_mode(True)  # errors are raised, not logged
        stream = rerun.RecordingStream("reflex", recording_id=f"{episode.session_id} {episode.episode_id}")
        stream.save(str(path), default_blueprint=_layout(found))
        drawn = _Drawn(found, stream)
        frames = found.frames(episode)
        frame, done, first, last = next(frames, None), 0, 0.0, 0.0
        while frame is not None:
            after = next(frames, None)
            first, last = first or frame.at, frame.at
            drawn.request(frame, after, frame.at - first)
            done += 1
            advance(done, found.total)
            frame = after
        if episode.success is not None:
            drawn.text("outcome", "success" if episode.success else "failure", last - first)
        stream.flush()
        stream.disconnect()
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(f"--rerun={path}: cannot be written: {error.strerror or error}") from error
        raise
    return RerunWritten(path, episode.episode_id, done, drawn.actions, last - first, found.left_out["another episode"])


class _Drawn:
    """Requests on their way into a stream."""

    def __init__(self, found: RecordedEpisodes, stream: Any) -> None:
        self._rerun, self._stream = need_rerun(), stream
        self._rate = found.control_rate
        self._state = [self._path("state", name) for name in found.state_names()]
        self._action = [self._path("action", name) for name in found.action_names()]
        self._task: str | None = None
        self.actions = 0

    def request(self, frame: RecordedFrame, after: RecordedFrame | None, at: float) -> None:
        """at: seconds from the start. Executed actions follow from its answer on, at the control rate; without a
        control rate only the first."""
        self._stream.set_time("time", duration=at)
        for name, data in frame.pictures.items():
            kind = "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"
            picture = self._rerun.EncodedImage(contents=data, media_type=kind)
            self._stream.log(self._path("cameras", name), picture)
        if frame.state is not None:
            self._values(self._state, frame.state)
        self._values(["latency_ms"], [frame.latency_s * 1e3])
        if frame.task != self._task:
            self._task = frame.task
            self.text("task", frame.task, at)
        executed = 1 if self._rate is None else executed_between(frame, after, self._rate)[0]
        for step in range(executed):
            self._stream.set_time("time", duration=at + frame.latency_s + step / (self._rate or 1.0))
            self._values(self._action, frame.chunk[step])
        self.actions += executed

    def text(self, path: str, text: str, at: float) -> None:
        self._stream.set_time("time", duration=at)
        self._stream.log(path, self._rerun.TextLog(text))

    def _values(self, paths: list[str], values: Any) -> None:
        for path, value in zip(paths, values, strict=True):
            self._stream.log(path, self._rerun.Scalars([float(value)]))

    def _path(self, folder: str, name: str) -> str:
        return f"{folder}/{self._rerun.escape_entity_path_part(name)}"


def _layout(found: RecordedEpisodes) -> Any:
    """The cameras side by side, below them the curves."""
    from rerun import blueprint

    escape = need_rerun().escape_entity_path_part
    cameras = [
        blueprint.Spatial2DView(origin=f"cameras/{escape(name)}", name=name) for name, _, _ in found.shape.cameras
    ]
    curves = [blueprint.TimeSeriesView(origin=path, name=path) for path in ("state", "action", "latency_ms")]
    if not found.shape.state:
        del curves[0]
    return blueprint.Blueprint(blueprint.Vertical(*([blueprint.Horizontal(*cameras)] if cameras else []), *curves))


def need_rerun() -> Any:
    """rerun-sdk; ConfigError names the extra."""
    try:
        import rerun
    except ImportError as error:
        raise ConfigError("--rerun needs rerun-sdk: in a clone, pip install '.[rerun]'") from error
    return rerun


def _create(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise ConfigError(f"--rerun={path}: exists; name a new file") from None
    except OSError as error:
        raise ConfigError(f"--rerun={path}: cannot be written: {error.strerror or error}") from error
