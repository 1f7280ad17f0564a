"""A slot: one place in the server whose policy can be exchanged while requests run.

Each loaded version of a slot's policy has its own partitions, so two versions never share a batch. Requests that were
prepared for the old version run on it, residents included; new requests go to the new version from the next batch on.
The old version is unloaded when none of its requests is left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Ticket
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.run.processor import Processor, may_run_anywhere


class Version:
    """One loaded policy of a slot and what runs its batches.

    number: counts the slot's versions from 1; from the second on it is part of the policy's shape, so that versions
    share neither batches nor learned costs. users: exchanges that still need it, kept by the server.
    name: `model_id@hash`. told: its fields in every answer: inference mode, model hash and config hash.
    """

    def __init__(self, policy: Policy, processor: Processor, number: int = 1) -> None:
        if number > 1:
            policy.shape = f"{policy.shape} #{number}"
        self.policy, self.processor, self.number = policy, processor, number
        self.users = 0
        spec = policy.spec
        self.name = f"{spec.model_id}@{spec.model_hash}"
        self.told = (spec.inference_mode, spec.model_hash, spec.config_hash)


class SlotProcessor:
    """Runs a slot's batches, each on the version it was prepared for.

    Written on the event loop (`add`, `remove`), read on the device thread: single dictionary operations. A later
    version is started on the device thread before its first batch.
    """

    repeatable = True

    def __init__(self, first: Version) -> None:
        self._versions: dict[Hashable, Processor] = {first.policy.shape: first.processor}
        self._started: set[Hashable] = set()

    @property
    def any_thread(self) -> bool:
        """Whether calls of all its versions may be made on any thread."""
        return all(map(may_run_anywhere, self._versions.values()))

    def add(self, version: Version) -> None:
        """Add a version, so that its batches can run."""
        self._versions[version.policy.shape] = version.processor

    def remove(self, version: Version) -> None:
        """Remove a version of which no request waits or runs."""
        self._versions.pop(version.policy.shape, None)

    def start(self) -> None:
        self._started = set(self._versions)
        for processor in list(self._versions.values()):
            processor.start()

    def run(self, batch: Batch) -> Sequence[Any]:
        key = batch.partition
        processor = self._versions.get(key)
        if processor is None:
            raise ProcessorError(f"no policy is loaded for {key}")
        if key not in self._started:
            processor.start()
            self._started.add(key)
        others = [ticket for ticket in batch.left if ticket.request.partition != key]
        if others:
            self.drop(others)
            batch = replace(batch, left=tuple(t for t in batch.left if t.request.partition == key))
        return processor.run(batch)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        for key, processor in list(self._versions.items()):
            mine = [ticket for ticket in tickets if ticket.request.partition == key]
            if mine:
                processor.drop(mine)

    def stop(self) -> None:
        for processor in list(self._versions.values()):
            processor.stop()

