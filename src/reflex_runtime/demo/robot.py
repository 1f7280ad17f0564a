"""One simulated robot: look, ask for a chunk of actions, execute part of it, look again.

`run_robot` takes any callable as the policy, so the same loop drives the robots of `reflex demo` and the evaluation of
a policy without a server. As a process (`python -m reflex_runtime.demo.robot --url …`) it speaks HTTP like a real one
and prints one JSON line per event on standard output, for a parent to aggregate.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.demo.tasks import INSTRUCTIONS, MAX_STEPS, Observation

if TYPE_CHECKING:
    from reflex_runtime.demo.world import World  # at run time only the process that owns a world loads the simulator

Act = Callable[[Observation], NDArray[np.float32]]
"""A policy: what is seen → a chunk of actions [n ≥ 1, 4], the first to be executed first."""

Event = Mapping[str, Any]
OnEvent = Callable[[Event], None]

EXECUTE: Final = 8
"""Actions executed of each chunk before looking again: half a chunk, so that an error is seen soon."""


class NoAnswer(Exception):
    """The server gave no actions: an error status, an answer that is not one, or refusals beyond the patience."""


@dataclass(frozen=True, slots=True)
class Episode:
    """How one episode ended. `error` is None unless the policy failed to answer; then `success` is False."""

    episode_id: str
    task: str
    success: bool
    steps: int
    calls: int
    error: str | None = None


def run_robot(
    act: Act,
    world: World,
    episodes: int,
    *,
    first_episode: int = 0,
    execute: int = EXECUTE,
    max_steps: int = MAX_STEPS,
    control_hz: float = 0.0,
    on_event: OnEvent = lambda event: None,
) -> list[Episode]:
    """Run `episodes` situations of `world` in closed loop and say how each ended.

    execute: actions taken from each chunk before looking again. control_hz: pace of the control steps on the wall
    clock; 0 runs as fast as the simulator can, 0.1 ms per step. The arm stands still while it waits for an answer.
    """
    results = []
    for number in range(first_episode, first_episode + episodes):
        world.reset(number)
        on_event({"event": "episode_start", "episode_id": world.episode_id, "task": world.task})
        result = _run_episode(act, world, execute, max_steps, control_hz)
        on_event({"event": "episode_end", **asdict(result)})
        results.append(result)
    return results


def _run_episode(act: Act, world: World, execute: int, max_steps: int, control_hz: float) -> Episode:
    steps = calls = 0
    error = None
    success = False
    while steps < max_steps and not success:
        try:
            chunk = act(world.observe())
        except NoAnswer as failure:
            error = str(failure)
            break
        calls += 1
        due = time.monotonic()
        for action in chunk[: min(execute, max_steps - steps)]:
            success = world.step(action)
            steps += 1
            if control_hz:
                due += 1.0 / control_hz
                time.sleep(max(0.0, due - time.monotonic()))
            if success:
                break
    return Episode(world.episode_id, world.task, success, steps, calls, error)


@dataclass(slots=True)
class HttpPolicy:
    """`POST /act` on one keep-alive connection. Call it with an observation; not for several threads.

    wire: "msgpack" (pictures as raw bytes or PNG) or "json" (pictures as base64 PNG).
    patience: seconds for which one question is asked again after 429 or 503 with Retry-After; then NoAnswer. Between
    two attempts it waits as long as the server said, no less. Anything else but 200 is NoAnswer at once.
    """

    url: str
    robot_id: str
    wire: str = "msgpack"
    png: bool = False
    patience: float = 30.0
    timeout: float = 30.0
    deadline_ms: float | None = None
    api_key: str | None = None
    on_event: OnEvent = lambda event: None
    _connection: http.client.HTTPConnection | None = field(default=None, repr=False)
    _asked: int = 0

    def __call__(self, seen: Observation) -> NDArray[np.float32]:
        self._asked += 1
        request_id = f"{self.robot_id}-{os.getpid()}-{self._asked}"
        body = self._encode(seen, request_id)
        began = time.monotonic()
        refusals = 0
        while True:
            sent = time.monotonic()
            status, headers, answer = self._post(body)
            now = time.monotonic()
            event = {"event": "act", "robot_id": self.robot_id, "status": status, "latency_ms": 1e3 * (now - sent)}
            if status == 200:
                decoded = self._decode(headers, answer)
                batch = decoded.get("batch") or {}
                waited_ms = 1e3 * (sent - began)
                self.on_event(event | {"refusals": refusals, "waited_ms": waited_ms, "batch_size": batch.get("size")})
                return _actions(decoded)
            self.on_event(event)
            pause = _retry_after(status, headers)
            if pause is None:
                raise NoAnswer(f"HTTP {status}: {answer[:200].decode(errors='replace')}")
            if now + pause - began > self.patience:
                raise NoAnswer(f"HTTP {status} for {now - began:.1f} s, {refusals + 1} attempts")
            refusals += 1
            time.sleep(pause)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _encode(self, seen: Observation, request_id: str) -> bytes:
        fields: dict[str, Any] = {
            "instruction": seen.instruction,
            "episode_id": f"{self.robot_id}:{seen.episode_id}",
            "request_id": request_id,
            "robot_id": self.robot_id,
        }
        if self.deadline_ms is not None:
            fields["deadline_ms"] = self.deadline_ms
        if self.wire == "json":
            fields["image"] = base64.b64encode(_png(seen.image)).decode()
            fields["state"] = seen.state.tolist()
            return json.dumps(fields).encode()
        import msgpack

        fields["image"] = _png(seen.image) if self.png else _array(seen.image)
        fields["state"] = _array(seen.state)
        packed: bytes = msgpack.packb(fields)
        return packed

    def _decode(self, headers: http.client.HTTPMessage, answer: bytes) -> dict[str, Any]:
        if headers.get_content_type() == "application/json":
            decoded = json.loads(answer)
        else:
            import msgpack

            decoded = msgpack.unpackb(answer)
        if not isinstance(decoded, dict):
            raise NoAnswer("HTTP 200 with a body that is no object")
        return decoded

    def _post(self, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        kind = "application/json" if self.wire == "json" else "application/msgpack"
        headers = {"Content-Type": kind, "Accept": kind}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        parts = urlsplit(self.url)
        for fresh in (self._connection is None, True):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self.timeout)
            try:
                self._connection.request("POST", parts.path.rstrip("/") + "/act", body, headers)
                response = self._connection.getresponse()
                return response.status, response.headers, response.read()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # The server may have closed a kept connection while the robot moved: ask once more on a new one.
                if fresh or isinstance(error, TimeoutError):
                    raise NoAnswer(f"no answer from {self.url}: {error or type(error).__name__}") from error
        raise AssertionError("unreachable")


def _array(values: NDArray[Any]) -> dict[str, Any]:
    """The wire form of an array: dtype, shape and little-endian bytes in C order."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(little.shape), "data": little.tobytes()}


def _actions(answer: Mapping[str, Any]) -> NDArray[np.float32]:
    """The chunk of an answer, from an array in its wire form or from a list of lists."""
    actions = answer.get("actions")
    if isinstance(actions, dict):
        chunk = np.frombuffer(actions["data"], actions["dtype"]).reshape(actions["shape"]).astype(np.float32)
    else:
        chunk = np.asarray(actions, np.float32)
    if chunk.ndim != 2 or len(chunk) == 0 or not np.isfinite(chunk).all():
        raise NoAnswer(f"HTTP 200 without a usable chunk of actions: shape {chunk.shape}")
    return chunk


def _retry_after(status: int, headers: http.client.HTTPMessage) -> float | None:
    """Seconds to wait before asking again; None where asking again is not invited."""
    value = headers.get("Retry-After")
    if status not in {429, 503} or value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        return None


def _png(image: NDArray[np.uint8]) -> bytes:
    import cv2

    ok, data = cv2.imencode(".png", image[..., ::-1])
    assert ok
    return bytes(data)


def _print_event(event: Event) -> None:
    print(json.dumps(event), flush=True)


def _end_with_parent() -> None:
    """Exit as soon as standard input closes: the parent holds its other end, so even a killed parent leaves nothing."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m reflex_runtime.demo.robot", description="One simulated robot.")
    parser.add_argument("--url", required=True, help="server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--robot-id", default="r0")
    parser.add_argument("--task", choices=list(INSTRUCTIONS), default="drawer-close-v3")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--first-episode", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7, help="of the situations; the bundled policies learned on others")
    parser.add_argument("--execute", type=int, default=EXECUTE, help="actions taken of each chunk")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
    parser.add_argument("--control-hz", type=float, default=0.0, help="pace on the wall clock; 0: as fast as it can")
    parser.add_argument("--wire", choices=["msgpack", "json"], default="msgpack")
    parser.add_argument("--png", action="store_true", help="send pictures as PNG (json always does)")
    parser.add_argument("--patience-s", type=float, default=30.0, help="for how long a refused question is asked again")
    parser.add_argument("--deadline-ms", type=float)
    parser.add_argument("--end-with-stdin", action="store_true", help="exit when standard input closes")
    args = parser.parse_args(argv)
    if args.end_with_stdin:
        _end_with_parent()

    from reflex_runtime.demo.world import World

    world = World(args.task, args.seed)
    policy = HttpPolicy(
        args.url,
        args.robot_id,
        wire=args.wire,
        png=args.png,
        patience=args.patience_s,
        deadline_ms=args.deadline_ms,
        api_key=os.environ.get("REFLEX_API_KEY"),
        on_event=_print_event,
    )
    _print_event(
        {"event": "ready", "robot_id": args.robot_id, "task": args.task, "startup_s": time.monotonic() - began}
    )
    episodes = run_robot(
        policy,
        world,
        args.episodes,
        first_episode=args.first_episode,
        execute=args.execute,
        max_steps=args.max_steps,
        control_hz=args.control_hz,
        on_event=lambda event: _print_event({**event, "robot_id": args.robot_id}),
    )
    policy.close()
    solved = sum(e.success for e in episodes)
    _print_event({"event": "done", "robot_id": args.robot_id, "episodes": len(episodes), "successes": solved})
    return 0 if all(e.error is None for e in episodes) else 1


if __name__ == "__main__":
    sys.exit(main())
