"""The first request of a server is as fast as any other: nothing is left for it to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reflex_runtime.demo import POLICY

# In a process of its own: in this one everything has been imported long ago.
FIRST = """
import asyncio, base64, io, json, sys
from reflex_runtime.settings import ServeConfig
from reflex_runtime.policies import Export
from reflex_runtime.policies.serving.app import application
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import PolicyPlan
from reflex_runtime.web.connection import HttpConnection

async def main(export, picture):
    config = ServeConfig()
    runtime = PolicyRuntime(config, [PolicyPlan("default", config, {"prod": Export.load(export)})])
    await runtime.start()
    connection, done = HttpConnection(application(runtime)), asyncio.Event()
    asked = {"image": picture, "instruction": "open the door", "state": [0.0, 0.6, 0.2, 1.0], "episode_id": "e"}
    body = json.dumps(asked).encode()
    head = f"POST /act HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode()
    before = set(sys.modules)

    class Wire(asyncio.Transport):
        def write(self, data):
            print(data[9:12].decode(), sorted(set(sys.modules) - before))
            done.set()
        def is_closing(self):
            return False
        def is_reading(self):
            return True

    connection.connection_made(Wire())
    connection.data_received(head + body)
    await done.wait()
    await runtime.stop(asyncio.get_running_loop().time(), done.wait)

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
        [sys.executable, "-c", FIRST, str(POLICY), picture],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout == "200 []\n", done
