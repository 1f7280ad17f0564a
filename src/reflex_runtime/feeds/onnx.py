"""Any image model as a batch processor: pictures of many cameras in, one call, each camera's result out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.drivers.batch_processor import BatchEntry
from reflex_runtime.processors.onnx import PROVIDERS, OnnxSession, shown

_FOUND: Final = ("boxes", "scores", "labels")  # outputs that make a graph a detector


class OnnxFrames:
    """Runs an ONNX graph on RGB pictures.

    path: the graph. It has one input, [n, 3, h, w] or [n, h, w, 3], uint8 or floating. A leading axis fixed at 1 is
        served as well, one picture after the other.
    id: names it in metrics and events.
    provider: "cpu", "cuda", or an execution provider's own name. threads: intra-op threads of a call.
    score: detections below it are left out, 0 … 1.
    size: width and height that pictures are brought to. Needed where the graph's are symbolic; otherwise the graph's.
    mean, std: of a floating input, one number or one per channel: it gets (pixel / 255 - mean) / std.
    warm_up: sizes of batches that are run before the first real one, so that no frame pays for a first call.

    Pictures of other sizes are stretched (bilinear), so pictures of many sizes share a batch.

    A graph with outputs `boxes` [n, k, 4] (x0, y0, x1, y1 in pixels of its input), `scores` and `labels` [n, k] is a
    detector. Its result is {"boxes": [[x0, y0, x1, y1], …] in pixels of the frame as it came in, "scores": [float, …],
    "labels": [name, …]}, in the graph's order. Names come from the graph's metadata, key `names`: a JSON list, or an
    object by number. Without them labels are numbers. Any other graph's result is {output: array without batch axis}.

    A frame that is no uint8 [h, w, 3] picture fails alone. Wrong settings raise ConfigError, those that only the graph
    can show when `on_start` reads it.
    """

    repeatable = True

    def __init__(
        self,
        path: str | Path,
        id: str = "onnx",
        provider: str = "cpu",
        threads: int = 1,
        score: float = 0.5,
        *,
        size: tuple[int, int] | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        warm_up: Sequence[int] = (1,),
    ) -> None:
        if not 0.0 <= score <= 1.0:
            raise ConfigError(f"score={score!r}: must be 0 … 1")
        if size is not None and not (len(size) == 2 and min(size) >= 1):
            raise ConfigError(f"size={size!r}: must be a width and a height >= 1")
        if any(n < 1 for n in warm_up):
            raise ConfigError(f"warm_up={tuple(warm_up)!r}: batch sizes must be >= 1")
        if not threads >= 1:
            raise ConfigError(f"threads={threads!r}: must be >= 1")
        self.id, self.path, self.score, self.size = id, Path(path), score, size
        self._provider, self._threads = PROVIDERS.get(provider, provider), threads
        self._mean, self._std = _per_channel("mean", mean), _per_channel("std", std)
        if not (self._std > 0).all():
            raise ConfigError(f"std={std!r}: must be > 0")
        self._plain = not self._mean.any() and bool((self._std == 1.0).all())
        self._warm_up = tuple(warm_up)
        self._session: OnnxSession | None = None
        self._names: dict[int, str] = {}

    def on_start(self) -> None:
        """Load the graph and run it once per size of `warm_up`. Raises ConfigError."""
        session = OnnxSession(self.path, provider=self._provider, threads=self._threads)
        self._input, self._last, self.size = self._read(session)
        self._detector = set(_FOUND) <= set(session.outputs)
        if self._detector:
            self._check_detector(session)
        self._names = _names_of(session)
        self._session = session
        width, height = self.size
        for n in self._warm_up:
            self._run([np.zeros((height, width, 3), np.uint8)] * n)

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        """One result per entry, or a ProcessorError in its place."""
        results: list[Any] = [_fault(entry.frame) for entry in entries]
        fine = [entry.frame for entry, fault in zip(entries, results, strict=True) if fault is None]
        answers = iter(self._run(fine) if fine else ())
        return [next(answers) if fault is None else fault for fault in results]

    def on_stop(self) -> None:
        """Release the graph and its memory."""
        self._session = None

    # -- one call ------------------------------------------------------------------------------------------------------

    def _run(self, frames: Sequence[NDArray[np.uint8]]) -> list[dict[str, Any]]:
        if self._session is None:
            raise ProcessorError(f"{self.path}: not started")
        outputs = self._session.run({self._input: self._tensor(frames)})
        if self._detector:
            return [self._detections(outputs, i, frame) for i, frame in enumerate(frames)]
        return [{name: array[i] for name, array in outputs.items()} for i in range(len(frames))]

    def _tensor(self, frames: Sequence[NDArray[np.uint8]]) -> NDArray[Any]:
        """The pictures at the graph's size, in its order of axes and its type."""
        assert self._session is not None
        assert self.size is not None
        width, height = self.size
        pixels = np.empty((len(frames), height, width, 3), np.uint8)
        for place, frame in zip(pixels, frames, strict=True):
            place[:] = frame if frame.shape == place.shape else _stretched(frame, self.size)
        if not self._last:
            pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        dtype = self._session.inputs[self._input].dtype
        if dtype == np.uint8:
            return pixels
        scaled = pixels.astype(np.float32) / np.float32(255.0)
        if not self._plain:
            channels = (3,) if self._last else (3, 1, 1)
            scaled = (scaled - self._mean.reshape(channels)) / self._std.reshape(channels)
        return scaled.astype(dtype, copy=False)

    def _detections(self, outputs: dict[str, NDArray[Any]], i: int, frame: NDArray[np.uint8]) -> dict[str, Any]:
        assert self.size is not None
        scores = outputs["scores"][i]
        kept = scores >= self.score
        across, down = frame.shape[1] / self.size[0], frame.shape[0] / self.size[1]
        boxes = outputs["boxes"][i][kept].astype(np.float64) * (across, down, across, down)
        labels = [int(label) for label in outputs["labels"][i][kept]]
        return {
            "boxes": boxes.tolist(),
            "scores": scores[kept].tolist(),
            "labels": [self._names.get(label, label) for label in labels] if self._names else labels,
        }

    # -- what the graph says -------------------------------------------------------------------------------------------

    def _read(self, session: OnnxSession) -> tuple[str, bool, tuple[int, int]]:
        """The input's name, whether its channels come last, and the size that pictures are brought to."""
        if len(session.inputs) != 1:
            raise ConfigError(f"{self.path}: found the inputs {sorted(session.inputs)}, expected one, for pictures")
        ((name, port),) = session.inputs.items()
        where = f"{self.path}: input {name!r}"
        found = shown(port.dims)
        if len(port.dims) != 4 or 3 not in (port.dims[1], port.dims[3]):
            raise ConfigError(f"{where}: found {found}, expected [n, 3, h, w] or [n, h, w, 3]")
        if port.dtype != np.uint8 and port.dtype.kind != "f":
            raise ConfigError(f"{where}: found {port.dtype}, expected uint8 or floating")
        if port.dtype == np.uint8 and not self._plain:
            raise ConfigError(f"mean, std: {where} takes uint8, so there is nothing to scale")
        last = port.dims[1] != 3
        height, width = port.dims[1:3] if last else port.dims[2:4]
        if self.size is None:
            if width is None or height is None:
                raise ConfigError(f"{where}: takes any size of picture, {found}; choose one: size=(width, height)")
            return name, last, (width, height)
        if width not in (None, self.size[0]) or height not in (None, self.size[1]):
            raise ConfigError(f"size={self.size}: {where} takes width {width} and height {height}")
        return name, last, self.size

    def _check_detector(self, session: OnnxSession) -> None:
        for name, rank in zip(_FOUND, (3, 2, 2), strict=True):
            dims = session.outputs[name].dims
            if len(dims) != rank or (rank == 3 and dims[2] not in (4, None)):
                expected = "[n, k, 4]" if rank == 3 else "[n, k]"
                raise ConfigError(f"{self.path}: output {name!r}: found {shown(dims)}, expected {expected}")


def _fault(frame: Any) -> ProcessorError | None:
    if not isinstance(frame, np.ndarray):
        return ProcessorError(f"frame: found {type(frame).__name__}, expected a uint8 array [h, w, 3]")
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
        return ProcessorError(f"frame: found {frame.dtype} {list(frame.shape)}, expected uint8 [h, w, 3]")
    return None


def _stretched(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))


def _per_channel(name: str, value: float | Sequence[float]) -> NDArray[np.float32]:
    array = np.asarray(value, np.float32)
    if array.shape not in ((), (1,), (3,)) or not np.isfinite(array).all():
        raise ConfigError(f"{name}={value!r}: must be a finite number, or three of them")
    return np.broadcast_to(array, (3,)).copy()


def _names_of(session: OnnxSession) -> dict[int, str]:
    """Label names by number. Metadata that cannot be read gives no names."""
    text = session.metadata.get("names", "")
    try:
        found = json.loads(text) if text else {}
        pairs = found.items() if isinstance(found, dict) else enumerate(found)
        return {int(number): str(name) for number, name in pairs}
    except (ValueError, TypeError):
        return {}
