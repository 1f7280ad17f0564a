"""The settings of our scheduling, and a vLLM request as a ticket of the core."""

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
    """`reflex` in `--additional-config`.

    trace: file of the journal. max_gap_ms: longest gap between two tokens of any request. max_queue_s: device seconds
    of waiting work beyond which a client with more than its share is refused. None: no journal, promise or bound.
    """

    trace: str | None = None
    max_gap_ms: Positive | None = None
    max_queue_s: Positive | None = None

    @classmethod
    def read(cls, config: Any) -> VllmSettings:
        """Raises ConfigError."""
        values = config.get("reflex", {}) if isinstance(config, Mapping) else {}
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"additional_config.reflex: {error}") from None


class CallerArguments(msgspec.Struct):
    """Our fields of `vllm_xargs`; see `docs/vllm.md`. Other fields are ignored."""

    client: str | int = ""
    deadline_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_gap_ms: Positive | None = None

    @classmethod
    def of(cls, request: Request) -> CallerArguments:
        """Raises ConfigError."""
        given = getattr(request.sampling_params, "extra_args", None) or {}
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"vllm_xargs: {error}") from None


class Entry(core.Ticket):
    """The ticket of one request. own: vLLM's request. client: its client's share. granted: tokens since it last
    entered. written: number of its output tokens in the journal. wrong: the fault in its `vllm_xargs`.
    """

    __slots__ = ("client", "own", "written", "wrong")

    def __init__(self, own: Request, seq: int) -> None:
        self.wrong: ConfigError | None = None
        try:
            given = CallerArguments.of(own)
        except ConfigError as error:
            given, self.wrong = CallerArguments(), error
        limit, gap = given.deadline_ms, given.max_gap_ms
        request = core.Request(
            id=own.request_id,
            group=GROUP,
            client=str(given.client) or own.request_id,
            priority=core.DEFAULT if not own.priority else core.URGENT if own.priority < 0 else core.BACKGROUND,
            time_limit=None if limit is None else limit / 1e3,
            wants=float(max(1, own.num_tokens)),
            streams=True,
            max_gap=None if gap is None else gap / 1e3,
        )
        super().__init__(request, seq, time.monotonic() - max(0.0, time.time() - own.arrival_time))
        self.own, self.written = own, 0
        self.client: ClientShare

    def result(self) -> Done | Failed:
        """Its outcome, from the status that vLLM gave it."""
        if self.own.status in DONE:
            return Done()
        aborted = self.own.status is RequestStatus.FINISHED_ABORTED
        return Failed(Cancelled() if aborted else ProcessorError("vLLM failed"))
