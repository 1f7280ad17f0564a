"""All wires by name, and what a robot sends to a server that it has not met yet.

To add a wire: a class with the methods of `caller.WireCaller`, and its name here. What its server does not announce and
`/config` does not say stands in `expected.GUESSES`.
"""

from __future__ import annotations

from typing import Final

from bench.load.wires.caller import WireCaller
from bench.load.wires.expected import GUESSES, Expected, Observed
from bench.load.wires.groot import GrootCaller
from bench.load.wires.grpc import LerobotCaller, OipGrpcCaller
from bench.load.wires.http import ActCaller, ActMsgpackCaller, JsonNumpyCaller
from bench.load.wires.oip import OipCaller
from bench.load.wires.websocket import OpenpiCaller, VlaEvalCaller
from reflex_runtime.cli.probe import ServerLook
from reflex_runtime.client.errors import ClientError, ServerError

CALLERS: Final[dict[str, type[WireCaller]]] = {
    "act-json": ActCaller,
    "act-msgpack": ActMsgpackCaller,
    "openpi": OpenpiCaller,
    "json-numpy": JsonNumpyCaller,
    "oip": OipCaller,
    "vla-eval": VlaEvalCaller,
    "gr00t": GrootCaller,
    "oip-grpc": OipGrpcCaller,
    "lerobot": LerobotCaller,
}
"""By the name that `--wire` takes."""


async def meet(caller: WireCaller, seen: ServerLook, own: Observed | None) -> Observed:
    """Ask once with an observation that fits, and return it. Guesses are tried in turn; the last one's error is
    raised."""
    last: ClientError | None = None
    for observed in candidates(caller, seen, own):
        try:
            await caller.ask(caller.frame(observed, 0.0))
        except ServerError as error:
            last = error
            continue
        return observed
    assert last is not None, "there is at least one"
    raise last


def candidates(caller: WireCaller, seen: ServerLook, own: Observed | None) -> list[Observed]:
    """Observations to send, those of the most reliable source first."""
    if own is not None:
        return [own]
    expected = Expected.of("/config", seen.wires.get(caller.config)) or caller.expected()
    if expected is not None:
        return [expected.observation()]
    return [guess.observation() for guess in GUESSES.get(caller.config, ())] or [{}]  # its error says more
