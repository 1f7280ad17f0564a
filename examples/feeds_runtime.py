"""Two cameras on the bundled detector, with a stage of one's own, and what became of their frames."""

from reflex_runtime import BatchConfig, Runtime
from reflex_runtime.feeds import Pipeline, Result
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.sources.shapes import DETECTOR, ShapesSource

seen: dict[str, set[str]] = {"door": set(), "yard": set()}


def remember(result: Result) -> Result:
    """A stage after the batch point, on the feed's own thread."""
    seen[result.feed].update(result.value["labels"])
    return result


def main() -> None:
    runtime = Runtime()
    detector = runtime.coordinator(OnnxFrames(DETECTOR), BatchConfig(max_batch_size=4))
    for seed, name in enumerate(seen):
        source = ShapesSource(seed=seed, seconds=2.0, realtime=False)  # as a file: every frame is answered
        runtime.feed(name, source, Pipeline(batch=detector, after=[remember]))
    with runtime:
        runtime.wait()
        snapshot = runtime.snapshot()
    for feed in snapshot.feeds.values():
        assert feed.processed == feed.frames == 30
        print(f"{feed.name}: {feed.processed} frames, saw {', '.join(sorted(seen[feed.name]))}")


if __name__ == "__main__":
    main()
