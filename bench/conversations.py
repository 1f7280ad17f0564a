"""Traces of conversations, in virtual time: who asks when, and with which beginning. The same for every machine.

A turn's prompt is all that was said before, and something new. Prompts have 40 to 8,000 tokens, pauses are log-normal:
half are longer than a minute, one of a hundred half an hour. A text is known by its name alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

LONGEST = 8000  # tokens of a prompt
PER_TOKEN = 0.02  # seconds that a token of an answer takes
HOUR = 3600.0
Text = tuple[str, int]  # its name, and its tokens


@dataclass(frozen=True)
class Asked:
    """A request. texts: what its prompt begins with, one behind the other; the last name is its own. prompt, answer:
    tokens."""

    at: float
    texts: tuple[Text, ...]
    prompt: int
    answer: int

    @property
    def ends(self) -> float:
        return self.at + self.answer * PER_TOKEN


def between(rng: random.Random, low: float, high: float) -> int:
    return round(exp(rng.uniform(log(low), log(high))))


def chats(
    rng: random.Random,
    count: int,
    turns: float = 6.0,
    pause: float = 60.0,
    spread: float = 1.5,
    first: tuple[int, int] = (200, 4000),
    more: tuple[int, int] = (40, 1500),
    system: Callable[[], Text] | None = None,
    thoughts: bool = False,
    name: str = "chat",
) -> list[Asked]:
    """Conversations that begin within an hour. turns: their mean number; pause: median seconds. system: the text that a
    conversation begins with. thoughts: the next prompt leaves out half of each answer."""
    found = []
    for i in range(count):
        begin = () if system is None else (system(),)
        said = sum(tokens for _, tokens in begin)
        at, texts, going = rng.uniform(0.0, HOUR), begin, 0
        while True:
            new = between(rng, *(more if going else first))
            if going and said + new > LONGEST:
                break
            asked = Asked(at, (*texts, (f"{name} {i} {going}", 0)), min(LONGEST, said + new), between(rng, 20, 500))
            found.append(asked)
            texts = (*texts, (f"{name} {i} {going}", asked.prompt - said + (0 if thoughts else asked.answer)))
            if thoughts:
                texts = (*texts, (f"{name} {i} {going} said", asked.answer // 2))
            said = sum(tokens for _, tokens in texts)
            going += 1
            if rng.random() < 1.0 / turns:
                break
            at = asked.ends + rng.lognormvariate(log(pause), spread)
    return found


def singles(
    rng: random.Random,
    rate: float,
    tokens: tuple[int, int] = (200, LONGEST),
    text: Callable[[], Text] | None = None,
) -> list[Asked]:
    """Prompts that never come back, so many a second. text: what each begins with."""
    found, at = list[Asked](), 0.0
    while (at := at + rng.expovariate(rate)) < 1.3 * HOUR:
        begin = () if text is None else (text(),)
        prompt = sum(one[1] for one in begin) + between(rng, *tokens)
        found.append(Asked(at, (*begin, (f"single {len(found)}", 0)), prompt, between(rng, 20, 300)))
    return found


def popular(rng: random.Random, count: int, tokens: tuple[int, int], power: float) -> Callable[[], Text]:
    """Some of so many texts, those of small numbers more often."""
    texts = [(f"text {i}", between(rng, *tokens)) for i in range(count)]
    weights = [(i + 1) ** -power for i in range(count)]
    return lambda: rng.choices(texts, weights)[0]


def batch(rng: random.Random, documents: int = 400, questions: int = 3) -> list[Asked]:
    """A job that asks several questions about one document after the other."""
    found = []
    for i in range(documents):
        text = (f"document {i}", between(rng, 2000, LONGEST))
        for j in range(questions):
            at = 600.0 + 2.5 * len(found)
            found.append(Asked(at, (text, (f"question {i} {j}", 0)), text[1] + 30, 100))
    return found


def short(rng: random.Random) -> list[Asked]:
    """Most conversations end soon, few go on for long."""
    return chats(rng, 150, 2.0) + chats(rng, 50, 15.0, 120.0, name="long")


def hasty(rng: random.Random) -> list[Asked]:
    """Many turns within seconds, and then never again, beside conversations with long pauses."""
    return chats(rng, 300, 8.0, 10.0, 1.0) + chats(rng, 50, 4.0, 600.0, 0.8, name="slow")


def agents(rng: random.Random) -> list[Asked]:
    """Large first prompts, many turns, half of them after 8 seconds."""
    return chats(rng, 200, 12.0, 8.0, 1.8, (1500, 6000), (50, 1000)) + singles(rng, 0.15)


def users(rng: random.Random) -> list[Asked]:
    """Conversations and single prompts that begin with one of 20 system prompts."""
    system = popular(rng, 20, (300, 4000), 1.0)
    return chats(rng, 200, 3.0, first=(20, 500), more=(20, 500), system=system) + singles(rng, 0.3, (50, 1000), system)


TRACES: dict[str, Callable[[random.Random], list[Asked]]] = {
    "200 conversations": lambda rng: chats(rng, 200),
    "… beside single prompts": lambda rng: chats(rng, 200) + singles(rng, 0.3),
    "… whose thoughts are left out": lambda rng: chats(rng, 200, thoughts=True) + singles(rng, 0.1),
    "agents beside single prompts": agents,
    "conversations that end soon": short,
    "hasty and slow conversations": hasty,
    "shared system prompts": users,
    "… of a few words, one for all": lambda rng: chats(rng, 200, system=lambda: ("all", 60)) + singles(rng, 0.3),
    "a batch job over documents": lambda rng: chats(rng, 200) + batch(rng),
    "questions about 300 documents": lambda rng: (
        chats(rng, 100) + singles(rng, 0.3, (20, 40), popular(rng, 300, (1000, LONGEST), 0.8))
    ),
}


def trace(name: str, seed: int) -> list[Asked]:
    """All requests of this trace, in order of time."""
    return sorted(TRACES[name](random.Random(f"{name} {seed}")), key=lambda asked: asked.at)
