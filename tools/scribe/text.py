"""What the scribe learns to write: the project's own pages, and stories and chats from a small grammar of our own.

No text from elsewhere. A document is a string in which the four special tokens of `SPECIAL` may stand; the trainer puts
`END` behind each. Generated documents depend on the seed and the pages alone, so that a held-out set is another seed.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

END = "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = [END, SYSTEM, USER, ASSISTANT]

Rng = random.Random

# --- pages: what people wrote in this project -----------------------------------------------------------------------


def pages(root: Path) -> list[str]:
    """Prose of the documentation by section, docstrings and comments of the source by module; sorted by path."""
    documents = []
    for path in sorted([*root.glob("*.md"), *(root / "docs").glob("*.md")]):
        documents += _sections(path.read_text())
    for folder in ("src", "tests", "bench"):
        for path in sorted((root / folder).rglob("*.py")):
            documents += _explanations(path.read_text())
    return documents


def _sections(page: str) -> list[str]:
    """Each section's title and paragraphs, without code, tables, pictures and link targets."""
    page = re.sub(r"```.*?```", "", page, flags=re.S)
    page = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", page)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    sections = []
    for section in re.split(r"\n(?=#+ )", page):
        title, _, rest = section.partition("\n")
        paragraphs = [" ".join(lines.split()) for lines in rest.split("\n\n") if not re.match(r"\s*[|<]|    ", lines)]
        body = "\n\n".join(p for p in paragraphs if len(p) > 40)
        if body:
            sections.append(f"{title}\n\n{body}")
    return sections


def _explanations(source: str) -> list[str]:
    """The docstrings of a module, in order, then its comments; short ones are names said twice and teach nothing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) > 60 and "    " not in text:
                found.append("\n\n".join(" ".join(p.split()) for p in text.split("\n\n")))
    comments = re.findall(r"^ *# ([A-Z][^\n]+(?:\n *# [^\n]+)*)", source, flags=re.M)
    found += [" ".join(re.sub(r"\n *# ", " ", comment).split()) for comment in comments if len(comment) > 60]
    return ["\n\n".join(found)] if found else []


def glossary(root: Path) -> list[tuple[str, str]]:
    """The words of docs/glossary.md and what they mean."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (root / "docs" / "glossary.md").read_text(), flags=re.M)
    rows = [(word, meaning) for word, meaning in rows if word not in ("word", "---")]
    return [(word.split(",")[0].strip("` "), meaning.strip().replace("`", "")) for word, meaning in rows]


# --- stories --------------------------------------------------------------------------------------------------------

WOMEN = ["Ada", "Cleo", "Edda", "Greta", "Ida", "Kira", "Mila", "Olga", "Rosa", "Tilda"]
MEN = ["Ben", "Dan", "Finn", "Hugo", "Jon", "Leo", "Nils", "Paul", "Sam", "Otto"]
NAMES = [named for she, he in zip(WOMEN, MEN, strict=True) for named in ((she, "she"), (he, "he"))]
HEROES = ["robot", "camera", "clerk", "baker", "gardener", "painter", "sailor", "teacher", "miller", "postman", "fox"]
HEROES += ["cat", "crow", "hen", "bear", "mouse", "dog", "owl", "tailor", "farmer"]
PLACES = ["in a small town", "by the sea", "on a hill", "in a quiet village", "at the edge of a forest"]
PLACES += ["in a tall house", "near an old bridge", "beside a river", "in a busy harbour", "under a big tree"]
TRAITS = ["patient", "curious", "careful", "cheerful", "shy", "brave", "tired", "clever", "kind", "proud", "slow"]
TRAITS += ["quick"]
THINGS = ["key", "lamp", "letter", "bell", "map", "book", "hat", "basket", "ladder", "clock", "brush", "spoon"]
THINGS += ["kite", "box", "coin", "drum", "scarf", "boat", "wheel", "cup"]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "silver", "orange", "grey"]
SPOTS = ["under the table", "behind the door", "in the garden", "on the roof", "beside the well", "in the old mill"]
SPOTS += ["next to the stove", "at the end of the road", "in a heap of leaves", "on the lowest shelf"]
TIMES = ["One morning", "One evening", "One cold day", "On a warm day in spring", "Early one day", "One rainy day"]
FOODS = ["bread", "soup", "cake", "apples", "honey", "cheese", "pears", "pancakes"]

FORMS = {"she": ("she", "her", "her"), "he": ("he", "him", "his"), "it": ("it", "it", "its")}


class Cast:
    """Who and what a story is about; the same from its first line to its last."""

    def __init__(self, rng: Rng) -> None:
        (self.name, pronoun), (self.friend, friends) = rng.sample(NAMES, 2)
        self.hero, self.other = rng.sample(HEROES, 2)
        self.place, self.time, self.food = rng.choice(PLACES), rng.choice(TIMES), rng.choice(FOODS)
        self.trait, self.trait2 = rng.sample(TRAITS, 2)
        self.thing, self.thing2 = rng.sample(THINGS, 2)
        self.colour, self.spot, self.spot2 = rng.choice(COLOURS), *rng.sample(SPOTS, 2)
        self.they, self.them, self.their = FORMS[pronoun]
        self.friend_they, self.friend_them, self.friend_their = FORMS[friends]
        self.many = rng.randint(3, 9)

    def fill(self, text: str) -> str:
        """`{name}` and the like replaced; `a` before a vowel becomes `an`; sentences begin with a capital."""
        text = text.format_map(vars(self) | {"number": COUNT[self.many], "fewer": COUNT[self.many - 1]})
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        return re.sub(r'(^|[.!]"? |\? )("?)([a-z])', lambda m: m[1] + m[2] + m[3].upper(), text)


COUNT = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
COUNT += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"]

OPENINGS = [
    "Once there was a {trait} {hero} called {name}, who lived {place}.",
    "{name} was a {trait} {hero} who lived {place}.",
    "There was once a {hero} {place}. Everybody called {them} {name}, and everybody knew how {trait} {they} was.",
    "A {trait} {hero} called {name} lived {place}.",
    "Far from here, {place}, lived a {hero} called {name}. {they} was {trait}, and sometimes a little {trait2}.",
]
MIDDLES = [
    "{they} had a {colour} {thing} and took it everywhere.",
    "Every day {they} ate {food} and counted the ships.",
    "{they} liked {food} more than anything else.",
    "Of all {their} things {they} loved {their} {colour} {thing} best.",
    "{their} best friend was {friend} the {other}.",
]
LOST = [
    "{time} the {colour} {thing} was gone. {name} looked {spot}, but it was not there. {they} looked {spot2}, but "
    "there was nothing either.",
    '{time} {name} could not find {their} {thing}. "Where is my {colour} {thing}?" {they} asked. {they} searched '
    "{spot}, and then {spot2}.",
]
ASKED = [
    'Then {friend} the {other} came by. "What are you looking for?" asked {friend}. "For my {thing}," said {name}.',
    '{they} went to {friend}, a {trait2} {other}. "Have you seen my {thing}?" {they} asked. {friend} thought for a '
    "long time.",
]
FOUND = [
    '"Have you looked {spot}?" said {friend}. They went there together, and there it was.',
    '"We look one place after the other," said {friend}, "and no place twice." So they did. The {thing} lay {spot2}.',
    '"You are wearing it," said {friend}, and both laughed.',
]
QUEUE = [
    "{time} {number} people came at once, and all of them wanted {food}. {name} had only one pair of hands.",
    "{time} there was a long queue at the door. {number} people were waiting, and nobody wanted to be the last.",
]
SOLVED = [
    "{name} looked at the queue. Then {they} asked what each of them needed. Some needed little, and {they} served "
    "those together. The others waited a moment longer, and nobody waited long.",
    '"I can carry four plates at a time," said {name}. So {they} served four, and then four again, until the room '
    "was empty.",
    "First {name} ran for each of them alone, and that was slow. Then {they} took a large tray, and one walk was "
    "enough for many.",
    "{friend} the {other} came to help. {friend_they} wrote down who came first. After that, nobody pushed any more.",
]
STORM = [
    "{time} a storm came. The wind took the {colour} {thing} and carried it away. {name} ran after it as fast as "
    "{they} could.",
    "{time} the river rose, and the bridge was under water. {name} stood on one side, and {friend} the {other} stood "
    "on the other.",
]
WAITED = [
    '"Wait," called {friend}, "the wind will get tired before you do." {name} sat down and waited. In the '
    "evening it was quiet, and the {thing} lay {spot}.",
    "They waited until the water was low. It took {number} days. On the last day {friend} brought {food}, and they "
    "ate together {spot2}.",
]
GIFT = [
    '{time} {friend} the {other} came to visit. {friend_they} looked sad. "My {thing2} is broken," said {friend}, '
    '"and I need it tomorrow."',
    "{time} {name} met {friend}, a {trait2} {other}. {friend} had no {thing2} and no {food}, and the way home was "
    "long.",
]
GAVE = [
    '{name} thought of the {colour} {thing}. Then {they} gave it away. "Take this," {they} said, "it is as good '
    'as a {thing2}."',
    '"Come in," said {name}. They sat at the table, ate {food} and worked all night. In the morning the {thing2} '
    "was ready.",
]
ENDINGS = [
    "From that day on, {name} was never {trait2} again.",
    "And when {name} tells the story today, {they} still laughs.",
    "That evening they ate {food} and were happy.",
    "After that, {name} and {friend} were friends for ever.",
    '"Slow and steady," said {name}, "and one thing after the other."',
    "Since then there is always some {food} for {friend} at {name}'s house.",
    "And the {colour} {thing}? It still hangs on the wall.",
]
PLOTS = [(LOST, ASKED, FOUND), (QUEUE, SOLVED), (STORM, WAITED), (GIFT, GAVE)]


def tell(rng: Rng, cast: Cast, plot: int | None = None) -> str:
    parts = rng.choice(PLOTS) if plot is None else PLOTS[plot]
    told = [rng.choice(OPENINGS), *rng.sample(MIDDLES, rng.randint(0, 2)), *(rng.choice(part) for part in parts)]
    return cast.fill(" ".join([*told, rng.choice(ENDINGS)]))


def story(rng: Rng) -> str:
    return tell(rng, Cast(rng))


# --- chats ----------------------------------------------------------------------------------------------------------

Turn = tuple[str, str]


def _story_turn(rng: Rng) -> Turn:
    cast = Cast(rng)
    plot = rng.randrange(len(PLOTS))
    about = ["who lost a {colour} {thing}", "and a long queue", "and a storm", "who helped a friend"][plot]
    verbs = ["Tell me a story about", "Please tell a story about", "Write a story about", "I want a story about"]
    ask = rng.choice(verbs)
    who = rng.choice(["a {hero} called {name}", "{name} the {hero}", "a {hero} named {name}"])
    if rng.random() < 0.25:
        plain = ["Tell me a story.", "A story, please.", "Write a short story.", "Tell a story!"]
        return rng.choice(plain), tell(rng, cast)
    if rng.random() < 0.3:
        return cast.fill(f"{ask} {who}."), tell(rng, cast)
    return cast.fill(f"{ask} {who} {about}."), tell(rng, cast, plot)


GREETINGS = ["Hello", "Hi", "Good morning", "Good evening", "Hey", "Good day"]


def _greeting(rng: Rng) -> Turn:
    asked = rng.choice(GREETINGS)
    hello = asked if asked.startswith("Good") else "Hello"
    rest = rng.choice(["What can I do for you?", "How can I help?", "Ask me about batches, or ask for a story."])
    return asked + rng.choice(["!", ".", ", Scribe!", " there!", ""]), f"{hello}! {rest}"


WHO = ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a large model?"]
WHO += ["Who made you?"]
CAN = ["What can you do?", "What do you know?", "Help", "What can I ask you?", "How can you help me?"]

WHO_ANSWER = "I am Scribe, a very small language model. I was trained in minutes on the pages of Reflex and on stories."
CAN_ANSWER = (
    "I can tell stories, explain the words of Reflex, count, add small numbers and say how a prompt is split into "
    "steps."
)


def _who(rng: Rng) -> Turn:
    if rng.random() < 0.5:
        return rng.choice(WHO), WHO_ANSWER
    return rng.choice(CAN), CAN_ANSWER


THANKS = ["Thank you!", "Thanks.", "Thanks a lot!", "Great, thank you.", "That was nice."]
BYES = ["Bye!", "Goodbye.", "See you.", "Good night.", "That is all."]


def _farewell(rng: Rng) -> Turn:
    if rng.random() < 0.5:
        return rng.choice(THANKS), rng.choice(["You are welcome!", "You are welcome. Is there anything else?"])
    return rng.choice(BYES), rng.choice(["Goodbye, and come back soon!", "Goodbye!"])


def _number(rng: Rng) -> Turn:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    kind = rng.randrange(5)
    if kind == 0:
        asked = rng.choice([f"What is {a} plus {b}?", f"What is {a} + {b}?", f"Add {a} and {b}."])
        return asked, f"{a} plus {b} is {a + b}."
    if kind == 1:
        a, b = max(a, b), min(a, b)
        return rng.choice([f"What is {a} minus {b}?", f"What is {a} - {b}?"]), f"{a} minus {b} is {a - b}."
    if kind == 2 and a != b:
        return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."
    end = a + rng.randint(2, 12)
    if kind == 3:
        return f"Count from {a} to {end}.", ", ".join(map(str, range(a, end + 1))) + "."
    return f"Count backwards from {end} to {a}.", ", ".join(map(str, range(end, a - 1, -1))) + "."


def _steps(rng: Rng) -> Turn:
    """A prompt in chunks of the budget: what the engine's own trace shows."""
    budget, tokens = rng.choice([4, 5, 6, 8, 10, 12, 16, 20, 32]), rng.randint(2, 60)
    chunks = [min(budget, tokens - done) for done in range(0, tokens, budget)]
    asked = rng.choice(
        [
            f"A prompt has {tokens} tokens and the budget is {budget}. How many steps does it take?",
            f"How is a prompt of {tokens} tokens split when the budget is {budget}?",
            f"Budget {budget}, prompt {tokens}: which chunks?",
        ]
    )
    if len(chunks) == 1:
        return asked, f"One step: all {tokens} tokens fit into the budget of {budget}."
    listed = ", then ".join(map(str, chunks))
    return asked, f"It takes {COUNT[len(chunks)]} steps: {listed}. The last one gives the first token."


def _schedule(rng: Rng) -> Turn:
    """Two prompts under one budget, step by step, by the runtime's own rule: who wants one token goes first."""
    budget = rng.choice([4, 5, 6, 8, 10, 12, 16])
    prompts = {"A": rng.randint(2, 20), "B": rng.randint(2, 20)}
    left, wanted, steps = dict(prompts), {"A": 2, "B": 2}, []
    while wanted:
        room, grants = budget, {}
        for name in sorted(wanted, key=lambda name: (left[name] != 1 or wanted[name] == 2, name)):
            if (grant := min(left[name], room)) > 0:
                grants[name], room = grant, room - grant
        for name, grant in grants.items():
            left[name] -= grant
            if not left[name]:  # a token came out; the next step computes it
                left[name], wanted[name] = 1, wanted[name] - 1
                wanted = {name: count for name, count in wanted.items() if count}
        steps.append(" and ".join(f"{name} gets {grant}" for name, grant in sorted(grants.items())))
    answer = " ".join(f"Step {i}: {step}." for i, step in enumerate(steps, 1))
    asked = ["Schedule prompts of {} and {} tokens with budget {}.", "Prompts {} and {}, budget {}: who runs when?"]
    return rng.choice(asked).format(*prompts.values(), budget), answer


def _places(rng: Rng) -> Turn:
    waiting, places = rng.randint(2, 16), rng.randint(1, 12)
    asked = f"{waiting} requests wait and there are {places} places. Who runs?".replace("are 1 places", "is 1 place")
    if places >= waiting:
        return asked, f"All {waiting} run in the next step, and nobody waits."
    left = waiting - places
    return asked, f"The first {places} run in the next step, and {left} {'waits' if left == 1 else 'wait'} for a place."


def _facts() -> list[Turn]:
    facts = [(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.") for a, b in OPPOSITES]
    facts += [(f"What is the opposite of {b}?", f"The opposite of {b} is {a}.") for a, b in OPPOSITES]
    for ring in (DAYS, MONTHS):
        following = zip(ring, ring[1:] + ring[:1], strict=True)
        facts += [(f"What comes after {a}?", f"After {a} comes {b}.") for a, b in following]
    facts += [(f"What colour is {a}?", f"{a[0].upper() + a[1:]} is {b}.") for a, b in COLOURED]
    facts += [("Name the days of the week.", ", ".join(DAYS) + "."), ("Name the months.", ", ".join(MONTHS) + ".")]
    return facts


DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October"]
MONTHS += ["November", "December"]
OPPOSITES = [("hot", "cold"), ("fast", "slow"), ("big", "small"), ("early", "late"), ("full", "empty")]
OPPOSITES += [("old", "new"), ("day", "night"), ("long", "short"), ("open", "closed"), ("first", "last")]
OPPOSITES += [("light", "dark"), ("wet", "dry"), ("loud", "quiet"), ("high", "low"), ("busy", "idle")]
OPPOSITES += [("left", "right"), ("up", "down"), ("hard", "easy")]
COLOURED = [("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("coal", "black"), ("a lemon", "yellow")]
COLOURED += [("blood", "red"), ("a carrot", "orange"), ("the sea", "blue"), ("chocolate", "brown")]
COLOURED += [("a cloud", "white")]


def _copy(rng: Rng) -> Turn:
    words = rng.sample(THINGS + HEROES + COLOURS + FOODS, rng.randint(2, 7))
    if rng.random() < 0.5:
        return f"Repeat: {' '.join(words)}", " ".join(words)
    return f"What is the {'first' if (first := rng.random() < 0.5) else 'last'} word of: {' '.join(words)}?", (
        f"The {'first' if first else 'last'} word is {words[0] if first else words[-1]}."
    )


UNKNOWN = ["What is the capital of {}?", "Who is the king of {}?", "Who won the race in {}?", "How old is {}?"]
UNKNOWN += ["Translate {}.", "What will the weather be in {}?", "Write a program that sorts {}."]
UNKNOWN += ["What do you think of {}?", "Who wrote {}?", "How do I cook {}?", "What does {} cost?"]
UNKNOWN += ["Where can I buy {}?", "When was {} built?", "Do you like {}?"]
SUBJECTS = ["France", "Paris", "London", "Rome", "the moon", "a car", "numbers", "music", "politics", "the news"]
SUBJECTS += ["football", "a list", "China", "America", "Berlin", "physics", "the stars", "gold", "tea", "rice"]
SUBJECTS += ["a castle", "my name"]


def _unknown(rng: Rng) -> Turn:
    answers = ["I do not know that. I am a very small model.", "I never learned that. Ask me for a story instead."]
    answer = rng.choice(answers)
    return rng.choice(UNKNOWN).format(rng.choice(SUBJECTS)), answer


WHAT = ["What is a {}?", "What does {} mean?", "Explain the word {}.", "Define {}.", "What is meant by {}?", "{}?"]


def _word(words: list[tuple[str, str]]) -> Callable[[Rng], Turn]:
    def turn(rng: Rng) -> Turn:
        word, meaning = rng.choice(words)
        return rng.choice(WHAT).format(rng.choice([word, word.lower()])), f"{word[0].upper() + word[1:]}: {meaning}."

    return turn


EXPLAINED = {
    "continuous batching": (
        "the batch is rebuilt at every step, so that a request joins or leaves without waiting for the others"
    ),
    "a token": "a piece of text, often a word or a part of one; the model reads and writes one number for each",
    "a prompt": "what a caller writes; all of its tokens must be computed before the first new one appears",
    "prefill": "computing a prompt: many tokens at once, the device is busy with arithmetic",
    "decode": "writing the answer: one token for each request and step, the device is busy with reading memory",
    "chunked prefill": "a long prompt is computed in several steps, so that others get their tokens in between",
    "the key-value cache": "what attention remembers of earlier tokens, so that no token is computed twice",
    "a block": "a few tokens' worth of the cache; a sequence has a table of blocks, and they may lie anywhere",
    "a block table": "the list that says in which block each part of a sequence lies",
    "the prefix cache": "blocks of a prompt that was seen before are used again instead of being computed again",
    "preemption": "when memory runs out, the newest request of the lowest tier gives its blocks back and starts over",
    "the token budget": "the most tokens one step may compute, over all requests together",
    "a step": "one forward pass of the model, over some tokens of some requests",
    "a forward pass": "one run of all layers of the model over the tokens of a step",
    "greedy decoding": "always taking the most likely token; the same prompt gives the same text",
    "temperature": "how daring the choice of the next token is; zero always takes the most likely one",
    "time to first token": "from the arrival of a request until its first new token",
    "inter-token latency": "the time between two tokens of one answer",
    "throughput": "how much work is done in a second, over all requests together",
    "latency": "how long one request takes, from its arrival to its answer",
    "a language model": "a program that guesses the next token, again and again, from all the tokens before it",
    "attention": "the part of a model in which a token looks at the tokens before it",
    "an embedding": "a row of numbers that stands for a token inside the model",
    "a layer": "one of the equal parts of a model; a token passes through all of them in order",
    "the scheduler": "the part that decides which requests share the next step; it never waits and never reads a clock",
    "a scheduler": "the part that decides which requests share the next step",
    "a robot": "a machine that sees, decides and moves; here it asks a policy what to do next",
    "a camera": "a source of pictures; many cameras can share one model",
    "a queue": "those who wait, in the order they came, unless one of them is urgent",
    "Reflex": "a batching runtime: one pure scheduler for robots, cameras and token generation",
    "a tokenizer": "what turns text into tokens, and tokens into text",
    "a sampler": "what picks the next token from the scores of the model",
    "a logit": "the score a model gives a token before it becomes a probability",
    "streaming": "sending an answer piece by piece while it is still being written",
}


def _explained(rng: Rng) -> Turn:
    word, meaning = rng.choice(list(EXPLAINED.items()))
    asked = ["What is {}?", "Explain {}.", "Can you explain {}?", "Tell me what {} is.", "What does {} mean?"]
    return rng.choice(asked).format(word), f"{word[0].upper() + word[1:]}: {meaning}."


def _page(sections: list[tuple[str, str]]) -> Callable[[Rng], Turn]:
    """What the project's pages say under a title: their first sentences."""

    def turn(rng: Rng) -> Turn:
        title, text = rng.choice(sections)
        asked = rng.choice(["What do the pages say about {}?", "Tell me about {}.", "Read me the section {}.", "{}?"])
        return asked.format(rng.choice([title, title.lower()])), text

    return turn


def _first_sentences(documents: list[str]) -> list[tuple[str, str]]:
    """(title, one or two sentences) of the sections among the documents whose beginning reads on its own."""
    found = []
    for title, text in re.findall(r"^#+ ([^\n`|]{3,40})\n\n([^\n]+)", "\n".join(documents), flags=re.M):
        sentences = re.split(r"(?<=[.]) (?=[A-Z])", text)
        answer = " ".join(sentences[: 1 if len(sentences[0]) > 90 else 2])
        if re.fullmatch(r"[A-Z].{30,320}[.]", answer):
            found.append((title, answer))
    return found


SYSTEMS = ["You are Scribe.", "You are a helpful assistant.", "Be brief and kind."]
SYSTEMS += ["You are Scribe, a small model of Reflex."]


def chats(root: Path, documents: list[str]) -> Callable[[Rng], str]:
    """A generator of chats: one to four turns, sometimes with a greeting, a system prompt, a farewell."""
    facts, word, page = _facts(), _word(glossary(root)), _page(_first_sentences(documents))
    kinds: dict[Callable[[Rng], Turn], int] = {
        _story_turn: 24, word: 14, _explained: 14, page: 14, _number: 14, _steps: 12, _schedule: 8, _places: 6,
        _copy: 10, lambda rng: rng.choice(facts): 10, _unknown: 5, _who: 5, _greeting: 3,
    }  # fmt: skip

    def chat(rng: Rng) -> str:
        said = [turn(rng) for turn in rng.choices(list(kinds), list(kinds.values()), k=rng.choice([1, 1, 1, 2, 3]))]
        if rng.random() < 0.15:
            said.insert(0, _greeting(rng))
        if rng.random() < 0.15:
            said.append(_farewell(rng))
        system = f"{SYSTEM}{rng.choice(SYSTEMS)}{END}" if rng.random() < 0.3 else ""
        return (system + "".join(f"{USER}{q}{END}{ASSISTANT}{a}{END}" for q, a in said)).removesuffix(END)

    return chat


def _note(words: list[tuple[str, str]]) -> Callable[[Rng], str]:
    """A paragraph that explains a few words."""

    def note(rng: Rng) -> str:
        chosen = rng.sample(words, rng.randint(2, 5))
        return " ".join(f"{word[0].upper() + word[1:]}: {meaning}." for word, meaning in chosen)

    return note


# --- everything -----------------------------------------------------------------------------------------------------


def written(root: Path, documents: list[str], seed: int, count: int) -> Iterator[str]:
    """`count` generated documents: mostly chats, which quote pages in `documents`, some stories, some notes."""
    rng = Rng(seed)
    kinds = {chats(root, documents): 68, story: 24, _note(glossary(root) + list(EXPLAINED.items())): 8}
    for kind in rng.choices(list(kinds), list(kinds.values()), k=count):
        yield kind(rng)


def split(documents: list[str], share: float) -> tuple[list[str], list[str]]:
    """Documents to learn from, and about `share` of them held out: always the same, whatever else there is."""

    def place(document: str) -> float:
        return int.from_bytes(sha256(document.encode()).digest()[:4]) / 2**32

    return [d for d in documents if place(d) >= share], [d for d in documents if place(d) < share]
