"""From a model directory to the OpenVINO graph that is served: that of an export, or one that is made of a checkpoint.

`optimum-cli export openvino` writes an export. Its graph runs unchanged, whatever the architecture: inputs and state
are in the graph, other numbers in `config.json`. A graph that cannot be served raises ConfigError with the file.

The graph of a known architecture is built at each start, in a tenth of a second: its weights stay in the checkpoint's
files. Rounding and tracing take longer and are done once. Their result is kept in `--cache-dir`, else beside the
checkpoint, or if that is not writable, in the user's cache; never only a part of it. Its name changes with the
configuration, any weight file, the form of the graph and the libraries that made it. One process converts at a time;
others wait and then use its graph.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import needed_by
from reflex_runtime.llm.runners.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    AnyModelConfig,
    Checkpoint,
    ModelConfig,
    is_known,
    longest,
    number,
    require,
    weight_files,
)
from reflex_runtime.run.model_files import read_object
from reflex_runtime.run.process import telemetry_off

log = logging.getLogger("reflex.llm")
T = TypeVar("T")

MODEL_FILE: Final = "openvino_model.xml"
TRACED_FILE: Final = "traced.json"  # only in graphs that we traced: the window of each layer
TRACED_VERSION: Final = 1  # changes with the form of these graphs
PROBE_FILE: Final = "probe.npy"  # only in graphs that we traced: logits of transformers after the tokens of `probe`
CACHE_DIR: Final = ".reflex"
_BITS: Final = {"int8": 8, "int4": 4}
_INPUTS: Final = {"input_ids", "attention_mask", "position_ids", "beam_idx"}
_DRAFT: Final = "draft-"
_TRACING: Final = "reflex_runtime.llm.runners.openvino_tracing"
_PACKAGE: Final = Path(__file__).resolve().parents[2]  # many users may share it: nothing is written there
_PLACES, _PIECE = 16, 4096  # pieces of a weight file in its key, and their bytes: its time may be a constant


@dataclass(frozen=True, slots=True)
class OpenVinoExport(AnyModelConfig):
    """The description of an export. windows: a sliding window or None for each layer, but in no known order."""

    windows: tuple[int | None, ...]

    @classmethod
    def open(cls, directory: Path | str) -> OpenVinoExport:
        """Read and check the description and the graph. Weights stay in their file."""
        root = Path(directory)
        file = root / MODEL_FILE
        config = read_object(root / CONFIG_FILE)
        config = config.get("text_config") or config
        graph = read_graph(root)
        inputs = {port.get_any_name() for port in graph.inputs}
        outputs = {name for port in graph.outputs for name in port.get_names()}
        states = [node for node in graph.get_ops() if node.get_type_name() == "ReadValue"]
        if not {"input_ids"} <= inputs <= _INPUTS or "logits" not in outputs:
            found = f"{', '.join(sorted(inputs))} to {', '.join(sorted(outputs))}"
            raise ConfigError(f"{file}: computes {found}: must be a decoder from input_ids to logits")
        if not states:
            why = "has no state for keys and values; export it with --task text-generation-with-past"
            raise ConfigError(f"{file}: {why}")
        shapes = [list(node.get_output_partial_shape(0)) for node in states]
        fixed = [[size.get_length() for size in shape if size.is_static] for shape in shapes]
        if len(states) % 2 or any(len(shape) - len(sizes) != 2 for shape, sizes in zip(shapes, fixed, strict=True)):
            raise ConfigError(f"{file}: keeps other state than keys and values of tokens; such a model is not served")
        width = graph.output("logits").get_partial_shape()[2]
        return cls(
            number(root, config, "vocab_size") if width.is_dynamic else width.get_length(),
            longest(root, config),
            str(config.get("torch_dtype") or config.get("dtype")),
            sum(prod(sizes) for sizes in fixed),
            _windows(root, config, len(states) // 2),
        )


def is_export(directory: Path | str) -> bool:
    """Whether the directory holds an export, but no checkpoint: that would be served instead."""
    root = Path(directory)
    weights = (root / WEIGHTS_FILE, root / INDEX_FILE)
    return (root / MODEL_FILE).is_file() and not any(file.is_file() for file in weights)


def read_graph(root: Path) -> Any:
    """The `openvino.Model` of an export. Raises ConfigError if it cannot be read."""
    telemetry_off()
    with needed_by(f"{root / MODEL_FILE}:"):
        import openvino
    try:
        return openvino.Core().read_model(root / MODEL_FILE)
    except RuntimeError as error:
        raise ConfigError(f"{root / MODEL_FILE}: cannot be read: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    """The line of OpenVINO's messages that says what is wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _windows(root: Path, config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """The windows of an export. Without `layer_types` in the description at least one layer is expected to have one."""
    traced = root / TRACED_FILE
    if traced.is_file():
        return tuple(read_object(traced)["windows"])
    window = config.get("sliding_window")
    if type(window) is not int or config.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = config.get("layer_types") or ["sliding_attention"]
    windowed = min(kinds.count("sliding_attention"), layers)
    return (window,) * windowed + (None,) * (layers - windowed)


@dataclass(frozen=True, slots=True)
class GraphCache:
    """The place of graphs that were made of a model directory.

    directory: for all models. None: `.reflex` in the model's directory, or if that is not writable or the model is part
    of this package, the user's cache directory (`user_cache`).
    """

    root: Path
    directory: Path | None = None

    def graph(self, core: Any, kind: str, key: str, build: Callable[[], Any]) -> Any:
        """The graph of that kind and key: from the cache, else built and if possible kept there."""
        import openvino

        built: list[Any] = []

        def write(draft: Path) -> None:
            built.append(build())
            try:
                openvino.save_model(built[0], draft / MODEL_FILE, compress_to_fp16=False)
            except RuntimeError as error:  # the disk is full
                raise OSError(last_line(error)) from error

        # read from disk even if just built: its memory is then the file's, which is shared and can be reclaimed
        found = self.kept(kind, key, write, lambda place: core.read_model(place / MODEL_FILE))
        if found is not None:
            return found
        return built[0] if built else build()

    def kept(self, kind: str, key: str, write: Callable[[Path], object], read: Callable[[Path], T]) -> T | None:
        """What `read` makes of the directory of that kind and key. If the directory is absent or cannot be read, it is
        first written, by one process at a time. None if nothing can be kept."""
        place = self._place(kind, key)
        if (found := _read(place, read)) is not None:
            return found
        with _alone(place.parent):
            if (found := _read(place, read)) is not None:
                return found
            started = time.perf_counter()
            log.info("%s: converting to OpenVINO, %s, once", self.root, kind)
            shutil.rmtree(place, ignore_errors=True)  # it could not be read
            if not self._keep(place, kind, write):
                return None
            log.info("%s: converted in %.1f s", place, time.perf_counter() - started)
            return _read(place, read)

    def key(self, files: list[Path], *made_by: object) -> str:
        """A name that changes with the configuration, with any of these files, and with what made the graph."""
        digest = hashlib.sha256((self.root / CONFIG_FILE).read_bytes())
        for file in files:
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
            with file.open("rb") as weights:
                for place in range(_PLACES):
                    weights.seek(place * max(0, status.st_size - _PIECE) // (_PLACES - 1))
                    digest.update(weights.read(_PIECE))
        digest.update(" ".join(str(one) for one in (*made_by, version("openvino"))).encode())
        return digest.hexdigest()[:16]

    def _place(self, kind: str, key: str) -> Path:
        """Where the graph is, or will be."""
        path, name, folder = self.root.resolve(), f"openvino-{kind}-{key}", self.directory or user_cache()
        own = self.root / CACHE_DIR / name
        if folder is None:
            return own
        other = folder / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}" / name
        if self.directory is not None or path.is_relative_to(_PACKAGE):
            return other
        if os.path.isdir(own) or _writable(own.parent):
            return own
        if not os.path.isdir(other):
            log.info("%s: cannot be written; the converted model is kept in %s", own.parent, other.parent)
        return other

    def _keep(self, place: Path, kind: str, write: Callable[[Path], object]) -> bool:
        """Write a draft, remove older graphs of the kind, and move the draft to its place; False if that fails."""
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=place.parent, ignore_cleanup_errors=True) as name:
                draft = Path(name)
                write(draft)
                draft.chmod(place.parent.stat().st_mode & 0o777)  # all who may read the folder may use the graph
                for stale in place.parent.glob(f"openvino-{kind}-*"):
                    if stale != place:
                        shutil.rmtree(stale, ignore_errors=True)
                draft.rename(place)
        except OSError as error:
            if not os.path.isdir(place):
                why = "the converted model cannot be kept, so each start converts again"
                log.warning("%s: %s: %s; name another place with --cache-dir", place, why, error)
                return False
        return True


def user_cache() -> Path | None:
    """`reflex` in the user's cache directory: $XDG_CACHE_HOME, else ~/.cache. None if the user has no home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "reflex" if folder.is_absolute() else None


def _writable(folder: Path) -> bool:
    """Whether files can be made there; the folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process converts there; do without if the folder cannot be locked."""
    with ExitStack() as held:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(f"{_DRAFT}*"):  # left by a process that was killed during a conversion
                shutil.rmtree(left, ignore_errors=True)
        yield


def _read(place: Path, read: Callable[[Path], T]) -> T | None:
    """What `read` makes of the directory; None if there is none, or it cannot be read."""
    if not os.path.isdir(place):  # Path.is_dir raises where access is denied
        return None
    try:
        return read(place)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        log.warning("%s: cannot be read and is converted again: %s", place, last_line(error))
        return None


def run_converter(command: list[str]) -> None:
    """Run the converter in a process, whose end frees its memory. Raises ConfigError with its last line if it fails."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("reflex: "):
                log.info("%s", line.removeprefix("reflex: ").strip())
            elif line.strip():
                last = line.strip()
    if program.returncode < 0:  # then the last line is not the cause
        what = f"the conversion was ended by signal {-program.returncode}"
        why = "most often for lack of memory: it holds the weights in float32"
        raise ConfigError(f"{what}, {why}; convert on a larger machine, or serve with --runner torch")
    if program.returncode:
        raise ConfigError(last or f"the conversion ended with status {program.returncode}")


@dataclass(frozen=True, slots=True)
class GraphSource:
    """model: the graph. checkpoint: its source, whose memory it may read; None for an export, whose paging must be
    checked. expected: logits of transformers after the tokens of `probe`, if known. cache, key: of this graph."""

    config: ModelConfig | OpenVinoExport
    model: Any
    cache: GraphCache
    key: str
    checkpoint: Checkpoint | None
    expected: npt.NDArray[np.float32] | None

    def kept_logits(self, hint: str, compute: Callable[[], npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """Logits of this graph after the tokens of `probe`, kept or computed now. hint: the precision."""

        def write(draft: Path) -> None:
            np.save(draft / PROBE_FILE, compute())

        found = self.cache.kept(f"logits-{hint}", self.key, write, _probe_in)
        return compute() if found is None else found


def source(core: Any, root: Path, weights: str, cache: GraphCache) -> GraphSource:
    """The graph of a directory. weights: "auto" keeps them, "int8" and "int4" round them. Raises ConfigError."""
    from reflex_runtime.llm.runners import openvino_graph

    checkpoint, plain = None, weights == "auto"
    config: ModelConfig | OpenVinoExport
    if is_export(root) or not is_known(root):
        directory = root if is_export(root) else traced(root, cache)
        config, file = OpenVinoExport.open(directory), directory / MODEL_FILE
        files = [file for file in (file, file.with_suffix(".bin")) if file.is_file()]
        build = partial(read_graph, directory)
        expected = _probe_in(directory) if plain and (directory / PROBE_FILE).is_file() else None
    else:
        checkpoint, expected = Checkpoint.open(root), None
        config, files, build = checkpoint.config, checkpoint.files, partial(openvino_graph.build, checkpoint)

    def rounded() -> Any:
        model = build()
        openvino_graph.compress(model, _BITS[weights])
        return model

    key = cache.key(files, openvino_graph.VERSION, openvino_graph.ROUNDING, weights)
    model = build() if plain else cache.graph(core, weights, key, rounded)
    return GraphSource(config, model, cache, key, checkpoint, expected)


def traced(root: Path, cache: GraphCache) -> Path:
    """The kept graph of a checkpoint, traced in PyTorch by a process of its own. Raises ConfigError if the conversion
    fails, or if nothing can be kept."""
    require(root)
    key = cache.key(weight_files(root), TRACED_VERSION, version("transformers"), version("torch"))
    command = [sys.executable, "-m", _TRACING, str(root)]
    found = cache.kept("traced", key, lambda draft: run_converter([*command, str(draft)]), lambda place: place)
    if found is None:
        raise ConfigError(f"{root}: there is no place to keep the converted model; name one with --cache-dir")
    return found


def _probe_in(directory: Path) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = np.load(directory / PROBE_FILE, allow_pickle=False)
    return found
