"""The callers of all wires, by name.

To add one: a class with the methods of `caller.WireCaller`, and its name here. What its server does not announce and
`/config` does not say stands in `expected.GUESSES`.
"""

from __future__ import annotations

from typing import Final

from reflex_runtime.bench.caller import WireCaller
from reflex_runtime.bench.groot_caller import GrootCaller
from reflex_runtime.bench.grpc_callers import LerobotCaller, OipGrpcCaller
from reflex_runtime.bench.http_callers import ActCaller, ActMsgpackCaller, JsonNumpyCaller
from reflex_runtime.bench.oip_caller import OipCaller
from reflex_runtime.bench.websocket_callers import OpenpiCaller, VlaEvalCaller, XPolicyLabCaller

CALLERS: Final[dict[str, type[WireCaller]]] = {
    "act-json": ActCaller,
    "act-msgpack": ActMsgpackCaller,
    "openpi": OpenpiCaller,
    "json-numpy": JsonNumpyCaller,
    "oip": OipCaller,
    "vla-eval": VlaEvalCaller,
    "xpolicylab": XPolicyLabCaller,
    "gr00t": GrootCaller,
    "oip-grpc": OipGrpcCaller,
    "lerobot": LerobotCaller,
}
"""By the name that `--wire` takes."""
