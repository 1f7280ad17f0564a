"""Sixteen cameras of 5, 10, 15 and 30 fps on one machine: `reflex feeds`, a process per camera, and a loop by hand.

The cameras are files that are played at their own pace, by the same source for all. A process per camera computes
each frame alone; the loop by hand has a thread per camera that keeps the newest frame, and computes what there is, up
to as many frames as `reflex feeds` may. Each keeps its newest frame while the model is busy, and writes JSON lines.
*Threads alone* is the floor of any runtime whose feeds do not wait for each other: the threads of `reflex feeds` (two a
camera, one for the model), its detector, a lock and a condition, and nothing else.

    python -m bench.cameras loop|threads MODEL SIDE LINES MOST NAME=FILE …      one by hand, until it is ended
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import psutil

from bench.detectors import answers_by_hand, write_model, write_video
from bench.report import Row, row, say
from reflex_runtime.core.statistics import percentile
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.runtime.pipeline import SourceClock
from reflex_runtime.run.coordinator import BatchEntry

RATES: Final = (5, 10, 15, 30)
EACH: Final = 4  # cameras of each rate
MOST: Final = 8  # frames of a batch
LOADS: Final = {"a light model": (160, (320, 180)), "too heavy a model": (640, (640, 360))}  # its side; of the videos
KINDS: Final = ("reflex feeds", "a process per camera", "a loop by hand", "threads alone")
UNITS: Final = {"frames answered": "%", "CPU": "% of a core", "CPU per answer": "ms", "memory": "MB"}
SECONDS: Final = 8.0


def cameras(scale: float) -> list[Row]:
    rounds = [one_round(number, scale) for number in range(max(1, round(3 * scale)))]
    return rows_of(rounds)


def one_round(number: int, scale: float) -> dict[tuple[str, str, str], float]:
    """Each load with each kind, odd rounds in the opposite order: (load, kind, figure) → value."""
    found = {}
    names = [f"cam{rate}-{k}" for rate in RATES for k in range(EACH)]
    for load, (side, size) in LOADS.items():
        with tempfile.TemporaryDirectory(prefix="reflex-cameras-") as root:
            folder = Path(root)
            model = write_model(folder / "yolo.onnx", side)
            for k, name in enumerate(names):
                rate = int(name[3:].partition("-")[0])
                write_video(folder / f"{name}.mp4", k, 2 * rate, size, rate)
            for kind in KINDS[:: 1 if number % 2 else -1]:
                say(f"cameras: round {number + 1}, {load}, {kind}")
                for what, value in _measured(kind, folder, model, side, names, max(3.0, SECONDS * scale)).items():
                    found[load, kind, what] = value
    return found


def rows_of(rounds: Sequence[dict[tuple[str, str, str], float]]) -> list[Row]:
    what = f"{4 * EACH} cameras, {EACH * sum(RATES)} frames a second"
    return [
        row("cameras", f"{what}, {load}, {kind}: {figure}", [each[load, kind, figure] for each in rounds], unit)
        for load, kind, figure in rounds[0]
        for unit in [UNITS.get(figure, "ms")]
    ]


def _measured(
    kind: str, folder: Path, model: Path, side: int, names: Sequence[str], seconds: float
) -> dict[str, float]:
    with ExitStack() as closing:
        lines = [folder / "lines.jsonl"]
        feeds = [f"{name}={folder / name}.mp4" for name in names]
        if kind == "reflex feeds":
            options = ["--onnx", str(model), "--max-batch-size", str(MOST), "--realtime", "--loop"]
            commands = [["-m", "reflex_runtime", "feeds", *feeds, *options, "--results", str(lines[0])]]
        elif kind != "a process per camera":
            how = "loop" if kind == "a loop by hand" else "threads"
            commands = [["-m", "bench.cameras", how, str(model), str(side), str(lines[0]), str(MOST), *feeds]]
        else:
            lines = [folder / f"lines-{name}.jsonl" for name in names]
            together = zip(lines, feeds, strict=True)
            common = ["-m", "bench.cameras", "loop", str(model), str(side)]
            commands = [[*common, str(own), "1", feed] for own, feed in together]
        for file in lines:
            file.unlink(missing_ok=True)
        processes = [psutil.Popen([sys.executable, *command], stderr=subprocess.PIPE) for command in commands]
        for process in processes:
            closing.callback(_end, process)
        while not all(file.exists() and file.stat().st_size for file in lines):
            time.sleep(0.2)
        time.sleep(2.0)
        began, used, sizes = time.monotonic(), _cpu(processes), [file.stat().st_size for file in lines]
        time.sleep(seconds)
        cpu, taken = _cpu(processes) - used, time.monotonic() - began
        memory = sum(process.memory_full_info().pss for process in processes) / 1e6
    results = [line for file, size in zip(lines, sizes, strict=True) for line in _lines(file, size)]
    ages = sorted(line["latency_ms"] for line in results)
    share = len(results) / sum(_made([line["sequence"] for line in results if line["feed"] == name]) for name in names)
    return {
        "frames answered": 100 * share,
        "age p50": percentile(ages, 0.5),
        "age p95": percentile(ages, 0.95),
        "CPU": 100 * cpu / taken,
        "CPU per answer": 1e3 * cpu / max(1, len(results)),
        "memory": memory,
    }


def _made(sequences: Sequence[int]) -> int:
    return max(sequences) - min(sequences) + 1 if sequences else 1


def _lines(file: Path, size: int) -> list[Any]:
    data = file.read_bytes()[size:]
    return [json.loads(line) for line in data[data.find(b"\n") + 1 :].splitlines()]


def _cpu(processes: Sequence[Any]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))


def _end(process: Any) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


# -- by hand -----------------------------------------------------------------------------------------------------------


def _pictures(feed: str) -> Iterator[tuple[str, int, float, Any]]:
    """Name, number, time and picture of a camera: a file that is played at its own pace, for ever."""
    from reflex_runtime.feeds.sources.video import VideoSource

    name, _, file = feed.partition("=")
    source, clock = VideoSource(file, loop=True), SourceClock(live=False)
    source.open()
    for number in count():
        if (found := source.read()) is None:
            return
        clock.time(found[1], 0.0, source.step)
        time.sleep(clock.ahead(time.monotonic()))
        yield name, number, time.monotonic(), found[0]


def _loop(model: Path, side: int, lines: Path, most: int, feeds: Sequence[str]) -> None:
    import cv2

    from reflex_runtime.run.onnx_session import CPU, OnnxSession

    session = OnnxSession(model, provider=CPU)
    newest: dict[str, tuple[int, float, Any]] = {}
    change = threading.Condition()

    def read(feed: str) -> None:
        for name, number, came, image in _pictures(feed):
            with change:
                newest[name] = (number, came, image)
                change.notify()

    for feed in feeds:
        threading.Thread(target=read, args=(feed,), daemon=True).start()
    with lines.open("w", buffering=1, encoding="utf-8") as out:
        while True:
            with change:
                change.wait_for(lambda: newest)
                names = list(newest)[:most]
                frames = [newest.pop(name) for name in names]
            answers = answers_by_hand(session, [image for _, _, image in frames], cv2, side)
            for name, (number, came, _), value in zip(names, frames, answers, strict=True):
                out.write(_line(name, number, came, value))


def _threads(model: Path, side: int, lines: Path, most: int, feeds: Sequence[str]) -> None:
    detector = OnnxFrames(model)
    detector.on_start()
    waiting: deque[tuple[BatchEntry, SimpleQueue[Any]]] = deque()
    change = threading.Condition()

    def read(feed: str, newest: deque[Any], came: threading.Semaphore) -> None:
        for picture in _pictures(feed):
            newest.append(picture)
            came.release()

    def ask(newest: deque[Any], came: threading.Semaphore) -> None:
        answers: SimpleQueue[Any] = SimpleQueue()
        while came.acquire():
            if not newest:  # one that made way
                continue
            name, number, at, image = newest.popleft()
            entry = BatchEntry(name, image, detector.prepare(image), number, None, at)
            with change:
                waiting.append((entry, answers))
                change.notify()
            out.write(_line(name, number, at, answers.get()))

    with lines.open("w", buffering=1, encoding="utf-8") as out:
        for feed in feeds:
            shared: tuple[deque[Any], threading.Semaphore] = deque(maxlen=1), threading.Semaphore(0)
            threading.Thread(target=read, args=(feed, *shared), daemon=True).start()
            threading.Thread(target=ask, args=shared, daemon=True).start()
        while True:
            with change:
                change.wait_for(lambda: waiting)
                batch = [waiting.popleft() for _ in range(min(most, len(waiting)))]
            for (_, answers), value in zip(batch, detector.process([entry for entry, _ in batch]), strict=True):
                answers.put(value)


def _line(name: str, number: int, came: float, value: Any) -> str:
    age = round(1e3 * (time.monotonic() - came), 3)
    return json.dumps({"feed": name, "sequence": number, "latency_ms": age, "value": value}) + "\n"


if __name__ == "__main__":
    _run = {"loop": _loop, "threads": _threads}[sys.argv[1]]
    _run(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
