"""A small RTSP camera on loopback for the tests: it can freeze with its socket open, die, and come back on its port.

RTSP over TCP (RFC 2326, interleaved), one H.264 track. FFmpeg's RTP muxer makes the packets; this only frames them.
Every client gets the pictures from the first on, encoded for it, over and over.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Self

import av
import numpy as np
from numpy.typing import NDArray

from serving.place import Place

PACKET = 1400  # bytes of one RTP packet
VIDEO, CONTROL = 0, 1  # interleaved channels of RTP and RTCP
SDP = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\n" \
      "c=IN IP4 0.0.0.0\r\na=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1\r\na=control:track0\r\n"


class RtspCamera:
    """Serves pictures at `url` from `start` (or entering a with statement) to `stop`.

    password: asked of the user "admin" (Basic); None asks nobody. gop: pictures from one key frame to the next.
    playing: set while a client is being sent pictures. opened: connections so far.
    """

    def __init__(
        self, pictures: Sequence[NDArray[np.uint8]], fps: float = 50.0, password: str | None = None, gop: int = 10
    ) -> None:
        self.pictures, self.fps, self.gop = pictures, fps, gop
        self._word = None if password is None else base64.b64encode(f"admin:{password}".encode()).decode()
        self._auth = "" if password is None else f"admin:{password}@"
        self._place = Place()
        self.port = self._place.port
        self.opened = 0
        self.playing = threading.Event()
        self._flowing = threading.Event()  # cleared while frozen
        self._flowing.set()
        self._silent = False
        self._stopping = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"rtsp://{self._auth}127.0.0.1:{self.port}/camera"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._place.close()

    def start(self) -> None:
        """Listen; after a `stop` on the port of before."""
        self._stopping.clear()
        listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets.add(listener)
        self._run(self._accept, listener)

    def stop(self) -> None:
        """Die: every connection is cut without a goodbye, and nobody listens any more."""
        self._stopping.set()
        self._flowing.set()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60.0)
        self._threads.clear()
        self.playing.clear()

    def freeze(self) -> None:
        """Send nothing more, and keep every socket open."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def silence(self) -> None:
        """Accept connections, but answer no request."""
        self._silent = True

    # -- connections -------------------------------------------------------------------------------------------------

    def _run(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._stopping.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError:
                    break
                self.opened += 1
                self._sockets.add(sock)
                self._run(self._serve, sock)
        self._sockets.discard(listener)

    def _serve(self, sock: socket.socket) -> None:
        """Answer one client's requests; a thread of its own sends the pictures."""
        done = threading.Event()
        try:
            with sock, sock.makefile("rb") as lines:
                while first := lines.read(1):
                    if first == b"$":  # a receiver report
                        _, size = struct.unpack(">BH", lines.read(3))
                        lines.read(size)
                        continue
                    request = first + lines.readline()
                    head = dict(line.split(": ", 1) for line in iter(lambda: lines.readline().decode().strip(), ""))
                    if self._silent:
                        continue
                    verb = request.split()[0].decode()
                    sock.sendall(self._answer(verb, head).encode())
                    if verb == "PLAY":
                        self._run(self._play, sock, done)
        except (OSError, ValueError):
            pass  # the client left, or it was cut off
        finally:
            done.set()
            self._sockets.discard(sock)

    def _answer(self, verb: str, head: dict[str, str]) -> str:
        status, more, body = "200 OK", "", ""
        if self._word is not None and head.get("Authorization") != f"Basic {self._word}":
            status, more = "401 Unauthorized", 'WWW-Authenticate: Basic realm="camera"\r\n'
        elif verb == "OPTIONS":
            more = "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n"
        elif verb == "DESCRIBE":
            body = SDP
            more = f"Content-Type: application/sdp\r\nContent-Base: rtsp://127.0.0.1:{self.port}/camera/\r\n"
        elif verb == "SETUP":
            if "interleaved" not in head["Transport"]:
                status = "461 Unsupported Transport"
            more = f"Transport: RTP/AVP/TCP;unicast;interleaved={VIDEO}-{CONTROL}\r\n"
        end = f"CSeq: {head['CSeq']}\r\nSession: 1;timeout=60\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        return f"RTSP/1.0 {status}\r\n{more}{end}"

    # -- pictures ----------------------------------------------------------------------------------------------------

    def _play(self, sock: socket.socket, done: threading.Event) -> None:
        """Encode and send at the camera's rate until the client leaves, or the camera dies."""
        out = av.open(_Interleaved(sock, done), "w", format="rtp", buffer_size=PACKET)
        stream = self._encoder(out, self.pictures[0])
        for number in itertools.count():
            self._flowing.wait()
            frame = av.VideoFrame.from_ndarray(self.pictures[number % len(self.pictures)], format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1) / Fraction(self.fps)
            out.mux(stream.encode(frame))
            self.playing.set()
            if done.wait(1.0 / self.fps) or self._stopping.is_set():
                break
        out.close()

    def _encoder(self, out: Any, image: NDArray[np.uint8]) -> Any:
        options = {"g": str(self.gop), "tune": "zerolatency", "preset": "ultrafast", "threads": "1"}
        stream = out.add_stream("libx264", rate=Fraction(self.fps), options=options)
        stream.pix_fmt = "yuv420p"
        stream.height, stream.width = image.shape[:2]
        return stream


class _Interleaved:
    """Frames each packet that FFmpeg writes for the RTSP connection. FFmpeg is not told when that is gone."""

    def __init__(self, sock: socket.socket, done: threading.Event) -> None:
        self._sock, self._done = sock, done

    def write(self, packet: bytes) -> int:
        channel = CONTROL if 200 <= packet[1] <= 204 else VIDEO
        try:
            self._sock.sendall(b"$" + struct.pack(">BH", channel, len(packet)) + packet)
        except OSError:
            self._done.set()
        return len(packet)
