"""Cameras and videos: sources of frames, the stages they pass through, and sinks for results."""

from reflex_runtime.feeds.arrays import ResultArrays, to_arrays, to_supervision
from reflex_runtime.feeds.feed import Feed, FeedConfig
from reflex_runtime.feeds.frame import Frame
from reflex_runtime.feeds.opening import processor_of, source_of
from reflex_runtime.feeds.outputs.address import mqtt_address, webhook_address
from reflex_runtime.feeds.outputs.mqtt import MqttPublisher
from reflex_runtime.feeds.outputs.output import ResultOutput
from reflex_runtime.feeds.outputs.parquet import ParquetResults, read_parquet
from reflex_runtime.feeds.outputs.webhook import Webhook
from reflex_runtime.feeds.pipeline import Pipeline, Result
from reflex_runtime.feeds.runtime import Runtime, StopReport
from reflex_runtime.feeds.sinks import AnnotatedVideo, JsonLines, SinkError
from reflex_runtime.feeds.source import Source, SourceError
from reflex_runtime.feeds.spec import FeedSpec, source_of_spec, specs_of
from reflex_runtime.feeds.stages.tracking import TrackStage
from reflex_runtime.feeds.stages.zones import ZoneStage

__all__ = [
    "AnnotatedVideo",
    "Feed",
    "FeedConfig",
    "FeedSpec",
    "Frame",
    "JsonLines",
    "MqttPublisher",
    "ParquetResults",
    "Pipeline",
    "Result",
    "ResultArrays",
    "ResultOutput",
    "Runtime",
    "SinkError",
    "Source",
    "SourceError",
    "StopReport",
    "TrackStage",
    "Webhook",
    "ZoneStage",
    "mqtt_address",
    "processor_of",
    "read_parquet",
    "source_of",
    "source_of_spec",
    "specs_of",
    "to_arrays",
    "to_supervision",
    "webhook_address",
]
