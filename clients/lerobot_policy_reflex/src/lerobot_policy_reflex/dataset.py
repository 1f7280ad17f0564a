"""Makes a LeRobotDataset of the recordings of `reflex serve --record DIR --record-images full`.

    python -m lerobot_policy_reflex.dataset ./recordings --root ./fleet

A recording has an observation and a chunk of actions for each request. Two ways to make frames of it:

`requests`  one frame a request, with all that was recorded: the observation, the first action, the whole chunk.
`steps`     one frame a control step: the executed actions of each chunk. The observation of a frame is that of its
            request; `observed` marks the frames of that moment.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import PIL.Image
from lerobot.datasets.lerobot_dataset import LeRobotDataset

SCHEMA_VERSIONS: Final = (1, 2)  # of Reflex's journals, alike in what is read here; docs/journal.md describes them

Line = dict[str, Any]
Key = tuple[str, str, str]  # session, episode, robot: a server that starts again may see the same episode id again
Shape = tuple[int, tuple[tuple[str, int, int], ...], int]  # state; cameras with height and width; action


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of a journal; after a crash, up to the last whole line."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        try:
            for line in file:
                yield json.loads(line)
        except (EOFError, json.JSONDecodeError):
            return


@dataclass
class Episode:
    """A robot's answered requests: (time, place in the scratch file, shape); and the reported outcome."""

    key: Key
    turns: int = 0
    frames: list[tuple[float, int, Shape]] = field(default_factory=list)
    success: bool | None = None


class Recordings:
    """All episodes of journals, kept in the file `scratch`: memory holds one request at a time.

    episode: id of the only one to keep. policy: the one to read, where several were served. left_out: requests that
    make no frame, by the reason. shape: the most frequent; frames of others are left out.
    """

    def __init__(
        self, paths: Sequence[Path], scratch: IO[bytes], episode: str | None = None, policy: str | None = None
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self.about: Line = {}
        self.longest = 0  # actions in a chunk
        self._file = scratch
        self._wanted, self._prefix = episode, f"{policy}." if policy else ""
        found: defaultdict[Key, Episode] = defaultdict(lambda: Episode(("", "", "")))
        ends: dict[tuple[str, str], bool] = {}
        files = [file for path in paths for file in (sorted(path.glob("*.jsonl*")) if path.is_dir() else [path])]
        if not files:
            raise SystemExit(f"{', '.join(map(str, paths))}: no recordings (.jsonl, .jsonl.gz) there")
        for path in files:
            lines = lines_of(path)
            header = next(lines, {})
            if header.get("kind") != "header" or header.get("schema_version") not in SCHEMA_VERSIONS:
                raise SystemExit(f"{path}: no journal of version 1 or 2: `reflex serve --record` writes one")
            if header.get("served") and policy not in header["served"]:
                raise SystemExit(f"{path}: has several policies: choose {' or '.join(header['served'])} with --policy")
            self.about = self.about or header | (header["served"][policy] if header.get("served") else {})
            for line in lines:
                if line["kind"] == "request" and line["slot"].startswith(self._prefix):
                    why = self._add(found, header["session_id"], line)
                    self.left_out.update([why] if why else [])
                elif (line["kind"], line.get("policy")) == ("outcome", policy) and isinstance(line["success"], bool):
                    ends.setdefault((header["session_id"], line["episode_id"]), line["success"])
        shapes = Counter(shape for known in found.values() for _, _, shape in known.frames)
        if not shapes:
            raise SystemExit(f"no frame in {len(files)} files: {dict(self.left_out)}; record with --record-images full")
        self.shape: Shape = shapes.most_common(1)[0][0]
        self.left_out["another shape"] += shapes.total() - shapes[self.shape]
        robots = Counter(key[:2] for key in found)  # an outcome names no robot: with two it is nobody's
        self.episodes = [known for known in found.values() if any(shape == self.shape for *_, shape in known.frames)]
        for known in self.episodes:
            known.success = ends.get(known.key[:2]) if robots[known.key[:2]] == 1 else None

    def _add(self, found: dict[Key, Episode], session: str, line: Line) -> str:
        """Keep a request as a frame. Returns the reason if it makes none, else ""."""
        asked, answer = line["request"], line["response"]
        if not answer or answer["actions"] is None:
            return str(line["outcome"])
        if not asked["episode_id"] or self._wanted not in (None, asked["episode_id"]):
            return "another episode" if asked["episode_id"] else "no episode_id"
        key = session, asked["episode_id"], asked["robot_id"] or ""
        known = found[key]
        known.key, known.turns = key, known.turns + 1
        pictures = asked.get("image_b64") or {}
        pictures = pictures if isinstance(pictures, dict) else {"image": pictures}
        if asked.get("image_sha256") and not pictures:
            return "pictures recorded as hashes only"
        state = np.array([float(v) for v in asked["state"] or ()], np.float32)
        actions = np.array(answer["actions"], np.float64).astype(np.float32)
        if not actions.size or not np.isfinite(actions).all() or not np.isfinite(state).all():
            return "numbers that are not finite"
        try:
            sizes = tuple((name, *pixels(pictures[name]).shape[:2]) for name in sorted(pictures))
        except (OSError, ValueError):
            return "unreadable picture"
        known.frames.append((line["arrival"], self._file.tell(), (len(state), sizes, actions.shape[1])))
        self.longest = max(self.longest, len(actions))
        executed = (line.get("rtc") or {}).get("executed") if asked["executed"] is None else asked["executed"]
        self._file.write(json.dumps({
            "at": line["arrival"], "turn": known.turns, "latency": line["latency"]["total_ms"] / 1e3,
            "task": asked["instruction"] or "", "slot": line["slot"].removeprefix(self._prefix), "executed": executed,
            "state": state.tolist(), "actions": actions.tolist(), "pictures": pictures,
        }).encode() + b"\n")  # fmt: skip
        return ""

    def frames(self, episode: Episode) -> Iterator[Line]:
        """Its frames of the chosen shape, in the order of their times."""
        for _, place, shape in sorted(episode.frames):
            if shape == self.shape:
                self._file.seek(place)
                yield json.loads(self._file.readline())

    def interval(self) -> float:
        """Median seconds between two frames of an episode; 1 if no episode has two."""
        gaps = [np.diff(sorted(at for at, _, shape in e.frames if shape == self.shape)) for e in self.episodes]
        found = np.concatenate(gaps)
        return float(np.median(found)) or 1.0 if len(found) else 1.0


def pixels(text: str) -> np.ndarray[Any, Any]:
    """uint8 [height, width, 3] of a PNG or JPEG in base64."""
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def executed_between(frame: Line, after: Line | None, rate: float) -> tuple[int, bool]:
    """The number of executed actions of a chunk, and whether the robot reported it.

    It is in the next request, or follows from the time between the answer and that request at the control rate. Of the
    last chunk of an episode, and of one before a left-out answer, only the first action is known to have begun.
    """
    if after is None or after["turn"] != frame["turn"] + 1:
        return 1, False
    if after["executed"] is not None:
        return min(after["executed"], len(frame["actions"])), True
    done = int((after["at"] - frame["at"] - frame["latency"]) * rate + 1e-6)
    return min(max(done, 0), len(frame["actions"])), False


def write_dataset(found: Recordings, root: Path, kind: str = "requests", fps: int | None = None) -> LeRobotDataset:
    """Write the episodes to `root`, a new directory. fps: by default the control rate (`steps`), or the median rate of
    requests (`requests`). `meta/reflex.json` has each episode's ids and outcome."""
    control: float | None = found.about.get("control_rate_hz")
    if kind == "steps" and not (fps or control):
        raise SystemExit("--frames=steps: the recording does not have the control rate; give it with --fps")
    rate: float = fps or (control if kind == "steps" and control else 1.0 / found.interval())
    dataset = LeRobotDataset.create(
        "local/reflex",
        fps=max(1, round(rate)),
        features=_features(found, kind),
        root=root,
        robot_type=found.about.get("embodiment") or "unknown",
        use_videos=bool(found.shape[1]),
    )
    root.chmod(0o700)  # it has pictures of cameras
    written = []
    for episode in found.episodes:
        added = 0
        for frame, after in _pairs(found.frames(episode)):
            for values in _rows(found, kind, frame, *executed_between(frame, after, control or rate)):
                dataset.add_frame(values | {"request_time": _one(frame["at"] - min(episode.frames)[0])})
                added += 1
        if added:
            dataset.save_episode()
            ids = zip(("session_id", "episode_id", "robot_id"), episode.key, strict=True)
            written.append(dict(ids) | {"success": episode.success})
    dataset.finalize()
    about = {"frames": kind, "episodes": written, "left_out": dict(+found.left_out)}
    (root / "meta" / "reflex.json").write_text(json.dumps(about, indent=1) + "\n")
    return dataset


def _pairs(frames: Iterator[Line]) -> Iterator[tuple[Line, Line | None]]:
    """Each frame with the next one of its episode."""
    before = next(frames, None)
    while before is not None:
        after = next(frames, None)
        yield before, after
        before = after


def _features(found: Recordings, kind: str) -> dict[str, dict[str, Any]]:
    state, cameras, action = found.shape

    def vector(name: str, size: int) -> dict[str, Any]:
        told = found.about.get(f"{name}_names") or []
        return {"dtype": "float32", "shape": (size,), "names": told if len(told) == size else None}

    one = {"float32": {"dtype": "float32", "shape": (1,), "names": None}}
    features = {"action": vector("action", action), "request_time": one["float32"], "latency_ms": one["float32"]}
    features |= {"observation.state": vector("state", state)} if state else {}
    for name, height, width in cameras:
        if camera(name) in features:
            raise SystemExit(f"cameras: {name!r} and another are both {camera(name)} in a dataset")
        shape = {"shape": (height, width, 3), "names": ["height", "width", "channels"]}
        features[camera(name)] = {"dtype": "video"} | shape
    features["slot"] = {"dtype": "string", "shape": (1,), "names": None}
    if kind == "steps":
        return features | {"observed": {"dtype": "bool", "shape": (1,), "names": None}}
    # A row of numbers: LeRobot's tools that merge and split datasets cannot write matrices.
    features["chunk"] = {"dtype": "float32", "shape": (found.longest * action,), "names": None}
    features["chunk_is_pad"] = {"dtype": "bool", "shape": (found.longest,), "names": None}
    return features | {"executed": {"dtype": "int64", "shape": (1,), "names": None}}


def camera(name: str) -> str:
    """LeRobot's name of a camera. It is also a folder, so only letters, digits and `_.-` remain."""
    return f"observation.images.{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:100] or 'image'}"


def _rows(found: Recordings, kind: str, frame: Line, executed: int, told: bool) -> Iterator[dict[str, Any]]:
    """The frames of a request: itself, or its executed actions."""
    actions = np.array(frame["actions"], np.float32)
    row = {"task": frame["task"], "slot": frame["slot"], "latency_ms": _one(frame["latency"] * 1e3)}
    row |= {camera(name): pixels(picture) for name, picture in frame["pictures"].items()}
    row |= {"observation.state": np.array(frame["state"], np.float32)} if found.shape[0] else {}
    if kind == "steps":
        yield from (row | {"action": actions[n], "observed": np.array([n == 0])} for n in range(executed))
        return
    missing = found.longest - len(actions)
    chunk = np.concatenate([actions, np.repeat(actions[-1:], missing, axis=0)])  # LeRobot pads with the last action
    row |= {"chunk": chunk.reshape(-1), "chunk_is_pad": np.arange(found.longest) >= len(actions)}
    yield row | {"action": actions[0], "executed": np.array([executed if told else -1])}


def _one(value: float) -> np.ndarray[Any, Any]:
    return np.array([value], np.float32)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lerobot_policy_reflex.dataset", description=__doc__.split("\n")[0])
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE|DIR", help="recordings, or directories of them")
    parser.add_argument("--root", type=Path, required=True, metavar="DIR", help="where to write; must not exist")
    parser.add_argument("--frames", choices=("requests", "steps"), default="requests", help="one frame for each")
    parser.add_argument("--fps", type=int, metavar="N", help="frames a second instead of the recorded rate")
    parser.add_argument("--episode", metavar="ID", help="only the episode with this id")
    parser.add_argument("--policy", metavar="NAME", help="the policy to read, where several were served")
    args = parser.parse_args(words)
    if args.root.exists():
        parser.error(f"--root={args.root}: exists; name a new directory")
    with tempfile.TemporaryFile() as scratch:
        found = Recordings(args.paths, scratch, args.episode, args.policy)
        dataset = write_dataset(found, args.root, args.frames, args.fps)
    print(f"{args.root}: {dataset.num_episodes} episodes, {dataset.num_frames} frames at {dataset.fps} fps")
    for why, count in (+found.left_out).items():
        print(f"left out: {count} requests: {why}")


if __name__ == "__main__":
    main()
