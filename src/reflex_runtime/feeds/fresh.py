"""Which sources a caller may add to a run: a camera is an address that this machine opens, or a file that it reads."""

from __future__ import annotations

import socket
from collections.abc import Callable, Container
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.spec import NAME
from reflex_runtime.feeds.video import NETWORK, without_secrets
from reflex_runtime.options import one_line

_PICTURES: Final = (".jpg", ".mjpeg")  # paths of pictures below /feeds/
ADDED_NAME: Final = NAME.replace("^", r"^(?!.*\.(jpg|mjpeg)$)")
LONGEST: Final = 2048  # characters of a source
_PORTS: Final = {"rtsp": 554, "rtsps": 322, "http": 80, "https": 443}

Lookup = Callable[..., list[Any]]


def check_fresh(
    name: str, source: str, drawn: Container[str], files: str, look_up: Lookup = socket.getaddrinfo
) -> None:
    """Raise ConfigError for a feed that may not be added.

    drawn: schemes of sources that draw their own pictures. files: the folder below which files may be named, "" for
    none. look_up: as `socket.getaddrinfo`; may take seconds.

    Addresses of this machine and of its link are refused: what listens there often trusts every caller, and answers
    about the machine itself (169.254.169.254). A name is looked up; that it will have the same address when it is
    opened is not certain. An operator may give any source on the command line.
    """
    if name.endswith(_PICTURES):
        raise ConfigError(f"name={one_line(name)}: must not end like a picture's, .jpg or .mjpeg", field="name")
    if not source or len(source) > LONGEST or not source.isprintable():
        raise ConfigError(f"source: must be 1 to {LONGEST} characters, and none of control", field="source")
    scheme, colon, _ = source.partition(":")
    if colon and scheme.lower() in NETWORK:
        _check_address(source, scheme.lower(), look_up)
    elif not (colon and (scheme.lower() in drawn)):
        _check_file(source, files)


def _check_address(source: str, scheme: str, look_up: Lookup) -> None:
    shown = f"source={one_line(without_secrets(source))}"
    try:
        host, port = urlsplit(source).hostname, urlsplit(source).port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError(f"{shown}: has no host", field="source")
    try:
        found = {str(entry[4][0]) for entry in look_up(host, port or _PORTS[scheme], type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{shown}: {host} cannot be looked up: {error}", field="source") from None
    for address in found:
        if not _is_elsewhere(address.partition("%")[0]):
            words = f"{address} is this machine or its link; such a source can be given on the command line only"
            raise ConfigError(f"{shown}: {words}", field="source")


def _is_elsewhere(text: str) -> bool:
    address = ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    return not (address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast)


def _check_file(source: str, files: str) -> None:
    shown = f"source={one_line(without_secrets(source))}"
    if "://" in source:
        raise ConfigError(f"{shown}: must start with {', '.join(f'{name}://' for name in NETWORK)}", field="source")
    if not files:
        words = "files and devices can be added only below the folder that --add-files names"
        raise ConfigError(f"{shown}: {words}", field="source")
    folder = Path(files).resolve()
    try:
        inside = Path(source).resolve().is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):  # such as links in a circle
        inside = False
    if not inside:
        raise ConfigError(f"{shown}: must be below {folder}", field="source")
