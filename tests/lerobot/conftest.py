"""A Hugging Face cache without a network, and tiny checkpoints that LeRobot itself made and saved."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

HUB = Path(tempfile.mkdtemp(prefix="tiny-hub-"))
atexit.register(shutil.rmtree, HUB, ignore_errors=True)
os.environ["HF_HUB_CACHE"], os.environ["HF_HUB_OFFLINE"] = str(HUB), "1"  # before anything imports huggingface_hub
CLIENT = Path(__file__).parents[2] / "clients" / "lerobot_policy_reflex" / "src"
sys.path[:0] = [str(Path(__file__).parent / "tiny"), str(CLIENT)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directory by family. Families that the installed LeRobot has no code for are missing."""
    from tiny_checkpoints import FAMILIES, make
    from tiny_hub import fill

    fill(HUB)
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make(name, root / name) for name in FAMILIES}
