"""Recorded episodes as a LeRobotDataset v3.0, for training on what a fleet did.

A recording has one observation for each request, and a chunk of actions as the answer. Two ways to make frames of that:

`requests`  one frame a request, with everything that was recorded: the observation, the first action, the whole chunk.
`steps`     one frame a control step: the actions that were executed of each chunk. The observation of a frame is that
            of its request; `observed` says in which frames it is of that moment.

Files, columns and statistics are those that LeRobot 0.4 and 0.6 write and read. Needs pyarrow and PyAV.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.policy.observation import decode_image
from reflex_runtime.policies.records.episodes import (
    RecordedEpisode,
    RecordedEpisodes,
    RecordedFrame,
    executed_between,
)
from reflex_runtime.policies.records.lerobot_stats import (
    ColumnStats,
    PictureStats,
    Statistic,
    StatsSum,
    plain_stats,
    sampled,
)
from reflex_runtime.policies.records.lerobot_tables import ParquetFiles, need_arrow, write_tasks
from reflex_runtime.policies.records.lerobot_video import CameraVideos, need_av
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import InvalidRequest

FrameKind = Literal["requests", "steps"]
FRAME_KINDS: tuple[FrameKind, ...] = get_args(FrameKind)

VERSION = "v3.0"  # LeRobot's codebase_version
CHUNKS_SIZE = 1000  # files in a folder
DATA_MB, VIDEO_MB = 100, 200  # a file that is larger is the last one's end: the next episode begins another
ROWS = 4096  # kept in memory until they are written
MOST_FPS = 1000

Values = dict[str, Any]
"""A frame: values by column."""


@dataclass(slots=True)
class DatasetWritten:
    """What was written. left_out: requests by the reason why they are in no frame.

    assumed: with `steps`, chunks whose executed actions were worked out from times and the control rate.
    """

    path: Path
    kind: FrameKind
    fps: int
    fps_from: str
    episodes: int = 0
    frames: int = 0
    requests: int = 0
    assumed: int = 0
    tasks: int = 0
    successes: int = 0
    outcomes: int = 0
    cameras: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.path}: {self.episodes:,} episodes, {self.frames:,} frames of {self.requests:,} requests "
            f"at {self.fps} fps ({self.fps_from})",
            f"tasks: {self.tasks:,}; cameras: {', '.join(self.cameras) or 'none'}; "
            f"outcomes reported: {self.outcomes:,}, of them successes {self.successes:,}",
        ]
        if self.assumed:
            lines.append(f"executed actions assumed, not reported: of {self.assumed:,} chunks")
        if self.left_out:
            lines.append("requests left out: " + "; ".join(f"{why} {n:,}" for why, n in self.left_out.items()))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "path"} | {"path": str(self.path)}


def write_lerobot(
    found: RecordedEpisodes,
    target: Path,
    *,
    kind: FrameKind = "requests",
    fps: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> DatasetWritten:
    """Write the episodes into `target`, an empty directory.

    fps: frames a second; None takes the control rate in the recording (`steps`) or the rate at which the robots asked
    (`requests`). advance: called with (requests written, requests in all).

    ConfigError without a rate, or when nothing can be written. On any error the directory is empty again.
    """
    rate, fps_from = _rate(found, kind, fps)
    written = DatasetWritten(target, kind, max(1, round(rate)), fps_from)
    try:
        with closing(_Writer(found, target, kind, rate)) as writer:
            for episode in found.episodes:
                writer.write(episode, written, lambda: advance(written.requests, found.total))
            advance(found.total, found.total)
            writer.finish(written)
    except BaseException as error:
        for name in ("data", "videos", "meta"):
            shutil.rmtree(target / name, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from error
        raise
    return written


def need_packages() -> None:
    """ConfigError where pyarrow or PyAV is missing."""
    need_arrow()
    need_av()


def _rate(found: RecordedEpisodes, kind: FrameKind, fps: int | None) -> tuple[float, str]:
    """Frames a second before they are rounded, as LeRobot has whole ones; and where they are from."""
    if fps is not None:
        return fps, "--fps"
    if kind == "steps":
        control = found.control_rate
        if control is None:
            raise ConfigError("--frames=steps: the recording does not say the control rate; give it with --fps")
        return min(MOST_FPS, control), "the control rate in the recording"
    between = found.interval()
    if between is None:
        return 1.0, "no episode has two requests"
    return min(MOST_FPS, 1.0 / between), f"a request every {between:.3g} s"


# -- frames ------------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A request with its decoded pictures, and the executed actions of its chunk. executed: −1 if not known."""

    frame: RecordedFrame
    pictures: dict[str, NDArray[np.uint8]]
    executed: int


class _Writer:
    """One dataset while it is written."""

    def __init__(self, found: RecordedEpisodes, target: Path, kind: FrameKind, rate: float) -> None:
        self._found, self._target, self._kind, self._rate = found, target, kind, rate
        self._fps = max(1, round(rate))
        self._shape = found.shape
        self._keys = camera_keys([name for name, _, _ in self._shape.cameras])
        self._features = self._described()
        self._data = ParquetFiles(target / "data", DATA_MB << 20, CHUNKS_SIZE)
        self._index = ParquetFiles(target / "meta" / "episodes", DATA_MB << 20, CHUNKS_SIZE)
        self._videos = {
            self._keys[name]: CameraVideos(
                target / "videos" / self._keys[name], self._fps, height, width,
                max_bytes=VIDEO_MB << 20, files_in_chunk=CHUNKS_SIZE,
            )
            for name, height, width in self._shape.cameras
        }  # fmt: skip
        self._tasks: dict[str, int] = {}
        self._all = StatsSum()
        self._frames = self._episodes = 0
        self._unreadable = 0

    def close(self) -> None:
        self._data.close()
        self._index.close()
        for video in self._videos.values():
            video.close()

    def _described(self) -> dict[str, dict[str, Any]]:
        """The columns in `info.json`: what a frame holds besides its pictures."""
        state, dim, longest = self._shape.state, self._shape.action, self._found.longest
        described: dict[str, dict[str, Any]] = {}
        if state:
            described["observation.state"] = _vector(state, self._found.state_names())
        described["action"] = _vector(dim, self._found.action_names())
        if self._kind == "requests":
            # A row of numbers: LeRobot's tools that merge and split datasets cannot write matrices.
            described["chunk"] = {"dtype": "float32", "shape": [longest * dim], "names": None}
            described["chunk_is_pad"] = {"dtype": "bool", "shape": [longest], "names": None}
            described["executed"] = _single("int64")
        else:
            described["observed"] = _single("bool")
        described |= {"request_time": _single("float32"), "latency_ms": _single("float32"), "slot": _single("string")}
        described["timestamp"] = _single("float32")
        return described | {name: _single("int64") for name in ("frame_index", "episode_index", "index", "task_index")}

    # -- an episode ----------------------------------------------------------------------------------------------------

    def write(self, episode: RecordedEpisode, written: DatasetWritten, told: Callable[[], None]) -> None:
        """Its frames, pictures and statistics. Nothing is written of an episode without a frame."""
        count = self._found.count(episode)
        columns = {name: ColumnStats() for name, about in self._features.items() if about["dtype"] != "string"}
        pictures = {key: PictureStats() for key in self._videos}
        begun, tasks, rows, start = self._frames, dict[str, int](), list[Values](), 0.0
        chosen = sampled(count)
        self._data.begin()
        from_s = self._begin_videos(count)
        for number, seen in enumerate(self._seen(episode, written)):
            start = start or seen.frame.at
            task = self._tasks.setdefault(seen.frame.task, len(self._tasks))
            tasks[seen.frame.task] = task
            for name, picture in seen.pictures.items():
                if number in chosen:
                    pictures[name].add(picture)
            for values in self._rows(seen, start):
                place = self._frames - begun
                rows.append(
                    values
                    | {"timestamp": place / self._fps, "frame_index": place, "index": self._frames}
                    | {"episode_index": self._episodes, "task_index": task}
                )
                self._frames += 1
                for key, picture in seen.pictures.items():
                    self._videos[key].add(picture)
                if len(rows) >= ROWS:
                    self._flush(rows, columns)
            written.requests += 1
            told()
        if self._frames == begun:
            return
        self._flush(rows, columns)
        stats = {name: column.result() for name, column in columns.items()}
        stats |= {key: result for key, seen_of in pictures.items() if (result := seen_of.result()) is not None}
        self._all.add(stats)
        self._list(episode, list(tasks), begun, from_s, stats)
        self._episodes += 1
        if episode.success is not None:
            written.outcomes += 1
            written.successes += episode.success

    def _begin_videos(self, count: int) -> dict[str, float]:
        """When the episode starts in each camera's video, in seconds."""
        most = count if self._kind == "requests" else count * self._found.longest
        for video in self._videos.values():
            video.begin(most)
        return {key: video.seconds for key, video in self._videos.items()}

    def _seen(self, episode: RecordedEpisode, written: DatasetWritten) -> Iterator[_Seen]:
        """Its requests with decoded pictures; those with a broken one are counted."""
        frames = self._found.frames(episode)
        frame = next(frames, None)
        while frame is not None:
            after = next(frames, None)
            try:
                pictures = {self._keys[name]: decode_image(data, name) for name, data in frame.pictures.items()}
            except InvalidRequest:
                self._unreadable += 1
            else:
                executed, source = executed_between(frame, after, self._rate)
                if self._kind == "steps":
                    written.assumed += source == "assumed"
                    yield _Seen(frame, pictures, executed)
                else:
                    yield _Seen(frame, pictures, executed if source == "told" else -1)
            frame = after

    def _rows(self, seen: _Seen, start: float) -> Iterator[Values]:
        frame = seen.frame
        chunk = frame.chunk
        same = {"request_time": frame.at - start, "latency_ms": frame.latency_s * 1e3, "slot": frame.slot}
        if frame.state is not None:
            same["observation.state"] = frame.state
        if self._kind == "steps":
            for step in range(seen.executed):
                yield same | {"action": chunk[step], "observed": step == 0}
            return
        missing = self._found.longest - len(chunk)
        padded = np.concatenate([chunk, np.repeat(chunk[-1:], missing, axis=0)])  # as LeRobot pads: the last one again
        pad = np.arange(self._found.longest) >= len(chunk)
        yield same | {"action": chunk[0], "chunk": padded.reshape(-1), "chunk_is_pad": pad, "executed": seen.executed}

    def _flush(self, rows: list[Values], columns: dict[str, ColumnStats]) -> None:
        if not rows:
            return
        table = {name: _column([row[name] for row in rows], about) for name, about in self._features.items()}
        self._data.write(table)
        for name, column in columns.items():
            column.add(table[name])
        rows.clear()

    def _list(
        self, episode: RecordedEpisode, tasks: list[str], begun: int, from_s: dict[str, float],
        stats: dict[str, Statistic],
    ) -> None:  # fmt: skip
        """The episode's line in meta/episodes."""
        line: Values = {"episode_index": self._episodes, "tasks": tasks, "length": self._frames - begun}
        line |= {"episode_id": episode.episode_id, "robot_id": episode.robot, "session_id": episode.session_id}
        line |= {"slots": sorted(episode.slots), "success": episode.success}
        line |= {"data/chunk_index": self._data.place.chunk, "data/file_index": self._data.place.file}
        line |= {"dataset_from_index": begun, "dataset_to_index": self._frames}
        for key, video in self._videos.items():
            line |= {f"videos/{key}/chunk_index": video.place.chunk, f"videos/{key}/file_index": video.place.file}
            line |= {f"videos/{key}/from_timestamp": from_s[key], f"videos/{key}/to_timestamp": video.seconds}
        for feature, values in plain_stats(stats).items():
            line |= {f"stats/{feature}/{name}": value for name, value in values.items()}
        self._index.begin()
        place = self._index.place
        line |= {"meta/episodes/chunk_index": place.chunk, "meta/episodes/file_index": place.file}
        self._index.write_line(line)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def finish(self, written: DatasetWritten) -> None:
        """What stands in meta/, info.json last: without it LeRobot takes the directory for no dataset."""
        left_out = +self._found.left_out
        if self._unreadable:
            left_out["unreadable picture"] += self._unreadable
        written.left_out = dict(left_out.most_common())
        if not self._frames:
            raise ConfigError("no frame to write: no picture could be read, or no action of any chunk was executed")
        self.close()
        written.episodes, written.frames, written.tasks = self._episodes, self._frames, len(self._tasks)
        written.cameras = list(self._videos)
        meta = self._target / "meta"
        write_tasks(meta / "tasks.parquet", self._tasks)
        _write_json(meta / "stats.json", plain_stats(self._all.result()))
        told = written.as_dict() | {"recordings": [path.name for path in self._found.journals]}
        del told["path"]
        _write_json(meta / "reflex.json", told | {"reflex_version": __version__})
        _write_json(meta / "info.json", self._info())

    def _info(self) -> dict[str, Any]:
        features = {
            key: {"dtype": "video", "shape": [height, width, 3], "names": ["height", "width", "channels"]}
            | {"info": self._videos[key].info}
            for key, (_, height, width) in zip(self._keys.values(), self._shape.cameras, strict=True)
        }
        embodiment = next((h.embodiment for h in self._found.journals.values() if h.embodiment), "unknown")
        file = "chunk-{chunk_index:03d}/file-{file_index:03d}"
        return {
            "codebase_version": VERSION,
            "robot_type": embodiment,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNKS_SIZE,
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self._fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": f"data/{file}.parquet",
            "video_path": f"videos/{{video_key}}/{file}.mp4" if features else None,
            "features": features | self._features,
        }


def camera_keys(names: list[str]) -> dict[str, str]:
    """LeRobot's names of cameras: they are folders, too, so that only letters, digits and `_.-` remain."""
    keys: dict[str, str] = {}
    for name in names:
        key = f"observation.images.{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:100] or 'image'}"
        while key in keys.values():
            key += "_"
        keys[name] = key
    return keys


def _vector(dim: int, names: list[str]) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [dim], "names": names}


def _single(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1], "names": None}


def _column(values: list[Any], about: dict[str, Any]) -> NDArray[Any]:
    """Rows of one feature; what has one element is a plain column, as LeRobot has it."""
    array = np.array(values, None if about["dtype"] == "string" else about["dtype"])
    return array.reshape(len(values)) if about["shape"] == [1] else array


def _write_json(path: Path, told: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
