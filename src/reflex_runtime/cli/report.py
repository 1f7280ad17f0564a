"""`reflex report`: A against B out of journals, as text, JSON and a picture; recorded episodes as a LeRobot dataset."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from reflex_runtime.cli.progress import ProgressLine
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import one_of, whole
from reflex_runtime.telemetry.journal import JournalError

if TYPE_CHECKING:
    from reflex_runtime.policies.records.lerobot_dataset import DatasetWritten
    from reflex_runtime.policies.records.rerun_file import RerunWritten

_DESCRIPTION = """\
Sum up what `reflex serve` wrote with --record DIR or --trace FILE: per slot its requests, episodes, success with a
95 % Wilson interval, latency, guard and errors; a compared with b by e-values, which stay valid however often you look;
the shadow's divergence; and a timeline of decisions.

With --to-lerobot the recorded episodes are written as a LeRobotDataset v3.0 instead, to train on what the robots did.
With --rerun one episode is written as a file for the Rerun viewer.
"""

_EPILOG = """\
examples:
  reflex report recordings/                       everything that was recorded there
  reflex report monday.jsonl.gz tuesday.jsonl.gz  two files as one run
  reflex report recordings/ --format json         for programs
  reflex report recordings/ --out ab              also ab.svg and ab.png: success and e-values over time
  reflex report recordings/ --to-lerobot fleet                 one frame a request, with its whole chunk
  reflex report recordings/ --to-lerobot fleet --frames steps  one frame a control step, with what was executed
  reflex report recordings/ --rerun ep_7.rrd --episode ep_7    one episode to look at: rerun ep_7.rrd

An e-value of 1,000 decides: if both are equally good, the chance that it ever reaches 1,000 is at most 1 in 1,000.

exit codes: 0 fine, 1 a file cannot be read (file and line are named), 2 bad arguments
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="FILE|DIR", help="journals, or directories of them")
    add("--policy", metavar="NAME", help="the policy to report, where several were served (docs/several-policies.md)")
    add("--format", default="text", metavar="text|json", help="form of the output (default text)")
    add("--out", type=Path, metavar="PREFIX", help="also draw PREFIX.svg and PREFIX.png")
    add(
        "--margin",
        default="5",
        metavar="POINTS",
        help="b counts as not worse if its success is at most this much lower, in (0, 100) percentage points",
    )
    add(
        "--to-lerobot",
        type=Path,
        metavar="DIR",
        help="write the episodes of recordings with images (--record-images full) as a LeRobotDataset v3.0 into DIR, "
        "which must be new or empty; needs the extra `datasets`",
    )
    add(
        "--frames",
        metavar="requests|steps",
        help="with --to-lerobot: one frame a request (default), or one a control step that was executed",
    )
    add(
        "--fps",
        metavar="N",
        help="with --to-lerobot: frames a second; default: the rate of the requests, or with --frames steps the "
        "control rate in the recording",
    )
    add(
        "--rerun",
        type=Path,
        metavar="FILE",
        help="write one episode as a new file for the Rerun viewer (.rrd): pictures, state, actions, latency; needs "
        "the extra `rerun`",
    )
    add(
        "--episode",
        metavar="ID",
        help="with --to-lerobot: only the episode with this id; with --rerun: this one instead of the first",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Report; returns the exit code."""
    from reflex_runtime.policies.records.report import report

    if args.format not in ("text", "json"):
        raise ConfigError(f"--format={args.format}: {one_of(args.format, ('text', 'json'))}")
    try:
        margin = float(args.margin)
    except ValueError:
        margin = 0.0
    if not 0.0 < margin < 100.0:
        raise ConfigError(f"--margin={args.margin}: must be a number in (0, 100), of percentage points")
    if args.to_lerobot is not None or args.rerun is not None:
        return _exported(args)
    _without_effect(args, ("frames", "fps"), "without --to-lerobot")
    _without_effect(args, ("episode",), "without --to-lerobot or --rerun")
    try:
        found = report(args.paths, margin=margin / 100.0, policy=args.policy)
    except JournalError as error:
        print(f"reflex report: {error.message}", file=sys.stderr)
        return 1
    print(json.dumps(found.as_dict(), indent=1) if args.format == "json" else found.text())
    if args.out is not None:
        from reflex_runtime.policies.records.report_picture import draw_report

        paths = draw_report(found, args.out)
        print(f"wrote {' and '.join(str(p) for p in paths)}", file=sys.stderr)
    return 0


# -- episodes, as files for other programs -----------------------------------------------------------------------------


def _without_effect(args: argparse.Namespace, options: Iterable[str], why: str) -> None:
    for option in options:
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option}: has no effect {why}")


def _exported(args: argparse.Namespace) -> int:
    if args.to_lerobot is not None and args.rerun is not None:
        raise ConfigError("--to-lerobot and --rerun: give one of them")
    try:
        written = _to_lerobot(args) if args.rerun is None else _to_rerun(args)
    except JournalError as error:
        print(f"reflex report: {error.message}", file=sys.stderr)
        return 1
    print(json.dumps(written.as_dict(), indent=1) if args.format == "json" else written.text())
    return 0


def _to_lerobot(args: argparse.Namespace) -> DatasetWritten:
    from reflex_runtime.policies.records.episodes import RecordedEpisodes
    from reflex_runtime.policies.records.lerobot_dataset import FRAME_KINDS, MOST_FPS, need_packages, write_lerobot

    kind = args.frames or "requests"
    if kind not in FRAME_KINDS:
        raise ConfigError(f"--frames={kind}: {one_of(kind, FRAME_KINDS)}")
    _without_effect(args, ("out",), "with --to-lerobot")
    fps = None if args.fps is None else whole("--fps", args.fps, 1, MOST_FPS)
    need_packages()
    target = _empty(args.to_lerobot)
    progress = ProgressLine("requests read")
    with RecordedEpisodes(args.paths, target, args.episode, progress, args.policy) as found:
        return write_lerobot(found, target, kind=kind, fps=fps, advance=ProgressLine("requests written"))


def _to_rerun(args: argparse.Namespace) -> RerunWritten:
    from reflex_runtime.policies.records.episodes import RecordedEpisodes
    from reflex_runtime.policies.records.rerun_file import need_rerun, write_rerun

    _without_effect(args, ("frames", "fps", "out"), "with --rerun")
    need_rerun()
    scratch = args.rerun.absolute().parent
    if not scratch.is_dir():
        raise ConfigError(f"--rerun={args.rerun}: no directory {scratch}")
    progress = ProgressLine("requests read")
    with RecordedEpisodes(args.paths, scratch, args.episode or "", progress, args.policy) as found:
        return write_rerun(found, args.rerun, ProgressLine("requests written"))


def _empty(target: Path) -> Path:
    """A directory without anything in it, for its owner alone if it is new: it will hold pictures."""
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        if next(target.iterdir(), None) is not None:
            raise ConfigError(f"--to-lerobot={target}: not empty; name a new directory")
    except OSError as error:
        raise ConfigError(f"--to-lerobot={target}: {error.strerror or error}") from error
    return target
