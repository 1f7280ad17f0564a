"""The checks that load an export and run it, and those of the machine and the robot around it."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.policies.doctor.findings import (
    CheckContext,
    Finding,
    failed,
    json_object,
    passed,
    size,
    skipped,
    some,
    warned,
)
from reflex_runtime.policies.doctor.trial import sample, typical_action
from reflex_runtime.policies.export.config_file import CONFIG_FILE
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.export.embodiment import EMBODIMENT_FILE
from reflex_runtime.policies.export.memory import SHARE, Room
from reflex_runtime.policies.load import load_policy
from reflex_runtime.policies.policy.spec import PYTHON, DeviceOptions, PolicySpec
from reflex_runtime.policies.source import is_export, read_source
from reflex_runtime.processors import providers
from reflex_runtime.processors.providers import CPU, CUDA

SAMPLES: Final = 8
"""Requests made up; batch parity is looked at for 2, 4 and 8 of them."""

PARITY: Final = 1e-4
"""Largest difference between an action of a batch and the same one alone, as a share of its joint's scale: its
standard deviation, or its largest value. Kernels that add up in another order at other batch sizes give about 1e-6 in
float32 (measured: 0 on the CPU, 2.8e-6 on CUDA); rows that influence each other give 0.01 and more. Well below the 1e-3
at which a replay calls an answer different, so that a healthy export replays whatever batches it ran in."""

PARITY_HALF: Final = 2e-2
"""The same for graphs in 16 bits: their numbers are 1e-3 apart, and sums of them differ by some of those steps."""

LEAST_SCALE: Final = 1e-6  # of a joint that never moves

RTC_HORIZON: Final = 10  # default of --rtc-horizon
LEAST_WALL: Final = 1_735_689_600.0  # 2025-01-01: an earlier wall clock was never set
DAY: Final = 86_400.0

# -- running it --------------------------------------------------------------------------------------------------------


def check_source(context: CheckContext) -> Finding:
    """Of what is no export: its own reader says what is wrong."""
    expected = "a policy that says what it expects and gives"
    try:
        context.loaded = spec = read_source(context.source, context.device)
        spec.check()
    except ConfigError as error:
        return failed(expected, error.message, "see docs/policies.md")
    kind = f"{spec.model_id}, {spec.model_type}, {spec.inference_mode}, {spec.num_denoising_steps} steps"
    return passed(expected, f"{kind}, chunk of {spec.chunk_size} x {spec.action_dim}, model {spec.model_hash}")


def check_provider(context: CheckContext) -> Finding:
    try:
        providers.check_provider(context.provider)
    except ConfigError as error:
        return failed(
            f"{context.provider} in this onnxruntime", error.message,
            "install what is named there into this environment, or serve with --provider cpu", environment=True,
        )
    return passed(f"{context.provider} in this onnxruntime", "there")


def check_model_load(context: CheckContext) -> Finding:
    expected = f"loads on {context.provider}"
    began = context.clocks.monotonic()
    try:
        context.opened = load_policy(context.spec, device=context.device)
    except ConfigError as error:
        if context.provider != CPU and _loads_on_cpu(context):
            return failed(
                expected, f"{error.message}; on the CPU it loads",
                "the driver or its libraries do not fit this onnxruntime: compare nvidia-smi with onnxruntime.ai/docs/"
                "execution-providers, or serve with --provider cpu",
                environment=True,
            )
        return failed(
            expected, error.message,
            "export again, with an opset that this onnxruntime knows (pip install -U onnxruntime) and operators of "
            "ONNX itself; copy the files again if they may have been damaged",
        )
    return passed(expected, f"{size(context.spec.model_bytes)} in {context.clocks.monotonic() - began:.2f} s")


def _loads_on_cpu(context: CheckContext) -> bool:
    try:
        load_policy(context.spec, device=DeviceOptions(threads=context.threads))
    except ConfigError:
        return False
    return True


def _instructions(context: CheckContext) -> list[str | None]:
    """What the samples ask for: the one named, else the first and the last words of the vocabulary."""
    spec = context.spec
    if not spec.takes_text:
        return [None]
    if context.instruction:
        return [context.instruction]
    words = spec.config.get("tokenizer") if spec.tokenizer is not None else None
    if isinstance(words, str):
        model = json_object(context.root / words).get("model")
        words = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(words, dict) or not words:
        return ["pick up the red block", "open the drawer"]
    known = [word for word in sorted(words, key=lambda word: int(words[word])) if word.isalnum()] or ["open"]
    return [" ".join(known[: spec.max_tokens]), " ".join(known[-spec.max_tokens :])]


def check_tokenizer(context: CheckContext) -> Finding:
    tokenizer, most = context.spec.tokenizer, context.spec.max_tokens
    if tokenizer is None:
        return skipped("the model makes its own tokens" if context.spec.takes_text else "the policy reads no text")
    expected = "known words, no longer than max_tokens"

    def ids(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, 1)]

    nonsense = ids("zqxjkvbp")
    for text in filter(None, _instructions(context)):
        words = text.split()
        unknown = [word for word in words if ids(word) == nonsense and word != "zqxjkvbp"]
        if len(unknown) == len(words):
            return failed(
                expected, f"{text!r}: not one word of it is known",
                f"the tokenizer is not that of the training: put the right one into {CONFIG_FILE} (tokenizer)",
            )
        if unknown:
            return warned(
                expected, f"{text!r}: {', '.join(map(repr, unknown))} unknown",
                "ask in the words of the training data, or add them to the tokenizer and train with them",
            )
        whole = text if context.spec.prompt is None else context.spec.prompt.render(text, _no_state(context.spec))
        if len(tokenizer.ids(whole)) > most:
            return warned(
                expected, f"{whole!r}: over max_tokens={most}; what follows is cut off",
                "ask in fewer words, or export again with a longer token row (max_tokens)",
            )
    return passed(expected, " and ".join(repr(text) for text in _instructions(context)))


def _no_state(spec: PolicySpec) -> NDArray[np.float32]:
    """A normalised state in the middle: for the length of a prompt that has it."""
    return np.zeros(spec.state_dim, np.float32)


def check_actions(context: CheckContext) -> Finding:
    """Made-up observations, one at a time. The first is run twice: loading is no part of its time."""
    policy, expected = context.policy, "finite actions within the robot's ranges"
    texts = _instructions(context)
    requests = [sample(policy, i, texts[i % len(texts)]) for i in range(SAMPLES)]
    times = []
    try:
        policy.answers(requests[:1])
        for request in requests:
            began = context.clocks.monotonic()
            context.alone += policy.answers([request])
            times.append(context.clocks.monotonic() - began)
    except ReflexError as error:
        return failed(
            expected, error.message,
            "the graph loads and cannot run: sizes inside it do not fit (a reshape with a fixed number of rows, ids "
            "beyond the vocabulary, images of another size); run the model once in the tool that exported it",
        )
    context.answer_time = sorted(times)[len(times) // 2]
    actions = np.stack([chunk.actions for chunk in context.alone])
    if not np.isfinite(actions).all():
        bad = ~np.isfinite(actions)
        joints = _names(context, np.flatnonzero(bad.any((0, 1))))
        return failed(
            expected, f"{int(bad.sum())} of {actions.size} values are NaN or infinite, joints {joints}",
            "a division by zero or an overflow in the graph (float16 does that beyond 65504), or weights that hold "
            "NaN: run the checkpoint before its export on the same input",
        )
    told = f"{SAMPLES} samples in [{actions.min():.3g}, {actions.max():.3g}], {context.answer_time * 1e3:.1f} ms each"
    ranges = context.spec.embodiment.action_ranges
    if ranges is None:
        return passed("finite actions (no ranges are known)", told)
    outside = (actions < ranges[:, 0]) | (actions > ranges[:, 1])
    share = float(outside.mean())
    if share > 0.5:
        joints = _names(context, np.flatnonzero(outside.any((0, 1))))
        return failed(
            expected, f"{share:.0%} of the values are outside, joints {joints}; {told}",
            "action_norm or action_ranges are of another robot or in other units (degrees, radians, metres): compare "
            f"{CONFIG_FILE} with the embodiment file",
        )
    told += f", {share:.0%} of the values outside their range (the guard clamps those)"
    if share > 0.2:
        return warned(expected, told, f"compare action_norm in {CONFIG_FILE} with action_ranges: is it the same robot?")
    return passed(expected, told)


def _names(context: CheckContext, joints: NDArray[Any]) -> str:
    names = context.spec.embodiment.action_names
    return ", ".join(names[j] if names else str(j) for j in joints.tolist())


def check_cameras(context: CheckContext) -> Finding:
    """What a request that leaves out every camera that it may leave out is answered."""
    spec, policy = context.spec, context.policy
    expected = "finite actions without the optional cameras, and a mask that tells the model so"
    if not spec.optional_images:
        return passed(expected, "none is optional")
    text, left = _instructions(context)[0], ", ".join(sorted(spec.optional_images))
    try:
        (chunk,) = policy.answers([sample(policy, 0, text, without=spec.optional_images)])
    except ReflexError as error:
        return failed(
            expected, f"without {left}: {error.message}",
            "the graph cannot do with a mask that is false: look for a division by the number of pictures",
        )
    if not np.isfinite(chunk.actions).all():
        return failed(
            expected, f"without {left}: some actions are NaN or infinite",
            "where all of a picture's tokens are masked, a softmax has nothing left: mask with a large negative number",
        )
    if isinstance(spec, Export) and not spec.masked:
        return warned(
            expected, f"without {left}: finite, and no input has the role image_masks or image_mask/NAME",
            "the model takes a missing camera for a black picture: fine if it was trained so, else export the masks",
        )
    return passed(expected, f"finite without {left}")


def check_determinism(context: CheckContext) -> Finding:
    expected = "the same bits for the same observation and seed"
    policy, texts = context.policy, _instructions(context)
    again = policy.answers([sample(policy, 0, texts[0])])[0].actions
    first = context.alone[0].actions
    if again.tobytes() != first.tobytes():
        return failed(
            expected, f"differs by up to {float(np.abs(again - first).max()):.3g}",
            "the graph draws random numbers of its own (RandomNormal, a dropout left on): export in eval mode, with "
            "the noise as an input (inputs.noise); on CUDA it may be a kernel that adds up in any order",
        )
    return passed(expected, "bit-equal")


def check_batch_parity(context: CheckContext) -> Finding:
    half = context.policy.model.half or any(file.half for file in context.files.values())
    bound = PARITY_HALF if half else PARITY
    expected = f"an action of a batch within {bound:g} of its joint's scale of the same one alone"
    policy, texts = context.policy, _instructions(context)
    alone = np.stack([chunk.actions for chunk in context.alone])
    scale = np.maximum(np.abs(alone).max(axis=(0, 1)), np.maximum(typical_action(context.spec)[1], LEAST_SCALE))
    steps = context.spec.num_denoising_steps
    worst, where = 0.0, ""
    for n in (2, 4, 8):
        ways = {"together": [0] * n}
        if context.spec.staged and steps > 1:
            ways["at different steps"] = [i % steps for i in range(n)]
        for how, starts in ways.items():
            requests = [sample(policy, i, texts[i % len(texts)]) for i in range(n)]
            try:
                chunks = policy.answers(requests, starts)
            except ReflexError as error:
                return failed(
                    expected, f"{n} {how}: {error.message}",
                    "the first axis is symbolic and the graph cannot do with it: a reshape or a constant inside is of "
                    "one row. Export with a batch of 2 as the example; until then --max-batch-size 1",
                )
            ratios = np.abs(np.stack([c.actions for c in chunks]) - alone[:n]) / scale
            if not ratios.max() <= worst:  # NaN is never better
                worst, where = float(ratios.max()), f" ({n} {how})"
    if not worst <= bound:
        return failed(
            expected, f"differs by {worst:.3g}{where}",
            "rows influence each other: batch statistics (export in eval mode), a mean or softmax over the batch axis, "
            "one time for all rows, padding to the longest. Until it is exported again: --max-batch-size 1",
        )
    return passed(expected, f"{worst:.3g} at most{where}, for 2, 4 and 8")


# -- the machine and the robot -----------------------------------------------------------------------------------------


def check_memory(context: CheckContext) -> Finding:
    where = "GPU memory" if context.provider == CUDA else "memory"
    try:
        total = context.total_memory(context.provider)
    except ConfigError as error:
        return skipped(error.message)
    one, two = (Room(context.spec.model_bytes, total, n) for n in (1, 2))
    expected = f"two policies of its size within {SHARE:.0%} of the {where}"
    actual = f"2 x {size(two.model_bytes)} of {size(two.available)} ({SHARE:.0%} of {size(total)})"
    if two.fits:
        return passed(expected, actual)
    if one.fits:
        return warned(expected, actual, f"served alone it is fine. {two.refusal(context.provider)}")
    return failed(
        expected, f"{size(one.needed)} for one alone, of {size(one.available)}",
        "free memory is not enough for this model: a larger machine, a smaller model, or its export in float16",
        environment=True,
    )


def check_embodiment(context: CheckContext) -> Finding:
    spec, robot = context.spec, context.spec.embodiment
    expected = "a robot that is known: action space, ranges that hold the mean action, cameras of these names"
    doubts = []
    if robot.action_ranges is None:
        doubts.append("no action_ranges: nothing is clamped")
    elif spec.action_norm is not None:
        low, high = robot.action_ranges[:, 0], robot.action_ranges[:, 1]
        mean, std = typical_action(spec)
        outside = np.flatnonzero((mean < low) | (mean > high))
        if len(outside):
            told = [
                f"{_names(context, outside[i : i + 1])}: mean {mean[j]:.3g}, range [{low[j]:.3g}, {high[j]:.3g}]"
                for i, j in enumerate(outside)
            ]
            return failed(
                expected, f"the mean action of the training data is outside its range: {some(told)}",
                "action_norm and action_ranges are of different robots, orders or units: compare them joint by joint",
            )
        wide = np.flatnonzero((high - low) < std)
        if len(wide):
            doubts.append(f"ranges narrower than one standard deviation: {_names(context, wide)}")
    if robot.action_space is None:
        doubts.append("no action_space: whether a repeated action moves the robot on is not known")
    unknown = [name for name in spec.images if robot.cameras is not None and name not in robot.cameras]
    if unknown and len(spec.images) > 1:
        doubts.append(f"images that are no camera of the robot: {', '.join(unknown)}")
    if doubts:
        file = f"complete {EMBODIMENT_FILE} (docs/exports.md, Embodiment)"
        return warned(expected, some(doubts), file if is_export(context.source) else "give PolicySpec an Embodiment")
    return passed(expected, f"{robot.name}, {robot.action_space}, {spec.action_dim} ranges")


def check_rtc_boundary(context: CheckContext) -> Finding:
    """What anchoring a chunk to the last one needs of the export: access between steps, a tail, and a time to lose."""
    spec, rate = context.spec, context.spec.embodiment.control_rate_hz
    horizon = context.rtc_horizon if context.rtc_horizon is not None else RTC_HORIZON
    expected = f"decomposed, chunk_size >= horizon {horizon}, an answer before the horizon is reached"
    problem = remedy = ""
    if not spec.staged:
        if context.rtc_horizon is None:
            return skipped("a monolithic export cannot do --rtc: its steps are inside the graph")
        problem = "monolithic: its steps are inside the graph"
        remedy = "export prefix and expert apart, or serve --no-rtc"
    elif spec.chunk_size < horizon:
        problem = f"chunk_size {spec.chunk_size} ends before a horizon of {horizon}"
        half = max(1, spec.chunk_size // 2)
        remedy = f"serve with --rtc-horizon {half} (at most {spec.chunk_size}), or --no-rtc"
    elif rate is None:
        return warned(
            expected, "control_rate_hz is not known",
            f"write the robot's control rate into {EMBODIMENT_FILE}: without it every request has to say how many "
            "actions were `executed`, and those that run while it waits are not frozen",
        )
    else:
        late = math.ceil(context.answer_time * rate)
        problem = f"{late} actions pass in {context.answer_time * 1e3:.1f} ms at {rate:g} Hz, of {spec.chunk_size}"
        if late <= horizon:
            return passed(expected, problem)
        remedy = "a faster device, fewer denoising steps or a longer chunk: the robot has none left when it is answered"
        if late < spec.chunk_size:
            remedy = f"--rtc-horizon {late} or more (at most {spec.chunk_size}), or a faster device"
    return (warned if context.rtc_horizon is None else failed)(expected, problem, remedy)


def check_clock(context: CheckContext) -> Finding:
    clocks = context.clocks
    expected = "a monotonic clock of 1 ms or finer that never goes back, a wall clock that is set and keeps pace"
    reads = [clocks.monotonic() for _ in range(1000)]
    back = sum(b < a for a, b in pairwise(reads))
    if back or clocks.resolution > 1e-3:
        actual = f"goes back {back} times in 1000" if back else f"resolution {clocks.resolution:g} s"
        return failed(
            expected, f"the monotonic clock: {actual}",
            "deadlines and batches are timed by it: choose another clock source "
            "(/sys/devices/system/clocksource/clocksource0/current_clocksource), or another hypervisor",
            environment=True,
        )
    monotonic, wall = clocks.together()
    mine = () if context.source.startswith(PYTHON) else context.root.rglob("*")
    newest = max((file.stat().st_mtime for file in mine if file.is_file()), default=0.0)
    if wall < LEAST_WALL or wall < newest - DAY:
        shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(max(0.0, wall)))
        return warned(
            expected, f"the wall clock says {shown} UTC, which is before the export's own files",
            "timestamps of recordings will be wrong: set it (timedatectl set-ntp true), or replace the clock's battery",
        )
    elapsed = monotonic - context.began[0]
    drift = wall - context.began[1] - elapsed
    if abs(drift) > 0.01 + 1e-3 * elapsed:
        return warned(
            expected, f"the wall clock moved {drift:+.3f} s against the monotonic one in {elapsed:.2f} s",
            "something sets it in steps: look at timedatectl and chronyc tracking; recordings are stamped with it",
        )
    return passed(expected, f"{clocks.resolution:.0e} s, {drift * 1e3:+.2f} ms apart after {elapsed:.2f} s")
