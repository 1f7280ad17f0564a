"""`reflex export`: an export directory from a LeRobot checkpoint, compared with it before it is there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import whole

_DESCRIPTION = """\
Write an export directory (ONNX, docs/exports.md) from a LeRobot checkpoint: it is served without PyTorch and LeRobot,
by ONNX Runtime on any device. Exported are ACT, and Diffusion with DDIM, each as one graph from uint8 pictures and the
robot's state to actions in the robot's units, with LeRobot's own normalisation in it; and SmolVLA as two, in float32,
so that robots join and leave between denoise steps. Other types, and processors that a graph cannot have, are refused
with the reason: serve them as they are, with `reflex serve lerobot:DIR`.

The export is compared before it is there: six made-up episodes, asked alone, in pairs and all together (of SmolVLA also
at different steps), against LeRobot's own preprocessor, policy and postprocessor. The largest difference is printed.
Beyond the bound (1e-4 in the unit that a joint is normalised by, and 1e-6 of its largest action) nothing is written and
the exit status is 1.
"""

_EPILOG = """\
examples:
  pip install '.[lerobot,export]'
  reflex export lerobot:./outputs/train/act/checkpoints/last/pretrained_model ./act-export
  reflex doctor ./act-export && reflex serve ./act-export

Pictures of another size than the policy's are resized by the server, stretched, as with `reflex serve lerobot:DIR`.
The robot's ranges and rate are in no LeRobot checkpoint: an embodiment.json (docs/exports.md) beside its config.json
is copied. Weights beyond 2 GB are written to a file beside the graph.

exit codes: 0 written and the same, 1 not the same (nothing is written), 2 bad arguments, or a type that is not exported
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "export", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="lerobot:DIR, or DIR alone: config.json, model.safetensors, processors")
    add("out", metavar="OUT", type=Path, help="the directory to write; must not exist or be empty")
    add("--opset", default="18", metavar="N", help="ONNX opset of the graph, 18 (default) to 23")
    add("--force", action="store_true", help="replace the export at OUT, once the new one was compared")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write and compare; returns the exit code."""
    from reflex_runtime.robots.policy.spec import OPENPI, PYTHON
    from reflex_runtime.robots.sources.lerobot_export import BOUND, OPSETS, NotTheSame, export_checkpoint
    from reflex_runtime.robots.sources.load import is_export

    opset = whole("--opset", args.opset, *OPSETS)
    if args.source.startswith((OPENPI, PYTHON)):
        raise ConfigError(f"{args.source}: only LeRobot checkpoints are exported; serve it as it is")
    if is_export(args.source) and Path(args.source, "reflex_config.json").is_file():
        raise ConfigError(f"{args.source}: is an export already; serve it as it is")
    try:
        found = export_checkpoint(
            args.source, args.out, opset=opset, force=args.force, told=lambda line: print(line, flush=True)
        )
    except NotTheSame as error:
        print(f"reflex export: {args.source}: {error.message}", file=sys.stderr)
        return 1
    print(
        f"largest difference in {found.compared} answers: {found.difference:.2g}, in units of normalisation "
        f"{found.in_units:.2g} (bound {BOUND:g})\n"
        f"wrote {args.out}; check it with: reflex doctor {args.out}; serve it with: reflex serve {args.out}"
    )
    return 0
