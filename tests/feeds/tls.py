"""TLS in front of a plain server of the tests, with a certificate that nobody has signed."""

from __future__ import annotations

import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def behind_tls(port: int, folder: Path) -> Iterator[int]:
    """The port on which TLS is spoken, and passed on to the plain one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_certificate(folder))
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=_relay, args=(context, raw, port), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (accepting, *threads):
            thread.join(60.0)


def _relay(context: ssl.SSLContext, raw: socket.socket, port: int) -> None:
    """One thread, because a TLS connection is not made for two."""
    try:
        plain = socket.create_connection(("127.0.0.1", port))
        with plain as inner, context.wrap_socket(raw, server_side=True) as outer:
            while True:
                ready = [outer] if outer.pending() else select.select([outer, inner], [], [])[0]
                for source, target in ((outer, inner), (inner, outer)):
                    if source in ready:
                        data = source.recv(65_536)
                        if not data:
                            return
                        target.sendall(data)
    except OSError:
        pass  # one of them left


def _certificate(folder: Path) -> tuple[Path, Path]:
    """The files of a new one, and of its key."""
    certificate, key = folder / "camera.pem", folder / "camera-key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=camera"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key
