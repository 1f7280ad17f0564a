"""Checks a policy before it meets a robot: for each check what was expected, what was found and what to do.

Checks run in a fixed order; one that needs what another found broken is skipped and says so. A check returns what it
found. It raises errors of the loader and of the policy, or `CheckWarning`, `CheckFailure` or `CheckSkipped`. `examine`
never raises for what is wrong with the policy: that is what it reports.
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
from reflex_runtime.robots.sources.export_files import CONFIG_FILE, EMBODIMENT_FILE, check_files
from reflex_runtime.robots.sources.load import (
    SHARE,
    Room,
    directory_of,
    is_export,
    load_policy,
    read_source,
    total_memory,
)
from reflex_runtime.run import onnx_session
from reflex_runtime.run.model_files import read_json
from reflex_runtime.run.onnx_session import CPU, BatchAxisError, PortMismatch
from reflex_runtime.version import __version__

SAMPLES: Final = 8
"""Requests made up; batch parity is looked at for 2, 4 and 8 of them."""

PARITY: Final = 1e-4
"""Largest difference between an action of a batch and the same one alone, as a share of its joint's scale: its
standard deviation, or its largest value. Kernels that add up in another order at other batch sizes give about 1e-6 in
float32 (measured: 0 on the CPU, 2.8e-6 on CUDA); rows that influence each other give 0.01 and more. Well below the 1e-3
at which a replay calls an answer different, so that a healthy export replays whatever batches it ran in."""

PARITY_HALF: Final = 2e-2
"""The same for models in 16 bits: their numbers are 1e-3 apart, and sums of them differ by some of those steps."""

LEAST_SCALE: Final = 1e-6  # of a joint that never moves
TINY: Final = 1e-6
"""A state that varies less is constant: dividing by it turns the last bit of a sensor into a large number. An action
does not move the robot."""

RTC_HORIZON: Final = 10  # default of --rtc-horizon
LEAST_WALL: Final = 1_735_689_600.0  # 2025-01-01: an earlier wall clock was never set
DAY: Final = 86_400.0


class CheckWarning(Exception):
    """The policy can be served, and something is probably wrong. remedy: "" for that of the check."""

    def __init__(self, actual: str, remedy: str = "") -> None:
        super().__init__(actual)
        self.actual, self.remedy = actual, remedy


class CheckFailure(CheckWarning):
    """The check fails. environment: because of this machine."""

    def __init__(self, actual: str, remedy: str = "", environment: bool = False) -> None:
        super().__init__(actual, remedy)
        self.environment = environment


class CheckSkipped(Exception):
    """There is nothing to check, or no way to."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks. resolution: seconds between two values of the monotonic clock."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    resolution: float = field(default_factory=lambda: time.get_clock_info("monotonic").resolution)


@dataclass(slots=True)
class CheckContext:
    """The policy under examination, and the results of earlier checks."""

    source: str
    provider: str
    threads: int
    instruction: str | None
    rtc_horizon: int | None
    clocks: Clocks
    total_memory: Callable[[str], int]
    rows: int = 0
    loaded: PolicySource | None = None
    opened: Policy | None = None
    graph_error: ConfigError | None = None
    alone: list[ActionChunk] = field(default_factory=list)
    answer_time: float = 0.0

    @property
    def spec(self) -> PolicySource:
        assert self.loaded is not None
        return self.loaded

    @property
    def policy(self) -> Policy:
        assert self.opened is not None
        return self.opened

    @property
    def root(self) -> Path:
        """The directory of the source."""
        return directory_of(self.source)

    @property
    def device(self) -> DeviceOptions:
        return DeviceOptions(self.provider, self.threads)

    @property
    def instructions(self) -> list[str]:
        """Of the samples: the one named, else the first and the last words of the vocabulary."""
        spec = self.spec
        if not spec.takes_text:
            return [""]
        if self.instruction:
            return [self.instruction]
        words = spec.config.get("tokenizer") if spec.tokenizer is not None else None
        if isinstance(words, str):
            words = read_json(self.root / words).get("model", {}).get("vocab")
        if not isinstance(words, dict) or not words:
            return ["pick up the red block", "open the drawer"]
        known = [word for word in sorted(words, key=lambda word: int(words[word])) if word.isalnum()] or ["open"]
        return [" ".join(known[: spec.max_tokens]), " ".join(known[-spec.max_tokens :])]

    def sample(self, number: int, without: frozenset[str] = frozenset()) -> Request:
        """A made-up request, in words that the policy knows."""
        texts = self.instructions
        return self.policy.sample(number, texts[number % len(texts)], without)

    def joints(self, which: NDArray[Any]) -> str:
        names = self.spec.embodiment.action_names
        return ", ".join(names[j] if names else str(j) for j in which.tolist())


def some(problems: Sequence[str], most: int = 6) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def size(count: float) -> str:
    """A number of bytes with a unit."""
    return f"{count / 2**20:.1f} MB" if count < 2**30 else f"{count / 2**30:.1f} GB"


def typical_action(spec: PolicySpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(the middle of the training's actions, how far from it they usually are), each [action_dim], in robot's units.

    The middle is at the middle of its states, where actions are added to the state.
    """
    norm, dim = spec.action_norm, spec.action_dim
    offset = np.zeros(dim, np.float32) if norm is None else norm.middle
    scale = np.ones(dim, np.float32) if norm is None else norm.scale
    state = np.zeros(spec.state_dim, np.float32) if spec.state_norm is None else spec.state_norm.middle
    middle = transformed(offset, spec.action_transforms, state)
    return middle, np.abs(transformed(offset + scale, spec.action_transforms, state) - middle)


# -- reading it --------------------------------------------------------------------------------------------------------


def check_export_files(context: CheckContext) -> str:
    files = check_files(context.root)
    return f"{len(files)} files, {size(sum(file.stat().st_size for file in files))}"


def check_config(context: CheckContext) -> str:
    """Of any source: errors are its reader's."""
    context.loaded = spec = read_source(context.source, context.device)
    spec.check()
    kind = f"{spec.model_id}, {spec.model_type}, {spec.inference_mode}, {spec.num_denoising_steps} steps"
    return f"{kind}, chunk of {spec.chunk_size} x {spec.action_dim}, model {spec.model_hash}"


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
        raise CheckWarning(some(doubts))
    return " and ".join(found) or "no state, and no norm"


def check_wires(context: CheckContext) -> str:
    """What observations have to hold: those of openpi, and of each wire that has a block; docs/wires.md."""
    spec, shown = context.spec, []
    for wire in spec.wires or (OPENPI,):
        told = ObservationReader(spec, spec.wires.get(wire)).describe()
        names = [*told["images"], *told.get("state", {}).get("names", ())]
        names += [told["prompt"]] if "prompt" in told else []
        if len(told["images"]) < len(spec.images) or len(set(names)) < len(names):
            raise CheckWarning(f"{wire}: {', '.join(names)}")
        shown.append(f"{wire}: {', '.join(names)}{'' if spec.wires else ' (no block: found by name)'}")
    return "; ".join(shown)


# -- text, robot, machine ----------------------------------------------------------------------------------------------


def check_tokenizer(context: CheckContext) -> str:
    spec, tokenizer = context.spec, context.spec.tokenizer
    if tokenizer is None:
        raise CheckSkipped("the model makes its own tokens" if spec.takes_text else "the policy reads no text")
    nonsense = tokenizer.encode("zqxjkvbp", 1).tolist()
    for text in filter(None, context.instructions):
        words = text.split()
        unknown = [word for word in words if word != "zqxjkvbp" and tokenizer.encode(word, 1).tolist() == nonsense]
        if len(unknown) == len(words):
            raise CheckFailure(f"{text!r}: not one word of it is known")
        if unknown:
            raise CheckWarning(
                f"{text!r}: {', '.join(map(repr, unknown))} unknown",
                "ask in the words of the training data, or add them to the tokenizer and train with them",
            )
        middle = np.zeros(spec.state_dim, np.float32)  # of a normalised state: for the length of a prompt that has it
        whole = text if spec.prompt is None else spec.prompt.render(text, middle)
        if len(tokenizer.ids(whole)) > spec.max_tokens:
            raise CheckWarning(
                f"{whole!r}: over max_tokens={spec.max_tokens}; what follows is cut off",
                "ask in fewer words, or export again with a longer token row (max_tokens)",
            )
    return " and ".join(repr(text) for text in context.instructions)


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
            told = [
                f"{context.joints(outside[i : i + 1])}: mean {mean[j]:.3g}, range [{low[j]:.3g}, {high[j]:.3g}]"
                for i, j in enumerate(outside)
            ]
            raise CheckFailure(
                f"the mean action of the training data is outside its range: {some(told)}",
                "action_norm and action_ranges are of different robots, orders or units: compare them joint by joint",
            )
        wide = np.flatnonzero((high - low) < std)
        if len(wide):
            doubts.append(f"ranges narrower than one standard deviation: {context.joints(wide)}")
    if robot.action_space is None:
        doubts.append("no action_space: whether a repeated action moves the robot on is not known")
    unknown = [name for name in spec.images if robot.cameras is not None and name not in robot.cameras]
    if unknown and len(spec.images) > 1:
        doubts.append(f"images that are no camera of the robot: {', '.join(unknown)}")
    if doubts:
        raise CheckWarning(some(doubts))
    return f"{robot.name}, {robot.action_space}, {spec.action_dim} ranges"


def check_memory(context: CheckContext) -> str:
    try:
        total = context.total_memory(context.provider)
    except ConfigError as error:
        raise CheckSkipped(error.message) from None
    one, two = (Room(context.spec.model_bytes, total, n) for n in (1, 2))
    actual = f"2 x {size(two.model_bytes)} of {size(two.available)} ({SHARE:.0%} of {size(total)})"
    if two.fits:
        return actual
    if one.fits:
        raise CheckWarning(actual, f"served alone it is fine. {two.refusal(context.provider)}")
    raise CheckFailure(f"{size(one.needed)} for one alone, of {size(one.available)}", environment=True)


def check_provider(context: CheckContext) -> str:
    onnx_session.check_provider(context.provider)
    return f"{context.provider} is in this onnxruntime"


def check_clock(context: CheckContext) -> str:
    clocks = context.clocks
    reads = [clocks.monotonic() for _ in range(1000)]
    back = sum(b < a for a, b in pairwise(reads))
    if back or clocks.resolution > 1e-3:
        actual = f"goes back {back} times in 1000" if back else f"resolution {clocks.resolution:g} s"
        raise CheckFailure(f"the monotonic clock: {actual}")
    wall = clocks.wall()
    mine = () if context.source.startswith(PYTHON) else context.root.rglob("*")
    newest = max((file.stat().st_mtime for file in mine if file.is_file()), default=0.0)
    if wall < LEAST_WALL or wall < newest - DAY:
        shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(max(0.0, wall)))
        raise CheckWarning(
            f"the wall clock says {shown} UTC, which is before the export's own files",
            "timestamps of recordings will be wrong: set it (timedatectl set-ntp true), or replace the clock's battery",
        )
    return f"{clocks.resolution:.0e} s"


# -- running it --------------------------------------------------------------------------------------------------------


def check_model_load(context: CheckContext) -> str:
    """What the graphs' inputs and batch axis make of the loading is left to the two checks after it."""
    began = context.clocks.monotonic()
    try:
        context.opened = load_policy(context.spec, device=context.device)
    except (PortMismatch, BatchAxisError) as error:
        if not isinstance(context.spec, Export):
            raise
        context.graph_error = error
    except ConfigError as error:
        if context.provider != CPU and _loads_on_cpu(context):
            raise CheckFailure(
                f"{error.message}; on the CPU it loads",
                "the driver or its libraries do not fit this onnxruntime: compare nvidia-smi with onnxruntime.ai/docs/"
                "execution-providers, or serve with --provider cpu",
                environment=True,
            ) from None
        raise
    return f"{size(context.spec.model_bytes)} in {context.clocks.monotonic() - began:.2f} s"


def _loads_on_cpu(context: CheckContext) -> bool:
    try:
        load_policy(context.spec, device=DeviceOptions(threads=context.threads))
    except ConfigError:
        return False
    return True


def check_inputs(context: CheckContext) -> str:
    if isinstance(context.graph_error, PortMismatch):
        raise context.graph_error
    graphs = context.spec.graphs.values() if isinstance(context.spec, Export) else ()
    return ", ".join(f"{role} {spec.name!r}" for graph in graphs for role, spec in graph.inputs.items())


def check_dynamic_batch(context: CheckContext) -> str:
    if context.graph_error is not None:
        raise context.graph_error
    if not context.policy.model.batched:
        raise CheckWarning("a graph's batch axis is fixed at 1, so requests of a batch run one after the other")
    return "symbolic in all graphs"


def check_actions(context: CheckContext) -> str:
    """Made-up observations, one at a time. The first is run twice: loading is no part of its time."""
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
        raise CheckFailure(
            f"{int(bad.sum())} of {actions.size} values are NaN or infinite, joints "
            + context.joints(np.flatnonzero(bad.any((0, 1)))),
            "a division by zero or an overflow in the graph (float16 does that beyond 65504), or weights that hold "
            "NaN: run the checkpoint before its export on the same input",
        )
    told = f"{SAMPLES} samples in [{actions.min():.3g}, {actions.max():.3g}], {context.answer_time * 1e3:.1f} ms each"
    ranges = context.spec.embodiment.action_ranges
    if ranges is None:
        return f"{told}; no ranges are known"
    outside = (actions < ranges[:, 0]) | (actions > ranges[:, 1])
    share = float(outside.mean())
    if share > 0.5:
        raise CheckFailure(
            f"{share:.0%} of the values are outside, joints {context.joints(np.flatnonzero(outside.any((0, 1))))}; "
            f"{told}",
            "action_norm or action_ranges are of another robot or in other units (degrees, radians, metres): compare "
            f"{CONFIG_FILE} with the embodiment file",
        )
    told += f", {share:.0%} of the values outside their range (the guard clamps those)"
    if share > 0.2:
        raise CheckWarning(told, f"compare action_norm in {CONFIG_FILE} with action_ranges: is it the same robot?")
    return told


def check_cameras(context: CheckContext) -> str:
    """What a request that leaves out every camera that it may leave out is answered."""
    spec = context.spec
    if not spec.optional_images:
        return "none is optional"
    kept = next((name for name in spec.images if name not in spec.optional_images), next(iter(spec.images)))
    left_out = spec.optional_images - {kept}
    without = f"without {', '.join(sorted(left_out))}"
    (chunk,) = context.policy.answers([context.sample(0, left_out)])
    if not np.isfinite(chunk.actions).all():
        raise CheckFailure(
            f"{without}: some actions are NaN or infinite",
            "where all of a picture's tokens are masked, a softmax has nothing left: mask with a large negative number",
        )
    roles = {role for graph in spec.graphs.values() for role in graph.inputs} if isinstance(spec, Export) else None
    if roles is not None and not any("image_mask" in role for role in roles - spec.images.keys()):
        raise CheckWarning(
            f"{without}: finite, and no input has the role image_masks or image_mask/NAME",
            "the model takes a missing camera for a black picture: fine if it was trained so, else export the masks",
        )
    return f"finite {without}"


def check_determinism(context: CheckContext) -> str:
    again, first = context.policy.answers([context.sample(0)])[0].actions, context.alone[0].actions
    if again.tobytes() != first.tobytes():
        raise CheckFailure(f"differs by up to {float(np.abs(again - first).max()):.3g}")
    return "bit-equal"


def check_rows(context: CheckContext) -> str:
    """With `--deterministic`: each sample alone, then all together until each was in each row. Tells the price."""
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
        told = some([str(row) for row in sorted(wrong)])
        raise CheckFailure(f"an answer differs by up to {worst:.3g} from itself alone, in rows {told} of {n}")
    without, spent = 1e3 * np.median(times, axis=0)
    price = f"an answer alone takes {spent:.1f} ms, {without:.1f} ms without"
    return f"bit-equal alone, beside others and in each of {n} rows; {price}"


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
                raise CheckFailure(
                    f"{n} {how}: {error.message}",
                    "the first axis is symbolic and the graph cannot do with it: a reshape or a constant inside is of "
                    "one row. Export with a batch of 2 as the example; until then --max-batch-size 1",
                ) from None
            ratios = np.abs(np.stack([c.actions for c in chunks]) - alone[:n]) / scale
            if not ratios.max() <= worst:  # NaN is never better
                worst, where = float(ratios.max()), f" ({n} {how})"
    if not worst <= PARITY_HALF:
        raise CheckFailure(f"differs by {worst:.3g} of its joint's scale{where}")
    if worst > PARITY and not context.policy.model.half:
        raise CheckWarning(
            f"differs by {worst:.3g} of its joint's scale{where}",
            "rounding of weights in 16 bits, or rows that influence each other a little: compare with --max-batch-size "
            "1 before a robot depends on it",
        )
    return f"{worst:.3g} at most{where}, for 2, 4 and 8"


def check_rtc_boundary(context: CheckContext) -> str:
    """What anchoring a chunk to the last one needs of the export: access between steps, a tail, and a time to lose."""
    spec, rate = context.spec, context.spec.embodiment.control_rate_hz
    horizon = context.rtc_horizon if context.rtc_horizon is not None else RTC_HORIZON
    problem = CheckWarning if context.rtc_horizon is None else CheckFailure
    if not spec.staged:
        if context.rtc_horizon is None:
            raise CheckSkipped("a monolithic export cannot do --rtc: its steps are inside the graph")
        raise problem("monolithic: its steps are inside the graph", "export prefix and expert apart, or serve --no-rtc")
    if spec.chunk_size < horizon:
        raise problem(
            f"chunk_size {spec.chunk_size} ends before a horizon of {horizon}",
            f"serve with --rtc-horizon {max(1, spec.chunk_size // 2)} (at most {spec.chunk_size}), or --no-rtc",
        )
    if rate is None:
        raise CheckWarning(
            "control_rate_hz is not known",
            f"write the robot's control rate into {EMBODIMENT_FILE}: without it every request has to say how many "
            "actions were `executed`, and those that run while it waits are not frozen",
        )
    late = math.ceil(context.answer_time * rate)
    passing = "1 action passes" if late == 1 else f"{late} actions pass"
    told = f"{passing} in {context.answer_time * 1e3:.1f} ms at {rate:g} Hz, of {spec.chunk_size}"
    if late <= horizon:
        return told
    if late < spec.chunk_size:
        raise problem(told, f"--rtc-horizon {late} or more (at most {spec.chunk_size}), or a faster device")
    raise problem(
        told, "a faster device, fewer denoising steps or a longer chunk: the robot has none left when it is answered"
    )


class CheckRule(NamedTuple):
    """A check: its id, the checks whose findings it needs, what it expects, and what to do where it fails.

    environment: a failure is this machine's.
    """

    id: str
    look: Callable[[CheckContext], str]
    needs: tuple[str, ...]
    expected: str
    remedy: str
    environment: bool = False


CHECKS: Final = (
    CheckRule(
        "files", check_export_files, (), "readable files, whole",
        "copy them again, where they can be read here and by the server (chmod a+r); is this the export directory?",
    ),
    CheckRule(
        "config", check_config, ("files",), "a configuration that names what there is (docs/exports.md)",
        "copy the file that is named there into the directory again, or correct the key; docs/exports.md explains each"
        ", docs/policies.md a policy of your own",
    ),
    CheckRule(
        "wires", check_wires, ("config",), "names of an observation for all that the policy needs, each once",
        f"two cameras, or a camera and the state, are read from one name: see wires in {CONFIG_FILE}",
    ),
    CheckRule(
        "normalisation", check_normalisation, ("config",), "statistics of states and actions, none of them tiny",
        "fine if the model normalises by itself, or trained with a dimension that never varied; else the robot gets "
        f"actions in the wrong units: add the training data's mean and std to {CONFIG_FILE}",
    ),
    CheckRule(
        "embodiment", check_embodiment, ("config",),
        "a robot that is known: action space, ranges that hold the mean action, cameras of these names",
        f"complete {EMBODIMENT_FILE} (docs/exports.md, Embodiment), or give PolicySpec an Embodiment",
    ),
    CheckRule(
        "tokenizer", check_tokenizer, ("config",), "known words, no longer than max_tokens",
        f"the tokenizer is not that of the training: put the right one into {CONFIG_FILE} (tokenizer)",
    ),
    CheckRule(
        "memory", check_memory, ("config",), f"two policies of its size within {SHARE:.0%} of the memory",
        "free memory is not enough for this model: a larger machine, a smaller model, or its export in float16",
    ),
    CheckRule(
        "provider", check_provider, (), "a provider of this onnxruntime",
        "install what is named there into this environment, or serve with --provider cpu", environment=True,
    ),
    CheckRule(
        "model_load", check_model_load, ("config", "provider"), "a model that loads on this provider",
        "copy the files again if they may have been damaged, or export again, with an opset that this onnxruntime "
        "knows (pip install -U onnxruntime) and operators of ONNX itself; of your own policy: docs/policies.md",
    ),
    CheckRule(
        "inputs", check_inputs, ("model_load",), "every role has a tensor of its type and size, and every input a role",
        f"write the tensors' names and sizes into {CONFIG_FILE} (inputs, outputs, images, state_dim, action_dim, "
        "chunk_size, max_tokens), or export again with these names and sizes",
    ),
    CheckRule(
        "dynamic_batch", check_dynamic_batch, ("inputs",), "a symbolic first axis on every input and output",
        "export again with dynamic_axes={name: {0: 'batch'} for every input and output}",
    ),
    CheckRule(
        "actions", check_actions, ("model_load", "dynamic_batch"), "finite actions within the robot's ranges",
        "the graph loads and cannot run: sizes inside it do not fit (a reshape with a fixed number of rows, ids beyond "
        "the vocabulary, images of another size); run the model once in the tool that exported it",
    ),
    CheckRule(
        "cameras", check_cameras, ("actions",),
        "finite actions without the optional cameras, and a mask that tells the model so",
        "the graph cannot do with a mask that is false: look for a division by the number of pictures",
    ),
    CheckRule(
        "determinism", check_determinism, ("actions",), "the same bits for the same observation and seed",
        "the graph draws random numbers of its own (RandomNormal, a dropout left on): export in eval mode, with the "
        "noise as an input (inputs.noise); on CUDA it may be a kernel that adds up in any order",
    ),
    CheckRule(
        "batch_parity", check_batch_parity, ("actions",),
        f"an action of a batch within {PARITY:g} of its joint's scale of it alone, in 16 bits {PARITY_HALF:g}",
        "rows influence each other: batch statistics (export in eval mode), a mean or softmax over the batch axis, one "
        "time for all rows, padding to the longest. Until it is exported again: --max-batch-size 1",
    ),
    CheckRule(
        "rtc_boundary", check_rtc_boundary, ("actions",),
        "decomposed, chunk_size >= the horizon, an answer before the horizon is reached", "see docs/chunks.md",
    ),
    CheckRule(
        "clock", check_clock, (),
        "a monotonic clock of 1 ms or finer that never goes back, and a wall clock that is set",
        "deadlines and batches are timed by it: choose another clock source (/sys/devices/system/clocksource/"
        "clocksource0/current_clocksource), or another hypervisor",
        environment=True,
    ),
    CheckRule(
        "deterministic", check_rows, ("determinism",), "the same bits whatever shares the batch, and in whatever row",
        "this runtime computes a row by its place in the call, or by what is in other rows: serve with --deterministic "
        "1, one row a call, or try --threads 1 or another provider",
    ),
)  # fmt: skip
"""`deterministic` is made only where rows are given."""

OF_EXPORTS: Final = {"files", "wires", "normalisation", "tokenizer", "provider", "inputs", "dynamic_batch"}
"""Not made for what is no export: its own reader checks its files."""


# -- the report --------------------------------------------------------------------------------------------------------


Status = Literal["pass", "fail", "warn", "skip"]


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
    """All checks of one policy, in the order they were made."""

    source: str
    provider: str
    threads: int
    spec: PolicySpec | None
    checks: Sequence[Check]

    @property
    def exit_code(self) -> int:
        """0: nothing failed. 1: the policy failed a check. 3: all that failed is this machine's."""
        failed = [check for check in self.checks if check.status == "fail"]
        if not failed:
            return 0
        return 3 if all(check.environment for check in failed) else 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe; the keys stand in `reflex doctor --help`."""
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

    provider, threads: as in `OnnxSession`, and as the policy would be served. instruction: one it has to understand;
    default its own first words. rtc_horizon: actions of a chunk that anchor the next one; named, a policy that cannot
    do it fails, else it is a warning for the default. rows: as in `Policy`; named, it is proven that they make answers
    deterministic. clocks, total_memory: for tests.
    """
    clocks = clocks or Clocks()
    context = CheckContext(str(source), provider, threads, instruction, rtc_horizon, clocks, total_memory, rows)
    checks: dict[str, Check] = {}
    left_out = (set() if is_export(context.source) else OF_EXPORTS) | (set() if rows else {"deterministic"})
    for rule in [rule for rule in CHECKS if rule.id not in left_out]:
        broken = [checks[id] for id in rule.needs if id in checks and checks[id].status in ("fail", "skip")]
        if broken:
            told = [f"{check.id} {'failed' if check.status == 'fail' else 'was skipped'}" for check in broken]
            checks[rule.id] = Check(rule.id, "skip", "", f"needs a check that did not pass: {', '.join(told)}")
        else:
            checks[rule.id] = _made(rule, context)
    return Diagnosis(context.source, provider, threads, context.loaded, list(checks.values()))


def _made(rule: CheckRule, context: CheckContext) -> Check:
    began = context.clocks.monotonic()

    def check(status: Status, actual: str, remedy: str = "", environment: bool = False) -> Check:
        expected = "" if status == "skip" else rule.expected
        return Check(rule.id, status, expected, actual, remedy, environment, context.clocks.monotonic() - began)

    try:
        return check("pass", rule.look(context))
    except CheckSkipped as skip:
        return check("skip", str(skip))
    except CheckFailure as fault:
        return check("fail", fault.actual, fault.remedy or rule.remedy, fault.environment or rule.environment)
    except CheckWarning as doubt:
        return check("warn", doubt.actual, doubt.remedy or rule.remedy)
    except ReflexError as error:
        return check("fail", error.message, rule.remedy, rule.environment)
    except Exception as error:  # whatever a policy makes a check do, the other checks are made
        met = "this check met something that it does not know; please report it with this text"
        return check("fail", f"{type(error).__name__}: {error}", met)
