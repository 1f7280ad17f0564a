"""`reflex feeds NAME=SOURCE …`: many cameras and videos on one processor."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from reflex_runtime.observe.logs import guard
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import add_options

_EPILOG = """\
sources:
  video.mp4                          a file: every frame is answered, none is dropped
  rtsp://user:secret@camera/stream   a camera: the newest frame wins; also rtsps, http, https and /dev/video0
  pictures/                          a directory: each picture once, results name the file
  shapes:seed=3,fps=15               moving shapes, for trying it out

examples:
  reflex feeds a=shapes:seed=1,seconds=20 --onnx shapes --annotate out           the bundled detector, no camera needed
  reflex feeds yard=rtsp://10.0.0.7/live --onnx yolo11n.onnx --classes person,car --results found.jsonl
  reflex feeds door=rtsp://10.0.0.7/live door.roi=0,200,1280,520 yard=yard.mp4 --fps 5 --processor mypkg:Detector
  reflex feeds --config cameras.toml --port 9000                     http://127.0.0.1:9000/feeds shows them

Every option can also be set in the file's table [feeds] and in the environment (REFLEX_MAX_BATCH_SIZE=8); a table
[[feed]] has name, source and options of one feed (docs/feeds.md). SIGHUP reads the file again. Ctrl-C stops in order;
a second one does not wait.
Exit status: 0 when every feed ended or you stopped it, 1 when something is missing, 2 for a wrong option or a processor
that does not start, 130 for a second Ctrl-C.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    what = "Run many cameras and videos on one processor: frames share calls, each feed gets its results in order."
    parser = verbs.add_parser("feeds", anywhere="feeds", description=what, epilog=_EPILOG)
    what = "a feed and its source; NAME.SETTING=VALUE, such as door.fps=5, is an option of this feed alone"
    parser.add_argument("feeds", nargs="*", metavar="NAME=SOURCE", help=what)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file: table [feeds], tables [[feed]]")
    add_options(parser, FeedsConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the configuration, then run the feeds. Returns the exit status."""
    from reflex_runtime.feeds.outputs import check_files, outputs_of
    from reflex_runtime.feeds.plan import plan_of, processor_of_plan

    read = partial(plan_of, args.feeds, args.config, vars(args))
    plan = read()
    config = plan.config
    check_files(config)
    outputs = outputs_of(config)
    if config.otel:
        from reflex_runtime.observe.tracing import check_otel

        check_otel(config.otel)
    guard(stdout=config.results != "-")
    output = sys.stdout
    from reflex_runtime.feeds.session import FeedsSession  # late: errors above do not need it

    with redirect_stdout(sys.stderr if config.results == "-" else output):  # what a processor prints is no result
        again = None if args.config is None else read
        return FeedsSession(plan, processor_of_plan(plan), output, outputs, again).run()
