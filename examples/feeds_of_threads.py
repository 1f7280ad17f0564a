"""Three threads submit frames, one coordinator runs them together and hands every result back to its own thread."""

from collections.abc import Sequence
from threading import Thread

from reflex_runtime import BatchConfig, BatchCoordinator, BatchEntry


class Brightness:
    """Stands for a detector. Only the coordinator's thread calls it, so it needs no lock."""

    id = "brightness"

    def on_start(self) -> None:
        self.calls = 0

    def process(self, entries: Sequence[BatchEntry]) -> list[float]:
        self.calls += 1
        return [sum(entry.frame) / len(entry.frame) for entry in entries]

    def on_stop(self) -> None:
        print(f"{self.calls} calls of the processor")


def camera(coordinator: BatchCoordinator, name: str, level: int) -> None:
    for i in range(20):
        assert coordinator.submit_and_wait(name, [level + i] * 100) == level + i


def main() -> None:
    with BatchCoordinator(Brightness(), BatchConfig(max_batch_size=3, max_latency=0.02)) as coordinator:
        threads = [Thread(target=camera, args=(coordinator, f"cam{n}", 100 * n)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = coordinator.metrics()
    print(f"{metrics.processed} frames of {len(metrics.feeds)} feeds; batches by size: {dict(metrics.batch_sizes)}")


if __name__ == "__main__":
    main()
