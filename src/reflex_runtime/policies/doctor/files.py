"""The checks that read an export and load nothing: files, configuration, and the graphs as they declare themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.doctor.findings import (
    CheckContext,
    Finding,
    failed,
    json_object,
    passed,
    size,
    some,
    warned,
)
from reflex_runtime.policies.export.config_file import CONFIG_FILE
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.export.embodiment import EMBODIMENT_FILE
from reflex_runtime.policies.export.model_files import MODEL_PATTERNS
from reflex_runtime.policies.export.norms import PAIRS
from reflex_runtime.policies.export.onnx_file import Declared, NotOnnx, OnnxFile, read_onnx
from reflex_runtime.policies.policy.prompt import STATE_BINS
from reflex_runtime.policies.serving.wire_names import OPENPI
from reflex_runtime.policies.wires.observations import Reading
from reflex_runtime.processors.ports import TensorSpec, kinds_of

TINY_STD: Final = 1e-6
"""A state that varies less is constant: dividing by it turns the last bit of a sensor into a large number."""

# -- files and configuration -------------------------------------------------------------------------------------------


def check_files(context: CheckContext) -> Finding:
    """Everything is there, can be read, and is what its name says."""
    root, expected = context.root, "readable files, ONNX where the name says so, with their external data"
    found = {file for pattern in (*MODEL_PATTERNS, "*.json") for file in root.rglob(pattern)}
    total = 0
    for file in sorted(found | {context.config_file}):
        try:
            with file.open("rb") as stream:
                head = stream.read(64)
            total += file.stat().st_size
        except FileNotFoundError:
            what = "is a link to nothing" if file.is_symlink() else "not found"
            return failed(expected, f"{file}: {what}", f"copy {file.name} into {root}; is this the export directory?")
        except OSError as error:
            return failed(
                expected, f"{file}: {error.strerror}",
                f"chmod a+r {file}, or run as a user that may read it, here and for the server",
            )
        if head.startswith(b"version https://git-lfs"):
            return failed(
                expected, f"{file}: a Git LFS pointer, not the file itself",
                "run `git lfs install && git lfs pull` where it was cloned, and copy again",
            )
    try:
        context.raw = json_object(context.config_file)
    except ValueError as error:
        return failed(expected, f"{context.config_file}: {error}", f"python -m json.tool {context.config_file}")
    graphs = sorted(file for file in found if file.suffix == ".onnx")
    if not graphs:
        return failed(expected, f"no *.onnx below {root}", "export the model again, or name its directory")
    return _graphs(context, graphs) or passed(expected, f"{len(found)} files, {size(total)}, {len(graphs)} graphs")


def _graphs(context: CheckContext, graphs: Sequence[Path]) -> Finding | None:
    """Read what the graphs say of themselves; a finding when one cannot be what it should."""
    expected, uncounted = "graphs with all of their weights", ""
    for file in graphs:
        try:
            context.files[file] = graph = read_onnx(file)
        except NotOnnx as error:
            return failed(expected, f"{file}: {error}", f"copy {file.name} again and compare sizes, or export again")
        for part in graph.external:
            beside = file.parent / part.location
            if not beside.is_file():
                return failed(
                    expected, f"{file}: its weights are in {part.location}, which is not there",
                    f"copy {part.location} into {file.parent}; large models are exported as two files",
                )
            if beside.stat().st_size < part.end:
                return failed(
                    expected, f"{beside}: {beside.stat().st_size} bytes, {file.name} reads up to byte {part.end}",
                    f"{part.location} was cut off, or belongs to another export: copy both files again",
                )
            if not any(beside.match(pattern) for pattern in MODEL_PATTERNS):
                uncounted = part.location
    if uncounted:
        return warned(
            expected, f"{uncounted} holds weights, and its name matches none of {', '.join(MODEL_PATTERNS)}",
            f"export again with its weights in NAME.onnx.data; {uncounted} does not count in model_hash or memory, so "
            "two versions of it look like one",
        )
    return None


def check_normalisation(context: CheckContext) -> Finding:
    """Read from the files as they are, so that this is checked even if other keys are wrong."""
    raw, expected = context.raw, "statistics of the right lengths, finite, no std or range that is zero or tiny"
    named = raw.get("embodiment")
    beside = context.root / (named if isinstance(named, str) else EMBODIMENT_FILE)
    try:
        robot = json_object(beside) if beside.is_file() else {}
    except ValueError:
        robot = {}  # the check of the configuration says so
    problems, doubts, seen = [], [], []
    for key, dim_key in (("state_norm", "state_dim"), ("action_norm", "action_dim")):
        where = [(file, values[key]) for file, values in ((CONFIG_FILE, raw), (beside.name, robot)) if values.get(key)]
        dim = raw.get(dim_key)
        if len(where) > 1:
            problems.append(f"{key} is in {CONFIG_FILE} and in {beside.name}: keep one of them")
        elif where:
            wrong, doubtful = _norm(key, where[0][1], dim)
            problems += [f"{where[0][0]}: {text}" for text in wrong]
            doubts += [f"{where[0][0]}: {text}" for text in doubtful]
            seen.append(key)
        elif key == "action_norm" or (dim and ("state" in (raw.get("inputs") or {}) or STATE_BINS in str(raw))):
            doubts.append(f"no {key}")
    if problems:
        return failed(
            expected, some(problems),
            "if the graph has another number of dimensions, the dimension in the configuration is wrong; else write "
            "the statistics of the training data there, in the order of the dimensions; of one that never varied set "
            "std to 1.0",
        )
    if doubts:
        return warned(
            expected, some(doubts),
            "fine if the graph normalises by itself (or the dimension is constant); else the robot gets actions in "
            f"the wrong units: add the training data's mean and std to {CONFIG_FILE}",
        )
    return passed(expected, " and ".join(seen) or "no state, and no norm")


def _norm(key: str, norm: Any, dim: Any) -> tuple[list[str], list[str]]:
    """(what is wrong, what is doubtful) with one norm."""
    if not isinstance(norm, dict):
        return [f"{key}: found {type(norm).__name__}, expected an object with mean and std"], []
    named = [pair for pair in PAIRS if norm.keys() & set(pair)]
    if len(named) > 1:
        return [f"{key}: {' and '.join(map('/'.join, named))}: one pair says it all"], []
    parts = named[0] if named else PAIRS[0]
    wrong: list[str] = []
    for part in parts:
        values = norm.get(part)
        if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
            wrong.append(f"{key}.{part}: expected a list of numbers")
            continue
        if len(values) != dim:
            wrong.append(f"{key}.{part}: {len(values)} numbers for {dim} dimensions")
        wrong += [f"{key}.{part}[{i}] is {value}" for i, value in enumerate(values) if not math.isfinite(value)]
    return (wrong, []) if wrong else _widths(key, norm, parts)


def _widths(key: str, norm: dict[str, Any], parts: tuple[str, str]) -> tuple[list[str], list[str]]:
    """The same of what a norm divides by: its deviations, or its ranges."""
    low, high = parts
    around_mean, epsilon = parts == PAIRS[0], norm.get("epsilon") or 0.0
    wrong: list[str] = []
    doubtful: list[str] = []
    for i, (first, second) in enumerate(zip(norm[low], norm[high], strict=True)):
        width = second if around_mean else second - first
        shown = f"{key}.{high}[{i}] is {second:g}" if around_mean else f"{key}: {high}[{i}] − {low}[{i}] is {width:g}"
        if width < 0.0 or (width == 0.0 and not epsilon):
            wrong.append(shown)
        elif width < TINY_STD and epsilon:  # as its training had it
            doubtful.append(f"{shown}, tiny: this dimension never varied")
        elif width < TINY_STD:  # of a state it divides; an action stays where it is
            where, why = (wrong, "tiny") if key == "state_norm" else (doubtful, "tiny: this joint will not move")
            where.append(f"{shown}, {why}")
    return wrong, doubtful


def check_config(context: CheckContext) -> Finding:
    expected = "a configuration that names what there is (docs/exports.md)"
    try:
        context.loaded = export = Export.load(context.root)
    except ConfigError as error:
        return failed(
            expected, error.message,
            "copy the file that is named there into the directory again, or correct the key; docs/exports.md explains "
            "each",
        )
    return passed(
        expected,
        f"{export.model_id}, {export.inference_mode}, {export.num_denoising_steps} steps, "
        f"chunk of {export.chunk_size} x {export.action_dim}, model {export.model_hash}",
    )


def check_wires(context: CheckContext) -> Finding:
    """What observations have to hold: those of openpi, and of each wire that has a block; docs/wires.md."""
    export, expected = context.export, "names of an observation for all that the policy needs, each once"
    shown = []
    for wire in export.wires or (OPENPI,):
        told = Reading(export, export.wires.get(wire)).describe()
        names = [*told["images"], *told.get("state", {}).get("names", ())]
        names += [told["prompt"]] if "prompt" in told else []
        if len(told["images"]) < len(export.images) or len(set(names)) < len(names):
            return warned(
                expected, f"{wire}: {', '.join(names)}",
                f"two cameras, or a camera and the state, are read from one name: see wires in {CONFIG_FILE}",
            )
        shown.append(f"{wire}: {', '.join(names)}{'' if export.wires else ' (no block: found by name)'}")
    return passed(expected, "; ".join(shown))


def check_opset(context: CheckContext) -> Finding:
    export = context.export
    opsets = {name: context.files[graph.file].opsets for name, graph in export.graphs.items()}
    shown = ", ".join(f"{name} {of.get('', of.get('ai.onnx', 0))}" for name, of in opsets.items())
    expected = f"opset {export.opset}" if export.opset is not None else "one opset"
    different = {of.get("", of.get("ai.onnx", 0)) for of in opsets.values()} - ({export.opset} - {None})
    if len(different) > (0 if export.opset is not None else 1):
        return warned(
            expected, shown,
            f"write the graphs' opset as `opset` into {CONFIG_FILE}; if they should agree, export again",
        )
    return passed(expected, shown)


# -- the graphs, as they declare themselves ----------------------------------------------------------------------------


def check_inputs(context: CheckContext) -> Finding:
    expected = "every role has a tensor of its type and size, and every input a role"
    problems: list[str] = []
    for name, graph in context.export.graphs.items():
        file = context.files[graph.file]
        for what, specs, ports in (("input", graph.inputs, file.inputs), ("output", graph.outputs, file.outputs)):
            for role, spec in specs.items():
                problems += [f"{name}: {what}s.{role}: {text}" for text in _mismatch(spec, ports)]
        fed = {spec.name for spec in graph.inputs.values()}
        unfed = [port for port in file.inputs.values() if port.name not in fed]
        problems += [f"{name}: input {_shown(port)} has no role" for port in unfed]
    if problems:
        return failed(
            expected, some(problems),
            f"write the tensors' names and sizes into {CONFIG_FILE} (inputs, outputs, images, state_dim, action_dim, "
            "chunk_size, max_tokens), or export again with these names and sizes",
        )
    graphs = context.export.graphs.values()
    seen = [_shown(context.files[graph.file].inputs[s.name]) for graph in graphs for s in graph.inputs.values()]
    return passed(expected, ", ".join(seen))


def _mismatch(spec: TensorSpec, ports: Mapping[str, Declared]) -> list[str]:
    """What a declared tensor lacks of what is expected."""
    port = ports.get(spec.name)
    if port is None:
        return [f"no tensor {spec.name!r}; there are {', '.join(map(_shown, ports.values()))}"]
    found = []
    letters = {"f": "float", "i": "int", "u": "uint", "b": "bool"}
    if spec.kind and port.dtype.rstrip("0123456789") not in [letters[letter] for letter in spec.kind]:
        found.append(f"{_shown(port)}, expected {kinds_of(spec)}")
    if spec.dims is not None and port.dims is not None:
        have = port.dims[1:]
        fits = len(have) == len(spec.dims) and all(
            want is None or not isinstance(n, int) or n == want for n, want in zip(have, spec.dims, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if n is None else str(n) for n in spec.dims)
            found.append(f"{_shown(port)}, expected [batch, {wanted}]")
    return found


def _shown(port: Declared) -> str:
    dims = "" if port.dims is None else "[" + ", ".join("?" if d is None else str(d) for d in port.dims) + "]"
    return f"{port.name!r} {port.dtype}{dims}"


def check_dynamic_batch(context: CheckContext) -> Finding:
    expected = "a symbolic first axis on every input and output, in every graph"
    graphs = context.export.graphs
    axes = {name: list(_axes(graph.inputs, graph.outputs, context.files[graph.file])) for name, graph in graphs.items()}
    for name, ports in axes.items():
        fixed = [(port, axis) for port, axis in ports if isinstance(axis, int)]
        wrong = [f"{name}: {_shown(port)}" for port, axis in fixed if axis != 1 or len(fixed) < len(ports)]
        wrong += [f"{name}: {_shown(port)} has no axis at all" for port, axis in ports if axis == ""]
        if wrong:
            return failed(
                expected, some(wrong) + (", others are symbolic" if 0 < len(fixed) < len(ports) else ""),
                "export again with dynamic_axes={name: {0: 'batch'} for every input and output}",
            )
    single = [name for name, ports in axes.items() if any(axis == 1 for _, axis in ports)]
    if single:
        half = f"only {', '.join(n for n in axes if n not in single)} has one; " if len(single) < len(axes) else ""
        return warned(
            expected, f"{half}{', '.join(single)}: fixed at 1, so requests of a batch run one after the other",
            "batching saves nothing here: export again with dynamic_axes={name: {0: 'batch'} for every port}",
        )
    return passed(expected, f"symbolic in {' and '.join(axes)}")


def _axes(
    inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec], file: OnnxFile
) -> Iterable[tuple[Declared, int | str]]:
    """(port, its first axis: a size, a name, "" for none) of every port with a known shape."""
    ports = [file.inputs[spec.name] for spec in inputs.values()] + [file.outputs[s.name] for s in outputs.values()]
    for port in ports:
        if port.dims is not None:
            first = port.dims[0] if port.dims else ""
            yield port, "?" if first is None else first
