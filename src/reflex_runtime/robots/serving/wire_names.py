"""The protocols that requests come on, as metrics and recordings name them."""

from __future__ import annotations

from typing import Final

ACT: Final = "act"
OPENPI: Final = "openpi"
JSON_NUMPY: Final = "json-numpy"
OIP: Final = "oip"
VLA_EVAL: Final = "vla-eval"
GROOT: Final = "gr00t"
LEROBOT: Final = "lerobot"
WIRES: Final = (ACT, OPENPI, JSON_NUMPY, OIP, VLA_EVAL, GROOT, LEROBOT)
