"""Every wire that can be asked.

To add one: a class with the methods of `caller.WireCaller`, and its name here. What its server does not announce and
`/config` does not say stands in `expected.GUESSES`.
"""

from __future__ import annotations

from typing import Final

from reflex_runtime.bench.caller import WireCaller
from reflex_runtime.bench.http_callers import ActCaller, ActMsgpackCaller, JsonNumpyCaller
from reflex_runtime.bench.openpi_caller import OpenpiCaller

CALLERS: Final[dict[str, type[WireCaller]]] = {
    "act-json": ActCaller,
    "act-msgpack": ActMsgpackCaller,
    "openpi": OpenpiCaller,
    "json-numpy": JsonNumpyCaller,
}
"""Every wire that can be asked, by the name that `--wire` takes."""
