"""Anyone's function over a list, called one item at a time from many threads: concurrent calls share it."""

from concurrent.futures import ThreadPoolExecutor

from reflex_runtime import batched

calls: list[int] = []


@batched(max_batch_size=16, max_latency=0.002)
def word_lengths(words: list[str]) -> list[int]:
    """Stands for a model: one call costs about the same for one word as for sixteen."""
    calls.append(len(words))
    return [len(word) for word in words]


def main() -> None:
    words = ["which", "requests", "share", "the", "next", "forward", "pass"] * 8
    with ThreadPoolExecutor(max_workers=16) as pool:
        lengths = list(pool.map(word_lengths, words))
    word_lengths.close()
    assert lengths == [len(word) for word in words]
    print(f"{len(words)} calls from 16 threads became {len(calls)} calls of the function, largest {max(calls)}")


if __name__ == "__main__":
    main()
