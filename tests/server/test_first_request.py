"""The first request of a server is as fast as any other: nothing is left for it to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reflex_runtime.demo.exports import export_dir

# In a process of its own: in this one everything has been imported long ago.
FIRST = """
import asyncio, base64, io, json, sys
from reflex_runtime.config import ServeConfig
from reflex_runtime.policies import Export
from reflex_runtime.server.app import App
from reflex_runtime.server.runtime import PolicyRuntime

async def main(export, picture):
    runtime = PolicyRuntime(ServeConfig(), {"prod": Export.load(export)})
    await runtime.start()
    app, done = App(runtime), asyncio.Event()
    body = {"image": picture, "instruction": "open the door", "state": [0.0, 0.6, 0.2, 1.0], "episode_id": "e"}
    scope = {"type": "http", "path": "/act", "method": "POST", "client": ("127.0.0.1", 1), "headers": []}
    before = set(sys.modules)

    def reply(status, headers, answer):
        print(status, sorted(set(sys.modules) - before))
        done.set()

    app.whole(scope, json.dumps(body).encode(), reply)
    await done.wait()
    await runtime.stop(1.0)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_h1_the_first_picture_imports_nothing(kind: str) -> None:
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, kind)
    picture = base64.b64encode(file.getvalue()).decode()
    done = subprocess.run(
        [sys.executable, "-c", FIRST, str(export_dir("v2", "decomposed")), picture],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout == "200 []\n", done
