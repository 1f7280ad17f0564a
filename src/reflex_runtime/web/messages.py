"""The message classes of `messages.proto`, by name, made from its descriptors. `make messages` writes those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, message_factory

_files = descriptor_pb2.FileDescriptorSet.FromString((Path(__file__).parent / "messages.binpb").read_bytes()).file
_classes = {name.rpartition(".")[2]: kind for name, kind in message_factory.GetMessages(_files).items()}


def __getattr__(name: str) -> Any:
    if name not in _classes:
        raise AttributeError(name)
    return _classes[name]
