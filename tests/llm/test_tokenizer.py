"""The tokenizer of a model directory: a small byte-level one, built here."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from reflex_runtime.core.errors import ConfigError, TooLarge
from reflex_runtime.llm.engine.chat_template import _compile
from reflex_runtime.llm.engine.llm_engine import LLMEngine
from reflex_runtime.llm.engine.tokenizer import Conversation, HFTokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "der schnelle braune Fuchs springt über den faulen Hund"] * 20
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {% if loop.index > 8 %}{% break %}{% endif %}
[{{ message['role'] }}] {{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}
[assistant] {% generation %}{% endgeneration %}
{% endif %}"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.save(str(tmp_path / "tokenizer.json"))
    settings(tmp_path)
    return tmp_path


def settings(root: Path, **changes: Any) -> None:
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE, **changes}
    kept = {key: value for key, value in values.items() if value is not None}
    (root / "tokenizer_config.json").write_text(json.dumps(kept))


def refusal(root: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        HFTokenizer.load(root)
    return caught.value.message.replace(str(root), "ROOT")


TEXTS = ["", "the quick fox", "  spaces  and\nlines\t", "Straße über 東京 🤖👩‍👩‍👧 é", "<s> is no marker here </s>"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_a_prompt_begins_as_the_model_wants(root: Path, text: str) -> None:
    tokenizer = HFTokenizer.load(root)
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert all(0 <= token < tokenizer.vocab_size == 320 for token in ids)
    plain = text.replace("<s>", "").replace("</s>", "")  # special tokens are left out
    assert tokenizer.decode(ids) == plain


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_same_text_and_never_half_a_character(root: Path, text: str) -> None:
    tokenizer = HFTokenizer.load(root)
    feed, ids = tokenizer.stream().feed, tokenizer.encode(text)
    pieces = [feed(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("�" in piece for piece in pieces)
    assert "🤖" not in text or "" in pieces  # its bytes are several tokens here


def test_a_stream_survives_bytes_that_make_no_character(tmp_path: Path) -> None:
    """A byte that is a character alone is part of none beside others, and what was shown cannot be taken back."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)} | {"▁a": 257, "b": 258}
    core = Core(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HFTokenizer.load(tmp_path)
    feed = tokenizer.stream().feed
    said = "".join(feed(token) for token in (258, 1 + ord("m"), 1 + 0xE4, 1 + 0xE5, 258, 257, 1 + 10, 258))
    assert said.startswith("bm")
    assert said.endswith("b a\nb")
    rng = random.Random(3)
    for _ in range(300):
        feed = tokenizer.stream().feed
        for _ in range(60):
            feed(rng.randrange(len(vocab)))


def test_streams_are_independent(root: Path) -> None:
    tokenizer = HFTokenizer.load(root)
    robot = tokenizer.encode("🤖")
    one, other = tokenizer.stream().feed, tokenizer.stream().feed
    held = [one(token) for token in robot[:-1]]
    assert "".join(other(token) for token in robot) == "🤖"
    assert "".join([*held, one(robot[-1])]) == "🤖"


def test_one_token_is_shown_as_text(root: Path) -> None:
    tokenizer = HFTokenizer.load(root)
    ids = tokenizer.encode("the fox")
    assert "".join(map(tokenizer.token, ids)) == "<s>the fox"
    assert tokenizer.token(10**6) == ""


def test_a_leading_space_of_a_sentencepiece_token_is_kept(tmp_path: Path) -> None:
    core = Core(models.BPE(vocab={"▁the": 0, "▁": 1, "the": 2}, merges=[]))
    core.decoder = decoders.Metaspace()
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HFTokenizer.load(tmp_path)
    assert [tokenizer.token(id) for id in range(3)] == [" the", " ", "the"]
    feed = tokenizer.stream().feed
    assert [feed(id) for id in (2, 0, 2)] == ["the", " the", "the"]
    feed = tokenizer.stream().feed
    assert [feed(id) for id in (0, 0)] == ["the", " the"]  # the text's first space is the model's, not the text's
    for prompt in ([0], [2], [0, 2] * 50):
        feed = tokenizer.stream(prompt).feed  # it goes on: what it says is put behind the prompt as it is
        assert [feed(id) for id in (0, 2)] == [" the", "the"]


def test_a_stream_finishes_the_character_that_its_prompt_began(root: Path) -> None:
    tokenizer = HFTokenizer.load(root)
    robot = tokenizer.encode("🤖")
    feed = tokenizer.stream(robot[:-1]).feed
    assert [feed(robot[-1]), feed(tokenizer.encode("a")[-1])] == ["🤖", "a"]


@pytest.mark.parametrize(("flag", "first"), [(True, [0]), (False, []), (None, [0])])
def test_the_settings_decide_whether_a_beginning_is_added(root: Path, flag: bool | None, first: list[int]) -> None:
    settings(root, add_bos_token=flag)
    tokenizer = HFTokenizer.load(root)
    word = tokenizer.encode("fox")
    assert word[: len(first)] == first
    assert tokenizer.decode(word) == "fox"
    assert len(word) - len(first) == len([token for token in word if token])


def test_a_beginning_is_added_once_where_the_file_has_no_rule_for_it(root: Path) -> None:
    core = Core.from_file(str(root / "tokenizer.json"))
    core.post_processor = None
    core.enable_truncation(2)
    core.enable_padding(length=50)
    core.save(str(root / "tokenizer.json"))
    assert 0 not in HFTokenizer.load(root).encode("fox")
    settings(root, add_bos_token=True)
    ids = HFTokenizer.load(root).encode("the quick brown fox")
    assert ids.count(0) == 1
    assert HFTokenizer.load(root).decode(ids) == "the quick brown fox"  # stored truncation and padding are training's


def test_what_ends_an_answer_is_gathered_from_all_files(root: Path) -> None:
    assert HFTokenizer.load(root).eos_token_ids == {1}
    (root / "config.json").write_text('{"eos_token_id": 7}')
    assert HFTokenizer.load(root).eos_token_ids == {1, 7}
    (root / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert HFTokenizer.load(root).eos_token_ids == {1, 8, 9}
    (root / "tokenizer_config.json").unlink()
    assert HFTokenizer.load(root).eos_token_ids == {8, 9}


def test_a_conversation_is_written_as_the_template_says(root: Path) -> None:
    tokenizer = HFTokenizer.load(root)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    ids = tokenizer.chat(Conversation([{"role": "system", "content": " be kind"}, {"role": "user", "content": parts}]))
    shown = "".join(map(tokenizer.token, ids))
    assert shown == "<s>[system] be kind\n[user] one\ntwo\n[assistant] "
    assert ids.count(0) == 1  # the template wrote it, nobody adds a second


WHITESPACE = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m | tojson }}\n {%- else %}\n"
    "<{{ m['content'] }}> {{ strftime_now('%Y') }}\n{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, WHITESPACE])
def test_a_conversation_has_the_ids_that_transformers_gives_it(root: Path, template: str) -> None:
    import transformers

    settings(root, chat_template=template, eos_token="</s>")
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "ü <b>"}, {"role": "a", "content": "z"}]
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(root)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert HFTokenizer.load(root).chat(Conversation(messages)) == expected


TOOL_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.x }}</tool_call>"
    "{% endfor %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<no thoughts>{% endif %}"
)


def test_tools_calls_and_variables_have_the_ids_that_transformers_gives_them(root: Path) -> None:
    import transformers

    settings(root, chat_template=TOOL_TEMPLATE, eos_token="</s>")
    call = {"id": "1", "type": "function", "function": {"name": "move", "arguments": {"x": 4}}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}]
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(root)
    expected = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    tokenizer = HFTokenizer.load(root)
    assert tokenizer.chat(Conversation(messages, tools, {"enable_thinking": False})) == expected
    assert tokenizer.chat(Conversation(messages, tools)) != expected
    assert tokenizer.chat(Conversation(messages, more={"enable_thinking": False})) != expected
    assert tokenizer.tool_format is None  # it writes calls in a form of its own


def test_a_prompt_that_is_too_long_is_told_before_all_of_it_is_tokenised(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, seen = HFTokenizer.load(root), []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda text, special: (seen.append(len(text)), encode(text, special))[1])
    long = "the quick brown fox " * 50_000
    with pytest.raises(TooLarge, match="context holds 100 tokens, and the prompt has more"):
        tokenizer.encode(long, 100)
    assert sum(seen) < 10_000
    with pytest.raises(TooLarge, match="context holds 100 tokens"):
        tokenizer.chat(Conversation([{"role": "user", "content": long}]), most=100)
    most = len(encode(long, True))
    assert len(tokenizer.encode(long, most)) == most  # what fits to the last token is not refused
    monkeypatch.setattr("reflex_runtime.llm.engine.tokenizer._LIKELY", 1)
    monkeypatch.setattr("reflex_runtime.llm.engine.tokenizer._PIECE", 10)
    text = "the quick brown fox " * 40
    most = len(encode(text, True))
    assert len(text) > most
    assert len(tokenizer.encode(text, most)) == most  # cuts through words do not count
    monkeypatch.undo()
    assert len(tokenizer.encode("fox " * 199, 100)) > 100  # short enough: who asked for it counts


def test_a_template_may_stand_in_its_own_file_or_among_several(root: Path) -> None:
    named = [{"name": "tool", "template": "tool"}, {"name": "default", "template": "plain"}]
    settings(root, chat_template=named)
    hello = [{"role": "user", "content": "hello"}]
    tokenizer = HFTokenizer.load(root)
    assert tokenizer.decode(tokenizer.chat(Conversation(hello))) == "plain"
    (root / "chat_template.jinja").write_text("own file")
    assert tokenizer.decode(HFTokenizer.load(root).chat(Conversation(hello))) == "own file"


def test_a_template_runs_in_a_sandbox(root: Path) -> None:
    hello = [{"role": "user", "content": "hello"}]
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        settings(root, chat_template=template)
        with pytest.raises(ConfigError, match="chat template: SecurityError"):
            HFTokenizer.load(root).chat(Conversation(hello))


def test_messages_a_template_cannot_take_are_refused(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = HFTokenizer.load(root)
    for messages, message in [
        ([{"content": "x"}], r"messages\[0\].role=None: must be a text"),
        (["x"], r"messages\[0\].role=None"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: must be a text or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content: every part must be"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"messages\[0\].content: every part must be"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tokenizer.chat(Conversation(messages))  # type: ignore[arg-type]
    settings(root, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="the chat template refuses them: roles must alternate"):
        HFTokenizer.load(root).chat(Conversation([{"role": "user", "content": "x"}]))
    settings(root, chat_template=None)
    caplog.set_level("INFO", "reflex.server")
    with pytest.raises(ConfigError, match=r"the model has no chat template in .*; /v1/completions takes a prompt"):
        HFTokenizer.load(root).chat(Conversation([{"role": "user", "content": "x"}]))
    assert "messages are refused: the model has no chat template in" in caplog.text


@pytest.mark.timing  # time
def test_a_long_text_takes_time_in_proportion(root: Path) -> None:
    tokenizer = HFTokenizer.load(root)

    def seconds(text: str) -> float:
        best = []
        for _ in range(3):
            start = time.thread_time()  # of the CPU, whoever else has it in between
            tokenizer.encode(text)
            best.append(time.thread_time() - start)
        return min(best)

    for unit in ("the quick brown fox ", "a", "\n", "東"):  # with and without places to split at
        short, long = unit * (20_000 // len(unit)), unit * (200_000 // len(unit))
        assert seconds(long) < 40 * max(seconds(short), 0.002), unit  # 10 times the text; quadratic would be 100


def test_missing_and_broken_files_are_named(root: Path) -> None:
    settings(root, chat_template="{% if %}")
    assert refusal(root).startswith("ROOT/tokenizer_config.json: chat template, line 1: Expected an expression")
    settings(root, chat_template=5)
    assert refusal(root) == "ROOT/tokenizer_config.json: chat_template: must be a Jinja template, found int"
    settings(root, add_bos_token="yes")
    assert refusal(root) == 'ROOT/tokenizer_config.json: add_bos_token: found "yes", expected true or false'
    (root / "tokenizer_config.json").write_text("{")
    assert refusal(root).startswith("ROOT/tokenizer_config.json: is not JSON")
    settings(root)
    (root / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert refusal(root).startswith('ROOT/generation_config.json: eos_token_id: found "x", expected a token id')
    (root / "generation_config.json").unlink()
    (root / "tokenizer.json").write_text("{}")
    assert refusal(root).startswith("ROOT/tokenizer.json: is not a tokenizer: ")
    (root / "tokenizer.json").unlink()
    told = refusal(root)
    assert told.startswith("ROOT/tokenizer.json: not found, expected the model's tokenizer; copy it, too, or write")
    with pytest.raises(ConfigError, match="none: not found, expected the directory of a model"):
        LLMEngine(root / "none")


def test_a_template_that_does_not_end_is_refused_at_the_load(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on the event loop, where it stops every caller."""
    monkeypatch.setattr("reflex_runtime.llm.engine.tokenizer.TRIAL_S", 0.5)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (root / "chat_template.jinja").write_text(loops)
    with pytest.raises(ConfigError, match=r"chat template takes over 0\.5 s for one short message"):
        HFTokenizer.load(root)
    for thread in threading.enumerate():
        if thread.name == "reflex-try-tokenizer":
            thread.join(60.0)
            assert not thread.is_alive()


def test_a_template_that_refuses_the_first_words_is_loaded(root: Path) -> None:
    (root / "chat_template.jinja").write_text("{{ raise_exception('a system prompt is missing') }}")
    with pytest.raises(ConfigError, match="a system prompt is missing"):
        HFTokenizer.load(root).chat(Conversation([{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 1 < 2 < 3 }} {{ 'a' in {'a': 1, 1: 2} }} {{ 1 not in [1] }} {{ [1] == [1.0] }}", "True True False True"),
        ("{{ [3, 1]|sort }} {{ messages|map(attribute='role')|unique|list }} {{ [2, 1]|min }}", "[1, 3] ['user'] 1"),
        ("{{ messages|selectattr('role', 'eq', 'user')|list|length }} {{ 2.5|round|int }} {{ 1 is gt 0 }}", "1 2 True"),
        ("{{ 'a' ~ 1 ~ none ~ missing ~ [1, 'b'] }}", "a1None[1, 'b']"),
        ("{{ 1 + 2.5 }} {{ [1] + [2] }} {{ 'a' + 'b' }}", "3.5 [1, 2] ab"),
        ("{{ messages|join(', ', attribute='role') }} {{ {'k': 1}|join }} {{ [1, 'b']|join('-') }}", "user k 1-b"),
        ("{{ 'abab'|replace('a', 'c', 1) }} {{ 12|replace('1', '3') }} {{ 'ab'.replace('', '-') }}", "cbab 32 -a-b-"),
        ("{{ '-'.join(['a', 'b']) }} {{ ' a '|trim }} {{ 'ab'|upper }} {{ 1|string }} {{ '<'|e }}", "a-b a AB 1 &lt;"),
        ("{{ none }} {{ true }} {{ missing }} {{ {'a': [1]}|tojson }}", 'None True  {"a": [1]}'),
    ],
)
def test_what_a_template_prints_is_as_jinja_prints_it(template: str, text: str) -> None:
    assert _compile(Path("t"), template)(messages=[{"role": "user"}]) == text


@pytest.mark.parametrize(("part", "steps_of"), [("normalizer", "normalizers"), ("decoder", "decoders")])
def test_a_part_that_makes_a_long_text_of_a_short_one_is_refused(root: Path, part: str, steps_of: str) -> None:
    file = root / "tokenizer.json"
    core = json.loads(file.read_text())

    def replacing(*lengths: int) -> None:
        steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * length} for length in lengths]
        file.write_text(json.dumps(core | {part: {"type": "Sequence", steps_of: steps}}))

    replacing(8, 8)
    assert HFTokenizer.load(root).encode("a")
    for lengths in ((65,), (8, 9), (2,) * 40):
        replacing(*lengths)
        with pytest.raises(ConfigError, match=f"^{file}: {part}: makes over 64 characters of one$"):
            HFTokenizer.load(root)


def test_a_text_that_a_pattern_gives_up_on_is_refused(root: Path) -> None:
    file = root / "tokenizer.json"
    core = json.loads(file.read_text())

    def split_by(pattern: str) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        file.write_text(json.dumps(core | {"pre_tokenizer": split}))

    split_by("(b+)+$")
    tokenizer = HFTokenizer.load(root)
    with pytest.raises(ConfigError, match=r"^the tokenizer cannot read this text: "):
        tokenizer.encode("b" * 3000 + "!")
    assert tokenizer.encode("b")
    split_by("(a+)+$")
    with pytest.raises(ConfigError, match=f"^{file}: of a short text: the tokenizer cannot read this text: "):
        HFTokenizer.load(root)


def test_a_template_may_multiply(root: Path) -> None:
    plain = "{{ 2 * 3 }}{{ '-' * 3 }}{{ ''|center(0) ~ '%d' % (7 % 10) ~ '**%s**'|format('') ~ '{:}'.format('') }}"
    (root / "chat_template.jinja").write_text(plain + "{{ messages[0].content }}")
    tokenizer = HFTokenizer.load(root)
    assert tokenizer.decode(tokenizer.chat(Conversation([{"role": "user", "content": "hi"}]))) == "6---7****hi"
