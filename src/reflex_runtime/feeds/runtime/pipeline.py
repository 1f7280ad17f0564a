"""The stages of a feed: those before the batch point, the batch point shared with other feeds, and those after it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.feeds.runtime.frame import Frame, Region
from reflex_runtime.run.submitted_frame import FrameOptions, NewestFrame


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A frame with what was found in it.

    frame: as the stages before the batch point left it; positions in `value` are pixels of this picture.
    value: what the processor answered, then what the stages after made of it; None without a batch point. Drawing and
        JSON lines know a mapping with any of boxes ([[x0, y0, x1, y1], ...] in pixels), labels, scores and text.
    latency: seconds from the frame's capture to its answer.
    """

    frame: Frame
    feed: str
    value: Any
    latency: float


class SubmitHandle(Protocol):
    """What a feed needs of a coordinator's handle; see `BatchHandle`."""

    @property
    def lost(self) -> ProcessorError | None:
        """Why the coordinator died, if it did."""

    @property
    def prepare(self) -> Callable[[Any], Any] | None:
        """What the processor does with a frame ahead of its call, on the feed's thread."""

    def submit_and_wait(
        self,
        feed_id: str,
        frame: Any,
        view: Any = None,
        *,
        newest: Callable[[], NewestFrame] | None = None,
        **options: Unpack[FrameOptions],
    ) -> Any:
        """The frame's result."""


class BatchPoint(Protocol):
    """Where a pipeline meets other feeds: a `BatchCoordinator`."""

    handle: Any


Before = Callable[[Frame], Frame | None]
After = Callable[[Result], Result | None]
View = Callable[[Frame], Any]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a feed, called on its own thread, one frame at a time and in order.

    before: each gets a frame and returns it, or another one made of it (`dataclasses.replace`); None skips the frame.
    batch: a coordinator; it gets the picture of the frame. None: nothing is asked, and results have the value None.
    view: makes what goes with the picture to the processor, as the entry's `view`; called after the stages before.
        None: the processor's own `prepare` makes it, if it has one.
    region: the part of the picture that the processor gets; boxes, keypoints and masks of its results are moved to
        where they are in the whole picture, which stages and sinks get.
    after: each gets a result and returns it or another one; None keeps it from the sinks.

    A stage that raises loses that frame only, and is named in the error: by its attribute `name`, or as it is called in
    its module. Stages may keep state, so a pipeline belongs to one feed, unless all its
    stages are plain functions. To give many feeds the same stages, pass a function that makes a pipeline.
    """

    before: Sequence[Before] = ()
    batch: BatchPoint | None = None
    after: Sequence[After] = ()
    view: View | None = field(default=None, kw_only=True)
    region: Region | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            stages = getattr(self, name)
            if callable(stages):
                raise ConfigError(f"Pipeline.{name}: must be a sequence of stages, is a single one")
            for stage in stages:
                if not callable(stage):
                    raise ConfigError(f"Pipeline.{name}: {stage!r} cannot be called")
            object.__setattr__(self, name, tuple(stages))
        if self.view is not None and not callable(self.view):
            raise ConfigError(f"Pipeline.view: {self.view!r} cannot be called")
        if self.batch is not None and not hasattr(getattr(self.batch, "handle", None), "submit_and_wait"):
            raise ConfigError(f"Pipeline.batch: {self.batch!r} is no coordinator")

    def view_of(self, frame: Frame) -> Any:
        """What goes with a frame to the processor."""
        if self.view is not None:
            return self.view(frame)
        return frame.prepared if frame.prepared is not None else self.prepared(frame.image)

    def prepared(self, image: Any) -> Any:
        """What the processor makes of a picture ahead of its call; None if nothing."""
        prepare = None if self.batch is None else getattr(self.batch.handle, "prepare", None)
        return None if prepare is None else prepare(self.part(image))

    def part(self, image: Any) -> Any:
        """What the processor gets of a picture."""
        return image if self.region is None else self.region.part(image)

    def placed(self, value: Any) -> Any:
        """The processor's result, in pixels of the whole picture."""
        return value if self.region is None else self.region.placed(value)

    @property
    def shareable(self) -> bool:
        """Whether several feeds may use it: nothing in it can remember a frame."""
        stages = [*self.before, *self.after, *([] if self.view is None else [self.view])]
        return all(_is_plain(stage) for stage in stages)


def name_of(stage: object) -> str:
    """What a stage is called in errors and figures."""
    name = getattr(stage, "name", None)
    if isinstance(name, str) and name:
        return name
    named = stage if inspect.isroutine(stage) or inspect.isclass(stage) else type(stage)
    return str(getattr(named, "__qualname__", named)).rpartition("<locals>.")[2]


def _is_plain(stage: object) -> bool:
    """Whether it is a function without a closure. A bound method or an object with `__call__` may keep state."""
    if inspect.isfunction(stage):
        return stage.__closure__ is None
    return inspect.isclass(stage) or (inspect.isbuiltin(stage) and inspect.ismodule(stage.__self__))
