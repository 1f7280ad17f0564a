"""The first request of a server is as fast as any other: nothing is left for it to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reflex_runtime.demo import POLICY
from thinned import thinned

# In a process of its own: in this one everything has been imported long ago.
FIRST = """
import asyncio, json, sys
from reflex_runtime.settings import ServeConfig
from reflex_runtime.robots import Export
from reflex_runtime.robots.app import application
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.serving.runtime import PolicyPlan
from reflex_runtime.web.supervisor import bind
from reflex_runtime.web.serve import ReflexServer, uvicorn_config

async def main(export, picture):
    config, up = ServeConfig(), asyncio.Event()
    runtime = PolicyRuntime(config, [PolicyPlan("default", config, {"prod": Export.load(export)})])
    app, sock = application(runtime), bind("127.0.0.1", 0)
    runtime.attach(app, 1.0)
    server = ReflexServer(uvicorn_config(app, config), runtime)
    server.on_ready = lambda _: up.set()
    serving = asyncio.ensure_future(server.serve([sock]))
    await up.wait()
    asked = {"image": picture, "instruction": "open the door", "state": [0.0, 0.6, 0.2, 1.0], "episode_id": "e"}
    body = json.dumps(asked).encode()
    head = f"POST /act HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode()
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    before = set(sys.modules)
    writer.write(head + body)
    status = await reader.readline()
    print(status[9:12].decode(), sorted(set(sys.modules) - before))
    writer.close()
    runtime.stopping.set()
    await serving

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", thinned(["PNG", "JPEG"], ["PNG"]))
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
