"""Cameras and videos: sources of frames, the stages they pass through, and sinks for results."""

from reflex_runtime.feeds.outputs.annotated import AnnotatedVideo
from reflex_runtime.feeds.outputs.json_lines import JsonLines, SinkError
from reflex_runtime.feeds.outputs.mqtt import MqttPublisher
from reflex_runtime.feeds.outputs.output import ResultOutput
from reflex_runtime.feeds.outputs.webhook import Webhook
from reflex_runtime.feeds.plan import FeedSpec, processor_of, source_of_spec, specs_of
from reflex_runtime.feeds.runtime.feed import Feed, FeedConfig
from reflex_runtime.feeds.runtime.pipeline import Frame, Pipeline, Result, Source, SourceError
from reflex_runtime.feeds.runtime.runtime import Runtime, StopReport
from reflex_runtime.feeds.sources import source_of
from reflex_runtime.feeds.stages import TrackStage, ZoneStage, to_supervision

__all__ = [
    "AnnotatedVideo",
    "Feed",
    "FeedConfig",
    "FeedSpec",
    "Frame",
    "JsonLines",
    "MqttPublisher",
    "Pipeline",
    "Result",
    "ResultOutput",
    "Runtime",
    "SinkError",
    "Source",
    "SourceError",
    "StopReport",
    "TrackStage",
    "Webhook",
    "ZoneStage",
    "processor_of",
    "source_of",
    "source_of_spec",
    "specs_of",
    "to_supervision",
]
