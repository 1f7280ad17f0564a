"""Large libraries that a test module imports when a test of it first uses them.

`make test` collects every module in each of its processes: without this both would import the clients of all APIs, for
tests that one of them runs.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def late(name: str) -> Any:
    """The module of this name. It is imported when the first of its attributes is looked up."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    assert spec.loader is not None, name
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
