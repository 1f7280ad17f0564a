"""What of tokens is text, for tokenizers of three kinds: as it streams, whole, and cut anywhere, it is the same."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from reflex_runtime.ipc.messages import SamplingParams, ScoredToken
from reflex_runtime.ipc.streams import OutputStream
from reflex_runtime.llm.api.answers import Answer, ReplyContext
from reflex_runtime.llm.api.completions import echoes
from reflex_runtime.llm.api.requests import chat, completion
from reflex_runtime.llm.engine.detokenizer import overlap
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.tokenizer import HFTokenizer

KINDS = ("byte-level", "byte-fallback", "metaspace")
SPECIAL = ["<s>", "</s>", "<|im_end|>", "<｜begin▁of▁sentence｜>"]
ADDED = ["<tool>", "<für>", "\n\n", "   ", "<0xZZ>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]  # special in the file, text all the same
CLASSES = {
    "letters": "the quick brown fox",
    "accents": "Straße über naïve é e\u0301",
    "digits": "1234.5 0x7F ٣٤",
    "spaces": "  two\t\ttabs\n\nlines \u00a0\u2003 end ",
    "punctuation": '{"a": [1, "b\\n"]} <b> [x] ▁ Ġ',
    "cjk": "東京 日本語 한국어 ꙮꙮꙮ",
    "emoji": "🤖👩‍👩‍👧🇩🇪",
    "control": "a\x00b\x7f\x85\ufeff\u2028\ufffd",
}


@cache
def tokenizer(kind: str) -> HFTokenizer:
    """With few merges, so that most characters are several tokens."""
    words = ["th", "he", "qu", "fo"]
    if kind == "byte-level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab, merges = alphabet + words + ["Ġt", "ðŁ"], [("t", "h"), ("h", "e"), ("Ġ", "t"), ("ð", "Ł")]
        core = Core(models.BPE(_numbered(vocab), merges))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    elif kind == "byte-fallback":
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        vocab = ["<unk>", *bytes_, "▁", *map(chr, range(97, 123)), "▁t", "▁▁", *words]
        core = Core(models.BPE(_numbered(vocab), [("▁", "t"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True))
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        letters = sorted(set("".join(CLASSES.values())) - {" "} | {"▁"})
        vocab, merges = ["<unk>", *letters, "▁t", *words], [("▁", "t"), ("t", "h")]
        core = Core(models.BPE(_numbered(vocab), merges, unk_token="<unk>"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL + MARKS])
    with TemporaryDirectory() as root:
        core.save(f"{root}/tokenizer.json")
        return HFTokenizer.load(Path(root))


def _numbered(vocab: list[str]) -> dict[str, int]:
    return {text: id for id, text in enumerate(dict.fromkeys(vocab))}


def streamed(kind: str, ids: list[int], prompt: list[int], **params: Any) -> str:
    """What the outputs of an answer say together."""
    sequence = Sequence(prompt, SamplingParams(max_tokens=max(1, len(ids)), **params), tokenizer(kind))
    said = [sequence.append(ScoredToken(id)).text for id in ids]
    assert "".join(said) == sequence.text
    return sequence.text


def check(kind: str, ids: list[int], cuts: range | None = None) -> str:
    """Every cut into a prompt and an output gives the text of all, and the bytes that logprobs tell are the output."""
    tokens = tokenizer(kind)
    whole = tokens.decode(ids)
    for cut in cuts or range(len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        said = streamed(kind, output, prompt)
        before = tokens.decode(prompt, whole=False)
        assert before + said == whole, (cut, prompt, output)
        began = b"".join(map(tokens.piece, prompt)).decode(errors="replace").endswith("\ufffd")
        if before and not began:
            assert b"".join(map(tokens.piece, output)).decode(errors="replace") == said
    return whole


def special(tokens: HFTokenizer, id: int) -> bool:
    return tokens.token(id) in SPECIAL


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_text_streams_as_it_is_decoded_and_comes_back(kind: str, name: str) -> None:
    text, tokens = CLASSES[name], tokenizer(kind)
    ids = tokens.encode(text)
    whole = check(kind, ids)
    if kind == "byte-level" or ("<unk>" not in map(tokens.token, ids) and name in ("letters", "digits")):
        assert whole == text
    expected = tokens._core.decode(ids, skip_special_tokens=True)
    assert whole == expected  # of the library; of an added token that is no ASCII it gives U+FFFD


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [*SPECIAL, *ADDED, *MARKS])
def test_added_tokens_are_text_and_special_ones_are_none_beside_every_class(kind: str, token: str) -> None:
    tokens = tokenizer(kind)
    id = tokens._core.token_to_id(token)
    shown = "" if token in SPECIAL else token
    for text in CLASSES.values():
        ids = tokens.encode(text)
        for at in {0, 1, len(ids) // 2, len(ids)}:
            whole = check(kind, [*ids[:at], id, *ids[at:]], range(max(0, at - 5), min(len(ids), at + 3) + 1))
            assert shown in whole
            if shown == "":
                assert whole == tokens.decode(ids)
    assert tokens.token(id) == token
    assert (tokens.piece(id) == b"") == (token in SPECIAL)


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_stream_as_they_are_decoded_and_nothing_is_missing(kind: str) -> None:
    tokens, rng = tokenizer(kind), random.Random(7)
    for _ in range(40):
        ids = [rng.randrange(tokens.vocab_size) for _ in range(24)]
        whole = check(kind, ids)
        pieces = [tokens.piece(id) for id in ids]
        assert all(piece or special(tokens, id) for id, piece in zip(ids, pieces, strict=True))
        assert len(whole.encode()) >= sum(map(len, pieces)) - 3  # of which a first word may lose its spaces


def test_a_prompt_that_ends_in_a_run_of_bytes_says_nothing_in_the_answer() -> None:
    """Reported of Gemma, Llama 2 and Mistral: it began with U+FFFD, or was empty and billed."""
    tokens = tokenizer("byte-fallback")
    for prompt in ("ꙮꙮꙮ", "the ꙮ", "🤖"):
        before = tokens.encode(prompt)
        for text in ("the fox", "ꙮ", "é"):
            assert streamed("byte-fallback", tokens.encode(text), before) == f" {text}"


def test_an_answer_that_is_cut_inside_of_a_character_tells_that_it_is() -> None:
    tokens = tokenizer("byte-level")
    robot = tokens.encode("🤖")
    assert streamed("byte-level", robot[:-1], tokens.encode("a")) == "\ufffd"
    assert streamed("byte-level", robot[-1:], robot[:-1]) == "🤖"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_text_ends_it_wherever_tokens_end(kind: str, include: bool) -> None:
    tokens = tokenizer(kind)
    text = "the <tool>fox über</s> \n\nthe<think> 東京 end"
    ids, prompt = tokens.encode(text), tokens.encode("the")
    plain = streamed(kind, ids, prompt)
    stops = [plain[at : at + size] for at in range(len(plain)) for size in (1, 2, 5)]
    for stop in stops:
        sequence = Sequence(prompt, SamplingParams(1000, stop=(stop, "never"), include_stop=include), tokens)
        shown = ""
        for id in ids:
            output = sequence.append(ScoredToken(id))
            assert output.held < max(len(stop), len("never"))
            shown += output.text
            if output.finish is not None:
                break
        assert shown == plain[: plain.index(stop) + len(stop) * include], stop
        assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_that_spells_a_special_token_ends_it(kind: str) -> None:
    tokens = tokenizer(kind)
    end, prompt = tokens._core.token_to_id("<|im_end|>"), tokens.encode("the")
    ids = [*tokens.encode("fox"), end, *tokens.encode("fox")]
    plain = streamed(kind, ids[: ids.index(end)], prompt)
    for include in (False, True):
        sequence = Sequence(prompt, SamplingParams(1000, stop=("<|im_end|>", "x<"), include_stop=include), tokens)
        outputs = [sequence.append(ScoredToken(id)) for id in islice(ids, ids.index(end) + 1)]
        assert (outputs[-1].finish, sequence.text) == ("stop", plain + "<|im_end|>" * include)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_logprobs_join_to_the_text(kind: str) -> None:
    """Of parts of characters, of alternatives and of special tokens, too; those are null."""
    tokens, prompt = tokenizer(kind), tokenizer(kind).encode("the")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    reply = ReplyContext("1", chat(json.dumps(body).encode()), [OutputStream(None, 1)], tokens)
    for text in CLASSES.values():
        ids = [*tokens.encode(text), tokens._core.token_to_id("<|im_end|>"), *tokens.encode("<think>fox")]
        sequence, answer = Sequence(prompt, SamplingParams(len(ids)), tokens), Answer(reply, chat=True)
        answer.add(0, [sequence.append(ScoredToken(id, -1.0, ((id, -1.0),))) for id in ids])
        choice = json.loads(answer.end())["choices"][0]
        said = choice["message"]["content"]
        for each in (choice["logprobs"]["content"], [one["top_logprobs"][0] for one in choice["logprobs"]["content"]]):
            assert bytes(byte for one in each for byte in one["bytes"] or ()).decode() == said
            told = [one["token"] for one in each if one["bytes"] is None]
            assert told == [token for token in map(tokens.token, ids) if token in SPECIAL]


@pytest.mark.parametrize("kind", KINDS)
def test_an_echo_and_its_offsets_are_of_the_text(kind: str) -> None:
    """Wherever the prompt is cut: a character that it begins is the answer's."""
    tokens = tokenizer(kind)
    for text in CLASSES.values():
        ids = [tokens._core.token_to_id("<s>"), *tokens.encode(text)]
        whole = tokens.decode(ids)
        for cut in range(1, len(ids), 1 + len(ids) // 16):
            body = {"model": "m", "prompt": ids[:cut], "echo": True, "logprobs": 0}
            asked, scored = completion(json.dumps(body).encode()), [ScoredToken(id, -1.0) for id in ids[:cut]]
            before = asyncio.run(echoes(asked, tokens))
            stream = OutputStream(None, cut)
            stream.prompt_scores = scored[1:]
            reply = ReplyContext("1", asked, [stream], tokens, echoes=before, firsts=scored[:1])
            answer = Answer(reply, chat=False)
            sequence = Sequence(ids[:cut], SamplingParams(len(ids) - cut), tokens)
            answer.add(0, [sequence.append(ScoredToken(id, -1.0)) for id in ids[cut:]])
            choice = json.loads(answer.end())["choices"][0]
            assert choice["text"] == whole
            ends = [len(tokens.decode(ids[:at], whole=False)) for at in range(len(ids))]
            assert choice["logprobs"]["text_offset"] == ends


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_a_form_fixes_is_split_as_the_tokenizer_does(kind: str) -> None:
    tokens = tokenizer(kind)
    for told in (*CLASSES.values(), '{"a": <think>', "the", " the", "\n"):
        text = told.replace("▁", "_")  # a space to some
        ids = tokens.split(text)
        if kind != "metaspace" or all(character in tokens._core.get_vocab() for character in text):
            assert b"".join(map(tokens.piece, ids)) == text.encode()
    assert "".join(map(tokens.token, tokens.split("fo<think>fo"))) == "fo<think>fo"
    assert tokens._core.token_to_id("<think>") in tokens.split("fo<think>fo")


@pytest.mark.parametrize("kind", KINDS)
def test_forms_know_tokens_by_the_same_bytes(kind: str) -> None:
    tokens = tokenizer(kind)
    tokens.eos_token_ids = frozenset({tokens._core.token_to_id("</s>")})
    vocabulary = tokens.vocabulary()
    for id in range(tokens.vocab_size):
        if not special(tokens, id) and tokens.piece(id) != b"\xff":  # which is no part of any text
            assert vocabulary.decode_bytes([id]) == tokens.piece(id), tokens.token(id)


def test_overlap_is_the_beginning_of_a_mark_at_the_end() -> None:
    assert [overlap(text, "<think>") for text in ("", "a<", "<thin", "<think>", "< t")] == [0, 1, 5, 0, 0]
