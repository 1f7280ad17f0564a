"""A function that streams: `reflex serve python:stream:count`. Items join and leave between two steps.

curl -N localhost:8000/predict -d 5
"""

import time
from collections.abc import Iterator


def count(limits: list[int]) -> Iterator[list[int | None]]:
    """Counts up to a number: each step has a part for each item, None where there is none any more."""
    for step in range(max(limits)):
        time.sleep(0.05)  # stands for a step of a model
        yield [step if step < limit else None for limit in limits]
