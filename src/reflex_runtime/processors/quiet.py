"""Switches off the telemetry of the inference libraries: nothing is sent anywhere, and no id is written.

onnxruntime reads its variable once, when it is imported; without it, it writes an id under the user's cache and reports
to its maker. openvino reports its own import through the package `openvino_telemetry`, and uses a stub where that is
missing.
"""

from __future__ import annotations

import os
import sys


def telemetry_off() -> None:
    """Call it before importing onnxruntime or openvino. Processes started from this one inherit it for onnxruntime."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # its import fails: the stub is used
