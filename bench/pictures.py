"""A robot with a camera beside callers whose pictures are small to send and large to decode.

Each of those asks again as soon as it is answered or refused; one of their pictures is a PNG of one colour, 4096 by
4096 pixels, some 48 kB. The robot's own picture is 640 by 480.
"""

from __future__ import annotations

import base64
import io
import threading
from typing import Any

from bench.load import Answered, quantile
from bench.report import Row, row, say
from bench.servers import Server, running
from reflex_runtime.demo import POLICY

CALLERS = 8


def pictures(scale: float) -> list[Row]:
    """The robot's latency alone and beside them, in turns."""
    case = f"a robot beside {CALLERS} callers with large pictures"
    robot = _request("JPEG", (640, 480))
    large = _request("PNG", (4096, 4096))
    p50, p99, quiet50, quiet99, answered = [], [], [], [], []
    command = ["-m", "reflex_runtime", "serve", str(POLICY), "--port", "PORT"]
    with running(Server("reflex", command, pinned=False, ready=robot)) as (server,):
        for i in range(max(3, round(5 * scale))):
            say(f"  {case}: round {i + 1}")
            alone = server.load(callers=1, seconds=3.0, body=robot)
            beside, others = _beside(server, robot, large)
            quiet50.append(alone.quantile(0.5) * 1e3)
            quiet99.append(alone.quantile(0.99) * 1e3)
            p50.append(beside.quantile(0.5) / alone.quantile(0.5))
            p99.append(beside.quantile(0.99) / alone.quantile(0.99))
            answered.append(quantile(others.latencies, 0.5) if others.latencies else float("nan"))
    return [
        row(case, "p50 alone", quiet50, "ms"),
        row(case, "p99 alone", quiet99, "ms"),
        row(case, "p50 beside them over p50 alone", p50, "x"),
        row(case, "p99 beside them over p99 alone", p99, "x", most=3.0),
        row(case, "their own p50", answered, "s"),
    ]


def _beside(server: Server, robot: dict[str, Any], large: dict[str, Any]) -> tuple[Answered, Answered]:
    found: list[Answered] = []
    others = threading.Thread(
        target=lambda: found.append(server.load(callers=CALLERS, seconds=7.0, warm=0.0, body=large))
    )
    others.start()
    beside = server.load(callers=1, seconds=3.0, warm=1.5, body=robot)
    others.join()
    return beside, found[0]


def _request(form: str, size: tuple[int, int]) -> dict[str, Any]:
    image = picture(form, size, plain=form == "PNG")
    return {"state": [0.1, -0.2, 0.3, -0.4], "instruction": "push the button", "image": image}


def picture(form: str, size: tuple[int, int], plain: bool = False) -> str:
    """A picture in base64: soft noise, or one colour."""
    import PIL.Image

    data = io.BytesIO()
    noise = PIL.Image.effect_noise((16, 16), 60).convert("RGB").resize(size)
    (PIL.Image.new("RGB", size, "teal") if plain else noise).save(data, form)
    return base64.b64encode(data.getvalue()).decode()
