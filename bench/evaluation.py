"""N environments against `reflex serve` and against openpi's own server, in turns, on the same policy in PyTorch.

    python -m bench.evaluation CLONE_OF_OPENPI [--rounds N] [--environments 1 8 32] [--execute N]

Of the clone only the file of its server is loaded. Servers have one core, environments the other. Episodes a minute are
counted while all environments are at work. Two ceilings are measured beside them: the policy alone, called with 1 and
with 32 rows, and robots without a simulator, which ask again at once.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import cores, pin
from bench.report import Row, row, say, table
from bench.servers import Server, reflex, running
from reflex_runtime.robots import Policy, load_policy
from reflex_runtime.robots.versions.comparison import wilson
from reflex_runtime.robots.wires.openpi import encode

APP = "bench.apps.metaworld_torch"
OURS, THEIRS = "reflex", "openpi's server"
AXIS = "reflex, one message"  # with a leading axis
EXAMPLES = Path(__file__).parents[1] / "examples"
CALLS = 8  # of each size a round


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.evaluation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("openpi", type=Path, help="a clone of github.com/Physical-Intelligence/openpi")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--execute", type=int, default=8, help="actions taken of each chunk")
    args = parser.parse_args()
    policy = load_policy(f"python:{APP}:make")
    ours = reflex(Path(f"python:{APP}:make"), name=OURS, ready="/healthz")
    theirs = Server(THEIRS, ["-m", APP, str(args.openpi), "PORT"], "/", ready="/healthz")
    with running(ours, theirs) as servers:
        for environments in args.environments:
            print(table(turns(servers, policy, environments, args.rounds, args.execute)), flush=True)


def turns(servers: list[Server], policy: Policy, environments: int, rounds: int, execute: int) -> list[Row]:
    """Both servers in every round; the order turns."""
    case = f"{environments} environment{'s' if environments > 1 else ''}"
    results: dict[str, list[Any]] = {OURS: [], AXIS: [], THEIRS: []}
    answers: dict[str, list[float]] = defaultdict(list)
    calls: dict[int, list[float]] = defaultdict(list)
    for i in range(rounds):
        say(f"  {case}: round {i + 1} of {rounds}")
        for n in (1, 32):
            calls[n].append(call(policy, n))
        for server in servers[:: 1 if i % 2 else -1]:
            answers[server.name].append(server.load(callers=environments, seconds=2.0, warm=1.0, **JOB).rate)
            results[server.name].append(evaluated(server, environments, execute))
        results[AXIS].append(evaluated(servers[0], environments, execute, "--one-message"))
    rows = [row(case, f"a call of the policy, rows: {n}", each, "ms") for n, each in calls.items()]
    rows.append(row(case, "rows a second in calls of 32 over calls of 1", ratios(calls[1], calls[32], 32), "x"))
    least = 4.0 if environments == 32 else None
    rows += [row(case, f"answers a second without a simulator, {name}", each, "") for name, each in answers.items()]
    rows.append(row(case, f"the same, {OURS} over {THEIRS}", ratios(answers[OURS], answers[THEIRS]), "x", least=least))
    for name in (OURS, AXIS, THEIRS):
        rows += summary(case, name, results[name])
    rates = {name: [60 * result["rate"] for result in each] for name, each in results.items()}
    for name in (OURS, AXIS):
        ratio = ratios(rates[name], rates[THEIRS])
        rows.append(row(case, f"episodes a minute, {name}, over {THEIRS}", ratio, "x", least=least))
    return rows


def ratios(ours: Sequence[float], theirs: Sequence[float], times: float = 1.0) -> list[float]:
    """Round by round."""
    return [times * a / b for a, b in zip(ours, theirs, strict=True)]


def summary(case: str, name: str, results: Sequence[Any]) -> list[Row]:
    """Of a server. The spread of its success is the Wilson interval of all rounds."""
    solved = [one["success"] for result in results for one in result["scores"]]
    low, high = wilson(sum(solved), len(solved))
    success = row(case, f"solved of {len(solved)}, {name}", [100 * sum(solved) / len(solved)], "%")
    success.low, success.high = 100 * low, 100 * high
    rates = row(case, f"episodes a minute, {name}", [60 * result["rate"] for result in results], "")
    return [success, rates, row(case, f"cores of the environments, {name}", [one["cores"] for one in results], "")]


def evaluated(server: Server, environments: int, execute: int, *more: str) -> Any:
    """What `demo.evaluate` measures, on the environments' core."""
    where = cores()[1]
    episodes = {1: 8, 8: 16}.get(environments, 32)
    options = {"--environments": environments, "--episodes": episodes, "--execute": execute}
    command = [sys.executable, "-W", "ignore", "-m", "demo.evaluate", f"ws://127.0.0.1:{server.port}", "--json"]
    done = subprocess.run(
        [*command, *more, *(str(word) for pair in options.items() for word in pair)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE, check=True, preexec_fn=lambda: pin(where),
    )  # fmt: skip
    return json.loads(done.stdout)


def seen(rng: np.random.Generator) -> dict[str, Any]:
    """A picture, a state and an instruction."""
    picture = rng.integers(0, 256, (64, 64, 3), np.uint8)
    return {"image": picture, "state": rng.uniform(-1.0, 1.0, 4).astype(np.float32), "text": "close the drawer"}


def call(policy: Policy, n: int) -> float:
    """Median milliseconds of a call with n rows, on a thread of this process."""
    rows = [seen(np.random.default_rng(i)) for i in range(n)]
    requests = [
        policy.request(policy.prepare(images={"image": one["image"]}, state=one["state"], instruction=one["text"]))
        for one in rows
    ]
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        policy.answers(requests)
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times))


def _job() -> dict[str, Any]:
    one = seen(np.random.default_rng(14))
    frame = encode({"observation/image": one["image"], "observation/state": one["state"], "prompt": one["text"]})
    return {"path": "/", "wire": "openpi", "packed": base64.b64encode(frame).decode()}


JOB = _job()

if __name__ == "__main__":
    main()
