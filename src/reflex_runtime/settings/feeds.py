"""The settings of `reflex feeds`."""

from __future__ import annotations

from dataclasses import dataclass

from reflex_runtime.settings.declare import again, option, validate
from reflex_runtime.settings.server import ServerConfig, check_endpoint, check_trust


@dataclass(frozen=True, slots=True)
class FeedsConfig:
    """The settings of `reflex feeds`."""

    processor: str = option(
        "", "a class, an instance, or a function that returns one", metavar="MODULE:NAME", group="the processor"
    )
    onnx: str = option("", "detector or classifier in ONNX; shapes is the bundled one", metavar="FILE")
    size: str = option("", "size of frames, if the graph takes any", metavar="640|WxH", needs="onnx")
    resize: str = option(
        "auto",
        "letterbox keeps the shape of a frame, stretch does not, crop takes its middle; auto: by the model",
        choices=("auto", "letterbox", "stretch", "crop"),
        needs="onnx",
    )
    names: str = option("", "file of class names; by default those in the graph", metavar="FILE", needs="onnx")
    score: float | None = option(
        None,
        "least score; by default 0.25 for YOLO, 0.5 for other detectors, 0 for classifiers",
        (0, 1),
        metavar="SCORE",
        needs="onnx",
    )
    iou: float | None = option(
        None,
        "of boxes of a class that overlap more (intersection over union) the best stays; by default 0.7",
        (0, 1),
        metavar="SHARE",
        needs="onnx",
    )
    classes: tuple[str, ...] = option((), "classes to report, by name or number", metavar="NAME,…", needs="onnx")
    max_detections: int = option(0, "most detections of a frame; 0 is 300, of a classifier 5", (0, 1000), needs="onnx")
    provider: str = option("cpu", "cpu, cuda, openvino or an ONNX Runtime provider name", needs="onnx")
    threads: int = option(1, "ONNX Runtime threads per call", (1, 256), needs="onnx")
    max_batch_size: int = option(4, "most frames in a call of the processor", (1, 4096), group="batching")
    max_latency_ms: float = option(50.0, "longest wait of a free processor for feeds that are due", (0, 60_000, "ms"))
    watchdog_s: float = option(60.0, "give up a batch or a waiting frame after this time; 0 is off", (0, 3600, "s"))
    realtime: bool = option(False, "play files at their pace; the newest frame wins", needs="a file", group="the feeds")
    loop: bool = option(False, "start files over when they end, with --realtime", needs="a file")
    max_age_ms: float = option(1000.0, "drop a frame that is older", (1, 3_600_000, "ms"), needs="a live feed")
    restarts: int = option(0, "how often a lost source is reopened; 0 is no limit", (0, 1_000_000), needs="a live feed")
    read_timeout_s: float = option(5.0, "a camera that is silent so long is lost", (0.1, 600, "s"), needs="a camera")
    every: int = option(1, "take one of N pictures", (1, 1_000_000))
    fps: float = option(0.0, "most pictures a second; 0 takes all", (0, 1000))
    rotate: str = option("0", "degrees to turn pictures clockwise", choices=("0", "90", "180", "270"))
    roi: str = option("", "part of the (turned) picture for the processor, in pixels", metavar="X,Y,W,H")
    hwaccel: str = option(
        "", "decode on a device: auto, or one of FFmpeg, such as cuda or vaapi", metavar="DEVICE", needs="a video"
    )
    duration_s: float = option(0.0, "stop after this time; 0: when every feed has ended", (0, 1e9, "s"))
    track: bool = option(False, "number the objects from frame to frame (ByteTrack)", group="after the batch")
    track_score: float = option(0.5, "least score that begins a track", (0, 1), needs="track")
    zone: tuple[str, ...] = option((), "count detections inside of this polygon", metavar="NAME=X1,Y1,…", repeat=True)
    line: tuple[str, ...] = option(
        (), "count objects that cross this line", metavar="NAME=X1,Y1,X2,Y2", repeat=True, needs="track"
    )
    stage: tuple[str, ...] = option(
        (), "your own stage: a function that gets and returns a result, or a class", metavar="MODULE:NAME", repeat=True
    )
    results: str = option("", "write results as JSON lines; - is standard output", metavar="FILE", group="results")
    annotate: str = option("", "write videos with the results drawn on them to DIR", metavar="DIR")
    trace: str = option("", "write every batch to FILE, for reflex trace", metavar="FILE")
    publish: str = option(
        "",
        "publish results to this MQTT broker (mqtts: over TLS); with a password set REFLEX_PUBLISH instead",
        metavar="mqtt://[USER:PASSWORD@]HOST/TOPIC",
        secret=True,
        group="receivers",
    )
    publish_qos: int = option(
        0, "MQTT quality of service: 0 at most once, 1 at least once, 2 exactly once", (0, 2), needs="publish"
    )
    webhook: str = option("", "POST results to this URL, as JSON lines", metavar="URL", secret=True)
    port: int = option(-1, "port of pages, /metrics and /health; 0: a free one, -1: off", (-1, 65535), group="watching")
    host: str = again(ServerConfig, "host", "127.0.0.1", needs="port")
    api_key: str = again(ServerConfig, "api_key", "", needs="port")
    admin_key: str = again(ServerConfig, "admin_key", "", needs="port")
    allow_host: tuple[str, ...] = again(ServerConfig, "allow_host", (), needs="port")
    otel: str = again(ServerConfig, "otel", "", group="spans")

    def __post_init__(self) -> None:
        validate(self)
        check_endpoint(self.otel)
        check_trust(self)
