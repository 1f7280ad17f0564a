"""A request of vLLM in the core's terms, and the settings of the slice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from vllm.v1.request import Request, RequestStatus

from reflex_runtime.core import request as core
from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import Cancelled, ConfigError, ProcessorError
from reflex_runtime.core.order import ClientShare

GROUP: Final = "vllm"
DONE: Final = {
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_IGNORED,
    RequestStatus.FINISHED_REPETITION,
}

Positive = Annotated[float, msgspec.Meta(gt=0)]


class VllmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands under `reflex` in `--additional-config`.

    trace: file for the journal. max_gap_ms: promised between two tokens of every request. max_queue_s: device seconds
    that wait, beyond which a client with more than its share is refused. None: not written, promised or bounded.
    """

    trace: str | None = None
    max_gap_ms: Positive | None = None
    max_queue_s: Positive | None = None

    @classmethod
    def read(cls, config: Any) -> VllmSettings:
        """Raises ConfigError."""
        told = config.get("reflex", {}) if isinstance(config, Mapping) else {}
        try:
            return msgspec.convert(told, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"additional_config.reflex: {error}") from None


class CallerArguments(msgspec.Struct):
    """What a caller says in `vllm_xargs`: see `docs/vllm.md`. Other fields are for others."""

    client: str | int = ""
    deadline_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_gap_ms: Positive | None = None


class Entry(core.Ticket):
    """The record of one request. own: vLLM's. client: its share. granted: tokens since it last entered.

    told: its output tokens that the journal has. wrong: why what its caller says of it is not understood.
    """

    __slots__ = ("client", "own", "told", "wrong")

    def __init__(self, own: Request, seq: int) -> None:
        self.wrong: ConfigError | None = None
        try:
            asked = asked_of(own)
        except ConfigError as error:
            asked, self.wrong = CallerArguments(), error
        limit, gap = asked.deadline_ms, asked.max_gap_ms
        request = core.Request(
            id=own.request_id,
            group=GROUP,
            client=str(asked.client) or own.request_id,
            priority=core.DEFAULT if not own.priority else core.URGENT if own.priority < 0 else core.BACKGROUND,
            time_limit=None if limit is None else limit / 1e3,
            wants=float(max(1, own.num_tokens)),
            streams=True,
            max_gap=None if gap is None else gap / 1e3,
        )
        super().__init__(request, seq, time.monotonic() - max(0.0, time.time() - own.arrival_time))
        self.own, self.told = own, 0
        self.client: ClientShare

    @property
    def named(self) -> bool:
        """Whether its caller said whose it is; else it stands for itself."""
        return self.request.client != self.id


def asked_of(request: Request) -> CallerArguments:
    """Raises ConfigError."""
    told = getattr(request.sampling_params, "extra_args", None) or {}
    try:
        return msgspec.convert(
            {name: told[name] for name in CallerArguments.__struct_fields__ if name in told},
            CallerArguments,
            strict=False,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"vllm_xargs: {error}") from None


def outcome_of(request: Request) -> Done | Failed:
    """How vLLM ended it."""
    if request.status in DONE:
        return Done()
    return Failed(Cancelled() if request.status is RequestStatus.FINISHED_ABORTED else ProcessorError("vLLM failed"))
