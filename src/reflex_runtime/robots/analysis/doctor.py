"""Checks a policy before a robot uses it: for each check what was expected, what was found and what to do.

Checks run in the order of this file. A check is skipped if it needs one that failed or was skipped. A check returns
what it found, or raises an error of the loader or the policy, or a `Finding`; `examine` reports them all.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.request import Request
from reflex_runtime.robots.policy.base import Policy, PolicySource
from reflex_runtime.robots.policy.observation import ActionChunk
from reflex_runtime.robots.policy.spec import PYTHON, DeviceOptions, PolicySpec
from reflex_runtime.robots.policy.units import transformed
from reflex_runtime.robots.serving.question import OPENPI, ObservationReader
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.robots.sources.export_files import CONFIG_FILE, EMBODIMENT_FILE
from reflex_runtime.robots.sources.load import (
    SHARE,
    directory_of,
    in_gb,
    is_export,
    load_policy,
    read_source,
    refusal,
    total_memory,
)
from reflex_runtime.run import onnx_session
from reflex_runtime.run.model_files import read_json
from reflex_runtime.run.onnx_session import CPU, BatchAxisError, PortMismatch
from reflex_runtime.version import __version__

SAMPLES: Final = 8
"""The number of made-up requests; batch parity compares 2, 4 and 8 of them."""

PARITY: Final = 1e-4
"""Largest difference between an action computed in a batch and computed alone, as a share of its joint's scale: its
standard deviation, or its largest value. Kernels that sum in another order at other batch sizes give about 1e-6 in
float32 (measured: 0 on the CPU, 2.8e-6 on CUDA); rows that influence each other give 0.01 and more. For a replay an
answer differs from 1e-3 on, so that a healthy export replays in any batches."""

PARITY_HALF: Final = 2e-2
"""The same for models in 16 bits: their numbers are 1e-3 apart, and sums of them differ by some of those steps."""

LEAST_SCALE: Final = 1e-6  # of a joint that never moves
TINY: Final = 1e-6
"""A state that varies less is constant: divided by it, the last bit of a sensor becomes a large number. An action that
varies less does not move the robot."""

RTC_HORIZON: Final = 10  # default of --rtc-horizon
LEAST_WALL: Final = 1_735_689_600.0  # 2025-01-01: a wall clock that shows an earlier time was never set
DAY: Final = 86_400.0

Status = Literal["pass", "fail", "warn", "skip"]


class Finding(Exception):
    """The result of a check that does not pass. "warn": the policy can be served, but something is probably wrong.

    remedy: "" for that of the check. environment: the fault is in this machine, not in the policy.
    """

    def __init__(self, status: Status, actual: str, remedy: str = "", environment: bool = False) -> None:
        super().__init__(actual)
        self.status, self.actual, self.remedy, self.environment = status, actual, remedy, environment


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks. resolution: seconds between two values of the monotonic clock."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    resolution: float = field(default_factory=lambda: time.get_clock_info("monotonic").resolution)


@dataclass
class CheckContext:
    """The policy under examination, and the results of earlier checks: spec, policy, what is wrong with its graphs, its
    answers to samples (each computed alone), and the median seconds of one answer."""

    source: str
    provider: str
    threads: int
    instruction: str | None
    rtc_horizon: int | None
    clocks: Clocks
    total_memory: Callable[[str], int]
    rows: int = 0
    spec: PolicySource = field(init=False)
    policy: Policy = field(init=False)
    graph_error: ConfigError | None = None
    alone: list[ActionChunk] = field(default_factory=list)
    answer_time: float = 0.0

    @property
    def device(self) -> DeviceOptions:
        return DeviceOptions(self.provider, self.threads)

    @property
    def instructions(self) -> list[str]:
        """Instructions of the samples: the given one, else the first and the last words of the vocabulary."""
        spec = self.spec
        if not spec.takes_text:
            return [""]
        if self.instruction:
            return [self.instruction]
        words = getattr(spec.tokenizer, "words", spec.tokenizer and spec.config.get("tokenizer"))
        if isinstance(words, str):
            words = read_json(directory_of(self.source) / words).get("model", {}).get("vocab")
        if not isinstance(words, dict) or not words:
            return ["pick up the red block", "open the drawer"]
        known = [word for word in sorted(words, key=lambda word: int(words[word])) if word.isalnum()] or ["open"]
        return [" ".join(known[: spec.max_tokens]), " ".join(known[-spec.max_tokens :])]

    def sample(self, number: int, without: frozenset[str] = frozenset()) -> Request:
        """A made-up request, in words of the policy's vocabulary."""
        texts = self.instructions
        return self.policy.sample(number, texts[number % len(texts)], without)

    def joints(self, which: NDArray[Any]) -> str:
        names = self.spec.embodiment.action_names
        return ", ".join(names[j] if names else str(j) for j in which.tolist())


class CheckRule(NamedTuple):
    """A check: its id, the checks whose results it needs, its expectation, and what to do if it fails.

    environment: a failure is a fault of this machine. exports: only for export directories, whose reader checks less.
    """

    id: str
    look: Callable[[CheckContext], str]
    needs: tuple[str, ...]
    expected: str
    remedy: str
    environment: bool = False
    exports: bool = False


CHECKS: list[CheckRule] = []
"""In their order. `deterministic` runs only where rows are given."""


def check(
    id: str, needs: str, expected: str, remedy: str, *, environment: bool = False, exports: bool = False
) -> Callable[[Callable[[CheckContext], str]], Callable[[CheckContext], str]]:
    """Add the function to CHECKS. needs: ids with spaces between them."""

    def add(look: Callable[[CheckContext], str]) -> Callable[[CheckContext], str]:
        CHECKS.append(CheckRule(id, look, tuple(needs.split()), expected, remedy, environment, exports))
        return look

    return add


def some(problems: Sequence[str], most: int = 6) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def typical_action(spec: PolicySpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(the middle of the training's actions, their usual distance from it), each [action_dim], in the robot's units.
    If actions are added to the state: from the middle of the training's states."""
    norm, dim = spec.action_norm, spec.action_dim
    offset = np.zeros(dim, np.float32) if norm is None else norm.middle
    scale = np.ones(dim, np.float32) if norm is None else norm.scale
    state = np.zeros(spec.state_dim, np.float32) if spec.state_norm is None else spec.state_norm.middle
    middle = transformed(offset, spec.action_transforms, state)
    return middle, np.abs(transformed(offset + scale, spec.action_transforms, state) - middle)


# -- reading it --------------------------------------------------------------------------------------------------------


@check(
    "config", "", "a configuration without faults, and whole, readable files (docs/exports.md)",
    "correct the key (docs/exports.md has all keys, docs/policies.md those of your own policy); copy a file again that "
    "is missing or damaged, and let the server read it (chmod a+r)",
)  # fmt: skip
def check_config(context: CheckContext) -> str:
    """Of any source; the errors are those of its reader."""
    context.spec = spec = read_source(context.source, context.device)
    spec.check()
    kind = f"{spec.model_id}, {spec.model_type}, {spec.inference_mode}, {spec.num_denoising_steps} steps"
    return f"{kind}, chunk of {spec.chunk_size} x {spec.action_dim}, model {spec.model_hash}"


@check(
    "wires", "config", "a name in observations for each input of the policy, each once",
    f"two cameras, or a camera and the state, are read from one name: see wires in {CONFIG_FILE}", exports=True,
)  # fmt: skip
def check_wires(context: CheckContext) -> str:
    """The names in observations: those of openpi, and of each wire that has a block (docs/wires.md)."""
    spec, shown = context.spec, []
    for wire in spec.wires or (OPENPI,):
        read = ObservationReader(spec, spec.wires.get(wire)).describe()
        names = [*read["images"], *read.get("state", {}).get("names", ())]
        names += [read["prompt"]] if "prompt" in read else []
        if len(read["images"]) < len(spec.images) or len(set(names)) < len(names):
            raise Finding("warn", f"{wire}: {', '.join(names)}")
        shown.append(f"{wire}: {', '.join(names)}{'' if spec.wires else ' (no block: found by name)'}")
    return "; ".join(shown)


@check(
    "normalisation", "config", "statistics of states and actions, none of them tiny",
    "fine if the model normalises by itself, or trained with a dimension that never varied; else actions are in the "
    f"wrong units: add the training data's mean and std to {CONFIG_FILE}", exports=True,
)  # fmt: skip
def check_normalisation(context: CheckContext) -> str:
    spec, norms = context.spec, {"state_norm": context.spec.state_norm, "action_norm": context.spec.action_norm}
    doubts, found = [], []
    for key, norm in norms.items():
        if norm is None:
            doubts += [f"no {key}"] if key == "action_norm" or spec.takes_state else []
            continue
        found.append(key)
        doubts += [f"{key}: dimension {i} varies by {norm.scale[i]:g}, tiny" for i in np.flatnonzero(norm.scale < TINY)]
    if doubts:
        raise Finding("warn", some(doubts))
    return " and ".join(found) or "no state, and no norm"


# -- text, robot, machine ----------------------------------------------------------------------------------------------


@check(
    "embodiment", "config",
    "an action_space, action_ranges that hold the mean action, cameras with the policy's names",
    f"complete {EMBODIMENT_FILE} (docs/exports.md, Embodiment), or give PolicySpec an Embodiment",
)  # fmt: skip
def check_embodiment(context: CheckContext) -> str:
    spec, robot = context.spec, context.spec.embodiment
    doubts = []
    if robot.action_ranges is None:
        doubts.append("no action_ranges: nothing is clamped")
    elif spec.action_norm is not None:
        low, high = robot.action_ranges[:, 0], robot.action_ranges[:, 1]
        mean, std = typical_action(spec)
        outside = np.flatnonzero((mean < low) | (mean > high))
        if len(outside):
            joints = [
                f"{context.joints(outside[i : i + 1])}: mean {mean[j]:.3g}, range [{low[j]:.3g}, {high[j]:.3g}]"
                for i, j in enumerate(outside)
            ]
            raise Finding(
                "fail",
                f"the mean action of the training data is outside its range: {some(joints)}",
                "action_norm and action_ranges are of different robots, orders or units: compare them joint by joint",
            )
        wide = np.flatnonzero((high - low) < std)
        if len(wide):
            doubts.append(f"ranges narrower than one standard deviation: {context.joints(wide)}")
    if robot.action_space is None:
        doubts.append("no action_space: whether actions are relative or absolute is not known")
    unknown = [name for name in spec.images if robot.cameras is not None and name not in robot.cameras]
    if unknown and len(spec.images) > 1:
        doubts.append(f"images that are no camera of the robot: {', '.join(unknown)}")
    if doubts:
        raise Finding("warn", some(doubts))
    return f"{robot.name}, {robot.action_space}, {spec.action_dim} ranges"


@check(
    "tokenizer", "config", "known words, no longer than max_tokens",
    f"the tokenizer is not that of the training: put the right one into {CONFIG_FILE} (tokenizer)", exports=True,
)  # fmt: skip
def check_tokenizer(context: CheckContext) -> str:
    spec, tokenizer = context.spec, context.spec.tokenizer
    if tokenizer is None:
        raise Finding("skip", "the model makes its own tokens" if spec.takes_text else "the policy reads no text")
    for text in filter(None, context.instructions):
        unknown = [word for word in text.split() if tokenizer.unknown(word)]
        if len(unknown) == len(text.split()):
            raise Finding("fail", f"{text!r}: not one word of it is known")
        if unknown:
            actual = f"{text!r}: {', '.join(map(repr, unknown))} unknown"
            raise Finding("warn", actual, "use words of the training data, or add these to the tokenizer and train")
        middle = np.zeros(spec.state_dim, np.float32)  # a normalised state, for the length of a prompt with its bins
        whole = text if spec.prompt is None else spec.prompt.render(text, middle)
        if len(tokenizer.ids(whole)) > spec.max_tokens:
            actual = f"{whole!r}: over max_tokens={spec.max_tokens}; what follows is cut off"
            raise Finding("warn", actual, "use fewer words, or export again with a longer token row (max_tokens)")
    return " and ".join(repr(text) for text in context.instructions)


@check(
    "memory", "config", f"two policies of its size within {SHARE:.0%} of the memory",
    "the memory is too small for this model: use a larger machine, a smaller model, or its export in float16",
)  # fmt: skip
def check_memory(context: CheckContext) -> str:
    try:
        total = context.total_memory(context.provider)
    except ConfigError as error:
        raise Finding("skip", error.message) from None
    size = context.spec.model_bytes
    one, two = (refusal(size, total, n, provider=context.provider) for n in (1, 2))
    actual = f"2 x {in_gb(size)} of {in_gb(SHARE * total)} ({SHARE:.0%} of {in_gb(total)})"
    if not two:
        return actual
    if not one:
        raise Finding("warn", actual, f"served alone it is fine. {two}")
    raise Finding("fail", f"{in_gb(size)} for one alone, of {in_gb(SHARE * total)}", environment=True)


@check(
    "provider", "", "a provider of this onnxruntime",
    "install the named package into this environment, or serve with --provider cpu", environment=True, exports=True,
)  # fmt: skip
def check_provider(context: CheckContext) -> str:
    onnx_session.check_provider(context.provider)
    return f"{context.provider} is in this onnxruntime"


# -- running it --------------------------------------------------------------------------------------------------------


@check(
    "model_load", "config provider", "a model that loads on this provider",
    "copy the files again if they may have been damaged, or export again, with an opset that this onnxruntime knows "
    "(pip install -U onnxruntime) and operators of ONNX itself; of your own policy: docs/policies.md",
)  # fmt: skip
def check_model_load(context: CheckContext) -> str:
    """Errors of the graphs' inputs and batch axis are left to the next two checks."""
    began = context.clocks.monotonic()
    try:
        context.policy = load_policy(context.spec, device=context.device)
    except (PortMismatch, BatchAxisError) as error:
        if not isinstance(context.spec, Export):
            raise
        context.graph_error = error
    except ConfigError as error:
        if context.provider == CPU:
            raise
        try:
            load_policy(context.spec, device=DeviceOptions(threads=context.threads))
        except ConfigError:
            raise error from None
        raise Finding(
            "fail",
            f"{error.message}; on the CPU it loads",
            "the driver or its libraries do not fit this onnxruntime: compare nvidia-smi with onnxruntime.ai/docs/"
            "execution-providers, or serve with --provider cpu",
            environment=True,
        ) from None
    return f"{in_gb(context.spec.model_bytes)} in {context.clocks.monotonic() - began:.2f} s"


@check(
    "inputs", "model_load", "every role has a tensor of its type and size, and every input a role",
    f"write the tensors' names and sizes into {CONFIG_FILE} (inputs, outputs, images, state_dim, action_dim, "
    "chunk_size, max_tokens), or export again with these names and sizes", exports=True,
)  # fmt: skip
def check_inputs(context: CheckContext) -> str:
    if isinstance(context.graph_error, PortMismatch):
        raise context.graph_error
    graphs = context.spec.graphs.values() if isinstance(context.spec, Export) else ()
    return ", ".join(f"{role} {spec.name!r}" for graph in graphs for role, spec in graph.inputs.items())


@check(
    "dynamic_batch", "inputs", "a symbolic first axis on every input and output",
    "export again with dynamic_axes={name: {0: 'batch'} for every input and output}", exports=True,
)  # fmt: skip
def check_dynamic_batch(context: CheckContext) -> str:
    if context.graph_error is not None:
        raise context.graph_error
    if not context.policy.model.batched:
        raise Finding("warn", "a graph's batch axis is fixed at 1, so requests of a batch run one after the other")
    return "symbolic in all graphs"


@check(
    "actions", "model_load dynamic_batch", "finite actions within the robot's ranges",
    "the model loads and cannot run: sizes do not fit (a chunk of another shape than the spec, a reshape with a fixed "
    "number of rows, ids beyond the vocabulary, images of another size); run it once outside of Reflex",
)  # fmt: skip
def check_actions(context: CheckContext) -> str:
    """Made-up observations, one at a time. The first runs once more before, so that loading does not count."""
    times = []
    context.policy.answers([context.sample(0)])
    for i in range(SAMPLES):
        request, began = context.sample(i), context.clocks.monotonic()
        context.alone += context.policy.answers([request])
        times.append(context.clocks.monotonic() - began)
    context.answer_time = sorted(times)[len(times) // 2]
    actions = np.stack([chunk.actions for chunk in context.alone])
    bad = ~np.isfinite(actions)
    if bad.any():
        joints = context.joints(np.flatnonzero(bad.any((0, 1))))
        raise Finding(
            "fail",
            f"{int(bad.sum())} of {actions.size} values are NaN or infinite, joints {joints}",
            "a division by zero or an overflow in the graph (float16 does that beyond 65504), or weights that hold "
            "NaN: run the checkpoint before its export on the same input",
        )
    actual = f"{SAMPLES} samples in [{actions.min():.3g}, {actions.max():.3g}], {context.answer_time * 1e3:.1f} ms each"
    ranges = context.spec.embodiment.action_ranges
    if ranges is None:
        return f"{actual}; no ranges are known"
    outside = (actions < ranges[:, 0]) | (actions > ranges[:, 1])
    share = float(outside.mean())
    if share > 0.5:
        joints = context.joints(np.flatnonzero(outside.any((0, 1))))
        raise Finding(
            "fail",
            f"{share:.0%} of the values are outside, joints {joints}; {actual}",
            "action_norm or action_ranges are of another robot or in other units (degrees, radians, metres): compare "
            f"{CONFIG_FILE} with the embodiment file",
        )
    actual += f", {share:.0%} of the values outside their range (the guard clamps those)"
    if share > 0.2:
        raise Finding("warn", actual, f"compare action_norm in {CONFIG_FILE} with action_ranges: is it the same robot?")
    return actual


@check(
    "cameras", "actions", "finite actions without the optional cameras, and a mask of the missing ones",
    "the graph fails where a mask is false: look for a division by the number of pictures",
)  # fmt: skip
def check_cameras(context: CheckContext) -> str:
    """A request without all cameras that it may leave out, but with at least one."""
    spec = context.spec
    if not spec.optional_images:
        return "none is optional"
    kept = next((name for name in spec.images if name not in spec.optional_images), next(iter(spec.images)))
    left_out = spec.optional_images - {kept}
    without = f"without {', '.join(sorted(left_out))}"
    (chunk,) = context.policy.answers([context.sample(0, left_out)])
    if not np.isfinite(chunk.actions).all():
        raise Finding(
            "fail",
            f"{without}: some actions are NaN or infinite",
            "where all of a picture's tokens are masked, a softmax has nothing left: mask with a large negative number",
        )
    roles = {role for graph in spec.graphs.values() for role in graph.inputs} if isinstance(spec, Export) else None
    if roles is not None and "image_masks" not in roles:
        raise Finding(
            "warn",
            f"{without}: finite, and no input has the role image_masks",
            "the model takes a missing camera for a black picture: fine if it was trained so, else export the masks",
        )
    return f"finite {without}"


@check(
    "determinism", "actions", "the same bits for the same observation and seed",
    "the graph draws random numbers of its own (RandomNormal, a dropout left on): export in eval mode, with the noise "
    "as an input (inputs.noise); on CUDA it may be a kernel that adds up in any order",
)  # fmt: skip
def check_determinism(context: CheckContext) -> str:
    again, first = context.policy.answers([context.sample(0)])[0].actions, context.alone[0].actions
    if again.tobytes() != first.tobytes():
        raise Finding("fail", f"differs by up to {float(np.abs(again - first).max()):.3g}")
    return "bit-equal"


@check(
    "batch_parity", "actions",
    f"an action differs in a batch by at most {PARITY:g} of its joint's scale, in 16 bits by {PARITY_HALF:g}",
    "rows influence each other: batch statistics (export in eval mode), a mean or softmax over the batch axis, one "
    "flow time for all rows, padding to the longest. Until it is exported again: --max-batch-size 1",
)  # fmt: skip
def check_batch_parity(context: CheckContext) -> str:
    alone = np.stack([chunk.actions for chunk in context.alone])
    scale = np.maximum(np.abs(alone).max(axis=(0, 1)), np.maximum(typical_action(context.spec)[1], LEAST_SCALE))
    steps = context.spec.num_denoising_steps
    worst, where = 0.0, ""
    for n in (2, 4, 8):
        ways = {"together": [0] * n}
        if context.spec.staged and steps > 1:
            ways["at different steps"] = [i % steps for i in range(n)]
        for how, starts in ways.items():
            try:
                chunks = context.policy.answers([context.sample(i) for i in range(n)], starts)
            except ReflexError as error:
                raise Finding(
                    "fail",
                    f"{n} {how}: {error.message}",
                    "the first axis is symbolic, but a reshape or a constant inside the graph is of one row. Export "
                    "with a batch of 2 as the example; until then --max-batch-size 1",
                ) from None
            ratios = np.abs(np.stack([c.actions for c in chunks]) - alone[:n]) / scale
            if not ratios.max() <= worst:  # NaN is never better
                worst, where = float(ratios.max()), f" ({n} {how})"
    if not worst <= PARITY_HALF:
        raise Finding("fail", f"differs by {worst:.3g} of its joint's scale{where}")
    if worst > PARITY and not context.policy.model.half:
        raise Finding(
            "warn",
            f"differs by {worst:.3g} of its joint's scale{where}",
            "rounding of weights in 16 bits, or rows that influence each other a little: compare with --max-batch-size "
            "1 before a robot depends on it",
        )
    return f"{worst:.3g} at most{where}, for 2, 4 and 8"


@check(
    "rtc_boundary", "actions",
    "decomposed, chunk_size >= the horizon, an answer before the horizon is reached", "see docs/chunks.md",
)  # fmt: skip
def check_rtc_boundary(context: CheckContext) -> str:
    """What a chunk needs to continue the last one: access between steps, a tail, and an answer in time."""
    spec, rate = context.spec, context.spec.embodiment.control_rate_hz
    horizon = context.rtc_horizon if context.rtc_horizon is not None else RTC_HORIZON
    status: Status = "warn" if context.rtc_horizon is None else "fail"
    if not spec.staged:
        if context.rtc_horizon is None:
            raise Finding("skip", "a policy that answers in one call cannot do --rtc: its steps are inside the call")
        actual = "monolithic: its steps are inside the graph"
        raise Finding("fail", actual, "export prefix and expert as two graphs, or serve --no-rtc")
    if spec.chunk_size < horizon:
        actual = f"chunk_size {spec.chunk_size} ends before a horizon of {horizon}"
        shorter = f"serve with --rtc-horizon {max(1, spec.chunk_size // 2)} (at most {spec.chunk_size}), or --no-rtc"
        raise Finding(status, actual, shorter)
    if rate is None:
        raise Finding(
            "warn",
            "control_rate_hz is not known",
            f"write the robot's control rate into {EMBODIMENT_FILE}: without it every request needs `executed`, the "
            "number of executed actions, and actions that are executed while it waits are not frozen",
        )
    late = math.ceil(context.answer_time * rate)
    actual = f"an answer takes {context.answer_time * 1e3:.1f} ms, {late} of {spec.chunk_size} actions at {rate:g} Hz"
    if late <= horizon:
        return actual
    if late < spec.chunk_size:
        raise Finding(status, actual, f"--rtc-horizon {late} or more (at most {spec.chunk_size}), or a faster device")
    faster = "a faster device, fewer denoising steps or a longer chunk"
    raise Finding(status, actual, f"{faster}: the robot has no action left when the answer comes")


@check(
    "clock", "", "a monotonic clock of 1 ms or finer that never goes back, and a wall clock that is set",
    "deadlines and batches are timed by it: choose another clock source (/sys/devices/system/clocksource/clocksource0/"
    "current_clocksource), or another hypervisor", environment=True,
)  # fmt: skip
def check_clock(context: CheckContext) -> str:
    clocks = context.clocks
    reads = [clocks.monotonic() for _ in range(1000)]
    back = sum(b < a for a, b in pairwise(reads))
    if back or clocks.resolution > 1e-3:
        actual = f"goes back {back} times in 1000" if back else f"resolution {clocks.resolution:g} s"
        raise Finding("fail", f"the monotonic clock: {actual}")
    wall = clocks.wall()
    mine = () if context.source.startswith(PYTHON) else directory_of(context.source).rglob("*")
    newest = max((file.stat().st_mtime for file in mine if file.is_file()), default=0.0)
    if wall < LEAST_WALL or wall < newest - DAY:
        shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(max(0.0, wall)))
        raise Finding(
            "warn",
            f"the wall clock shows {shown} UTC, which is before the export's own files",
            "timestamps of recordings will be wrong: set it (timedatectl set-ntp true), or replace the clock's battery",
        )
    return f"{clocks.resolution:.0e} s"


@check(
    "deterministic", "determinism", "the same bits whatever shares the batch, and in whatever row",
    "this runtime computes a row by its place in the call, or by what is in other rows: serve with --deterministic 1, "
    "one row a call, or try --threads 1 or another provider",
)  # fmt: skip
def check_rows(context: CheckContext) -> str:
    """Each sample alone, then all together until each was in each row; and the cost of padding to `rows`."""
    n, steps, loose = context.rows, context.spec.num_denoising_steps, context.policy
    policy = type(loose)(loose.model, loose.slot, rows=n)
    samples, alone, times = [context.sample(i) for i in range(n)], [], []
    for sample in samples:
        took = []
        for one in (loose, policy):
            began = context.clocks.monotonic()
            (chunk,) = one.answers([sample])
            took.append(context.clocks.monotonic() - began)
        alone.append(chunk.actions)
        times.append(took)
    wrong, worst = set(), 0.0
    for turn in range(n):
        order = [(turn + row) % n for row in range(n)]
        starts = [row % steps for row in range(n)] if context.spec.staged and turn % 2 else []
        for row, chunk in enumerate(policy.answers([samples[i] for i in order], starts)):
            if chunk.actions.tobytes() != alone[order[row]].tobytes():
                wrong.add(row)
                worst = max(worst, float(np.abs(chunk.actions - alone[order[row]]).max()))
    if wrong:
        rows = some([str(row) for row in sorted(wrong)])
        raise Finding("fail", f"an answer differs by up to {worst:.3g} from the same alone, in rows {rows} of {n}")
    without, spent = 1e3 * np.median(times, axis=0)
    price = f"an answer alone takes {spent:.1f} ms, {without:.1f} ms without --deterministic"
    return f"bit-equal alone, beside others and in each of {n} rows; {price}"


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """One check that was made. environment: the fault is in this machine, not in the policy. duration: seconds."""

    id: str
    status: Status
    expected: str
    actual: str
    remediation: str = ""
    environment: bool = False
    duration: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        names = ("id", "status", "expected", "actual", "remediation", "environment")
        return {name: getattr(self, name) for name in names} | {"duration_ms": round(self.duration * 1e3, 3)}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of one policy, in order. spec: None if it could not be read."""

    source: str
    provider: str
    threads: int
    spec: PolicySpec | None
    checks: Sequence[Check]

    @property
    def exit_code(self) -> int:
        """0: nothing failed. 1: the policy failed a check. 3: only checks of this machine failed."""
        failed = [check for check in self.checks if check.status == "fail"]
        if not failed:
            return 0
        return 3 if all(check.environment for check in failed) else 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe; `reflex doctor --help` lists the keys."""
        counts = Counter(check.status for check in self.checks)
        return {
            "schema_version": 1,
            "reflex_version": __version__,
            "export_dir": self.source,
            "model_id": None if self.spec is None else self.spec.model_id,
            "model_hash": None if self.spec is None else self.spec.model_hash,
            "provider": self.provider,
            "threads": self.threads,
            "exit_code": self.exit_code,
            "counts": {status: counts[status] for status in ("pass", "fail", "warn", "skip")},
            "checks": [check.as_dict() for check in self.checks],
        }


def examine(
    source: str | Path,
    provider: str = CPU,
    threads: int = 1,
    *,
    instruction: str | None = None,
    rtc_horizon: int | None = None,
    rows: int = 0,
    clocks: Clocks | None = None,
    total_memory: Callable[[str], int] = total_memory,
) -> Diagnosis:
    """Make every check of a source, as in `read_source`.

    provider, threads: as in `OnnxSession`. instruction: one that the policy must understand; by default words of its
    vocabulary. rtc_horizon: actions of a chunk that anchor the next one; if it is given, a policy that cannot do it
    fails, else the default of 10 gives a warning. rows: as in `Policy`; if it is given, `deterministic` runs. clocks,
    total_memory: for tests.
    """
    clocks = clocks or Clocks()
    context = CheckContext(str(source), provider, threads, instruction, rtc_horizon, clocks, total_memory, rows)
    export, checks = is_export(context.source), dict[str, Check]()
    for rule in CHECKS:
        if (rule.exports and not export) or (rule.id == "deterministic" and not rows):
            continue
        broken = [checks[id] for id in rule.needs if id in checks and checks[id].status in ("fail", "skip")]
        if broken:
            ends = [f"{check.id} {'failed' if check.status == 'fail' else 'was skipped'}" for check in broken]
            checks[rule.id] = Check(rule.id, "skip", "", f"needs a check that did not pass: {', '.join(ends)}")
        else:
            checks[rule.id] = _run_check(rule, context)
    spec = getattr(context, "spec", None)
    return Diagnosis(context.source, provider, threads, spec, list(checks.values()))


def _run_check(rule: CheckRule, context: CheckContext) -> Check:
    began = context.clocks.monotonic()
    try:
        found = Finding("pass", rule.look(context))
    except Finding as finding:
        found = finding
    except ReflexError as error:
        found = Finding("fail", error.message)
    except Exception as error:  # a policy may raise anything, and the other checks are still made
        found = Finding("fail", f"{type(error).__name__}: {error}", "a fault of this check: please report it")
    fails = found.status in ("fail", "warn")
    return Check(
        rule.id,
        found.status,
        "" if found.status == "skip" else rule.expected,
        found.actual,
        (found.remedy or rule.remedy) if fails else "",
        found.status == "fail" and (found.environment or rule.environment),
        context.clocks.monotonic() - began,
    )
