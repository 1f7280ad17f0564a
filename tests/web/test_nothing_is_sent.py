"""Nothing is sent anywhere: every server under a watch on system calls, with an empty directory as the user's home.

The watch is strace: it sees the calls of native code and of child processes too, and misses only what a program sends
through io_uring, which nothing here uses. It sees what happens between the start and the end of a run of a few seconds;
onnxruntime reports only later, but writes its id to the home directory when it is imported, so the home shows it.
A home may get Reflex's own cache only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from serving.harness import changed
from thinned import thinned

PATIENCE = 240.0  # seconds until a test gives up: imports under strace take long on a busy machine
CALLS = "connect,sendto,sendmsg,sendmmsg"
PROXY = "http://127.0.0.1:9"
STRACE = shutil.which("strace") or ""


def watched(*command: str) -> list[str]:
    """A command under strace, which writes to the pipe given as {fd}; the command stays our own child (-D)."""
    options = ["-D", "-f", "--seccomp-bpf", "-qq", "-s", "200", "-e", f"trace={CALLS}", "-o", "/dev/fd/{fd}"]
    return [STRACE, *options, *command]


def can_watch() -> bool:
    """Whether strace is there and may trace."""
    if not STRACE:
        return False
    read, write = os.pipe()
    try:
        command = [part.format(fd=write) for part in watched("true")]
        return subprocess.run(command, pass_fds=[write], capture_output=True, check=False).returncode == 0
    finally:
        os.close(read)
        os.close(write)


def sent(trace: str, own: str) -> list[str]:
    """The calls that address another program: any address of the internet, and sockets in the file system outside
    the directory `own`. What is sent on a connection that was accepted carries no address."""
    found = []
    for line in trace.splitlines():
        path = re.search(r'sun_path=@?"([^"]*)"', line)
        if re.search(r"sa_family=AF_INET6?\b", line) or (path and not path[1].startswith(own)):
            found.append(line)
    return found


def run(
    arguments: Sequence[str], home: Path, ready: str, use: Callable[[str], None], watch: bool, before: str = ""
) -> list[str]:
    """`reflex ARGUMENTS` until its log has `ready`, whose address is then used, and SIGTERM; what it sent."""
    code = f"{before}\nimport sys; from reflex_runtime.cli import main; sys.exit(main({list(arguments)!r}))"
    command = [sys.executable, "-c", code]
    read, write = os.pipe()
    drop = ("REFLEX_", "XDG_", "ORT_", "MPL")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env |= {"HOME": str(home), "TMPDIR": str(home.parent)}
    env |= {"http_proxy": PROXY, "https_proxy": PROXY}  # nothing is sent that way either, whatever the tests' own is
    process = subprocess.Popen(
        [part.format(fd=write) for part in watched(*command)] if watch else command,
        pass_fds=[write],
        env=env,
        cwd=home.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    calls: list[str] = []

    def collect() -> None:
        with open(read, encoding="utf-8") as stream:
            calls.append(stream.read())

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    limit = threading.Timer(PATIENCE, process.kill)
    limit.start()
    try:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if ready in line:
                break
        else:
            pytest.fail("not ready:\n" + "".join(log))
        address = re.search(r"http://[\w.:]+", line)
        assert address is not None, line
        use(address[0])
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait() in (0, 128 + signal.SIGTERM), log
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        reader.join(PATIENCE)
    return sent(calls[0], str(home.parent))


def post(address: str, path: str, body: object) -> None:
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request(address + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        assert answer.status == 200


def act(address: str) -> None:
    post(address, "/act", {"state": [0.1, -0.2]})


def complete(address: str) -> None:
    post(address, "/v1/completions", {"model": "scribe", "prompt": "hello", "max_tokens": 4})


def see(address: str) -> None:
    """Until the first picture was answered: the model is loaded then."""
    text = ""
    while not re.search(r"^reflex_feed_frames_processed_total\S* [1-9]", text, re.MULTILINE):
        with urllib.request.urlopen(address + "/metrics") as answer:
            text = answer.read().decode()
        changed()


SERVERS = {
    "policy": (["serve", "{export}", "--port", "0"], "ready on", act),
    "model": (["serve", "scribe", "--port", "0"], "ready on", complete),
    "workers": (["serve", "scribe", "--port", "0", "--workers", "1"], "ready on", complete),
    "feeds": (["feeds", "a=shapes:seed=1", "--onnx", "shapes", "--port", "0"], "/metrics and /health", see),
}


@pytest.mark.parametrize("name", thinned(SERVERS, ["policy", "model"]))
def test_no_server_sends_anything_or_writes_to_the_users_home(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    watch = can_watch()
    arguments, ready, use = SERVERS[name]
    home = tmp_path / "home"
    home.mkdir()
    found = run([part.format(export=tiny) for part in arguments], home, ready, use, watch)
    assert found == []
    assert [str(path) for path in home.rglob("*")] == []
    if not watch:
        pytest.skip("its home is empty; strace is missing or may not trace here, so its calls were not seen")


def test_the_watch_sees_a_name_looked_up_by_native_code(tmp_path: Path) -> None:
    if not can_watch():
        pytest.skip("strace is missing or may not trace here")
    home = tmp_path / "home"
    home.mkdir()
    lookup = "import socket\ntry: socket.getaddrinfo('telemetry.invalid', 443)\nexcept OSError: pass"
    arguments, ready, use = SERVERS["feeds"]
    assert run(arguments, home, ready, use, True, before=lookup) != []


@pytest.mark.parametrize(
    "program",
    [
        "from reflex_runtime.run.onnx_session import CPU, check_provider; check_provider(CPU)",
        "from reflex_runtime.llm.runners import openvino_graph",
        "from reflex_runtime.llm.runners.openvino_runner import _library; _library()",
    ],
)
def test_the_libraries_are_quiet_in_programs_too(program: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ORT_"))}
    subprocess.run([sys.executable, "-c", program], env=env | {"HOME": str(tmp_path)}, check=True, timeout=PATIENCE)
    assert list(tmp_path.iterdir()) == []
