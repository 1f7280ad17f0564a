"""The examples of functions answer what their heads show, also to our client."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest

from reflex_runtime.cli import main
from reflex_runtime.client import AsyncClient, BadRequest, Client, ProcessorFailed
from serving.harness import Server

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "functions"
OWN = """
from dataclasses import dataclass
import numpy as np
from numpy.typing import NDArray

@dataclass
class Point:
    at: NDArray[np.float32]
    name: str = ""

def moved(points: list[Point]) -> list[Point]:
    if any(point.name == "bad" for point in points):
        raise ValueError("no such point")
    return [Point(point.at + 1, point.name) for point in points]
"""


def example(name: str, function: str) -> Server:
    return Server(f"python:{name}:{function}", before=f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})")


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def circle() -> bytes:
    """A picture that the bundled detector knows."""
    made = PIL.Image.new("RGB", (640, 480), (90, 90, 90))
    PIL.ImageDraw.Draw(made).ellipse((200, 150, 320, 270), fill=(220, 40, 40))
    file = io.BytesIO()
    made.save(file, "PNG")
    return file.getvalue()


@pytest.mark.long
def test_a_model_of_scikit_learn_answers() -> None:
    pytest.importorskip("sklearn")
    with example("sklearn_model", "Iris") as server, Client(url_of(server)) as client:
        assert client.predict([5.1, 3.5, 1.4, 0.2]) == "setosa"
        assert client.predict(np.array([6.3, 3.3, 6.0, 2.5])) == "virginica"


@pytest.mark.long  # imports torch
def test_a_classifier_in_pytorch_is_set_up_and_answers() -> None:
    pytest.importorskip("torch")
    with example("torch_classifier", "Classifier") as server, Client(url_of(server)) as client:
        shares = client.predict(PIL.Image.open(io.BytesIO(circle())))
        assert sorted(shares) == ["bird", "cat", "dog"]
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5)


def test_a_detector_finds_a_shape_in_pixels_of_the_picture() -> None:
    with example("detector", "Detector") as server, Client(url_of(server)) as client:
        (box,) = client.predict(circle())
        assert box["kind"] == "circle"
        assert np.abs(np.array(box["xyxy"]) - (200, 150, 320, 270)).max() < 12


def test_a_function_that_streams() -> None:
    with example("stream", "count") as server:
        answer = httpx.post(f"{url_of(server)}/predict", json=3)
        assert answer.headers["content-type"] == "text/event-stream"
        lines = [line for line in answer.text.split("\n") if line]
        assert lines == ["data: 0", "data: 1", "data: 2", "event: end", 'data: {"parts": 3}']
        with Client(url_of(server)) as client:
            assert client.predict(3) == [0, 1, 2]


def test_the_client_sends_and_gets_arrays_and_names_errors(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with Server("python:own:moved", before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})") as server:
        with Client(url_of(server)) as client:
            found = client.predict({"at": np.arange(3, dtype=np.float32), "name": "p"}, priority="urgent", client="c")
            assert found["at"].tolist() == [1.0, 2.0, 3.0]
            assert found["at"].dtype == np.float32
            with pytest.raises(BadRequest, match="name") as wrong:
                client.predict({"at": [1.0], "name": 3}, request_id="mine")
            assert wrong.value.request_id == "mine"
            with pytest.raises(ProcessorFailed, match="no such point"):
                client.predict({"at": [1.0], "name": "bad"}, "moved")
            with pytest.raises(ValueError, match="deadline_ms"):
                client.predict({"at": [1.0]}, deadline_ms=0)

        async def awaited() -> Any:
            async with AsyncClient(url_of(server)) as client:
                return await client.predict({"at": [1.0]}, deadline_ms=5000)

        assert asyncio.run(awaited())["at"].tolist() == [2.0]
        assert httpx.get(f"{url_of(server)}/health").json()["functions"] == {"moved": "python:own:moved"}


def test_probe_says_where_functions_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with example("stream", "count") as server:
        assert main(["probe", url_of(server)]) == 2
        assert f"serves functions; {url_of(server)}/docs has a command" in capsys.readouterr().err


def test_what_curl_calls_a_body_by_itself_is_json_for_a_text(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def same(texts: list[str]) -> list[str]: return list(texts)\n")
    with Server("python:own:same", before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})") as server:
        for kind in ("application/x-www-form-urlencoded", "application/json", ""):
            answer = httpx.post(f"{url_of(server)}/predict", content=b'"a"', headers={"Content-Type": kind})
            assert answer.json() == "a", kind
        answer = httpx.post(f"{url_of(server)}/predict", content=b'"a"', headers={"Content-Type": "text/plain"})
        assert answer.json() == '"a"'


def test_stock_clients_of_triton_ask_over_http_and_grpc(tmp_path: Path) -> None:
    over_http, over_grpc = pytest.importorskip("tritonclient.http"), pytest.importorskip("tritonclient.grpc")
    (tmp_path / "own.py").write_text(OWN)
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    with Server("python:own:moved", "--oip-grpc", "127.0.0.1:0", before=before) as server:
        grpc = httpx.get(f"{url_of(server)}/health").json()["listening"]["oip_grpc"]
        for stock, address in ((over_http, f"127.0.0.1:{server.port}"), (over_grpc, grpc)):
            with stock.InferenceServerClient(address) as client:
                assert client.is_server_ready()
                assert client.is_model_ready("moved")
                at, name = stock.InferInput("at", [2, 3], "FP32"), stock.InferInput("name", [2, 1], "BYTES")
                at.set_data_from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
                name.set_data_from_numpy(np.array([[b"p"], [b"q"]], object))
                answer = client.infer("moved", [at, name], request_id="mine")
                assert answer.as_numpy("at").tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
                assert answer.as_numpy("name").tolist() == [[b"p"], [b"q"]]
