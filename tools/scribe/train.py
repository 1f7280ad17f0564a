"""Train the scribe and write it as an ordinary checkpoint. Needs torch, tokenizers and safetensors; a CPU will do.

    python train.py --out ../../src/reflex_runtime/demo/scribe

The same seed, text, versions and number of threads give the same weights, unless time runs out first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from model import Scribe, Shape
from safetensors.torch import load_file, save_file
from text import END, SPECIAL, pages, split, written
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer_of(documents: list[str], size: int) -> Tokenizer:
    """Byte-level pairs, so that every text can be written; digits alone, so that numbers can be learned."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


class Windows:
    """Documents behind one another, and batches of windows that begin where a document begins."""

    def __init__(self, tokenizer: Tokenizer, documents: list[str]) -> None:
        ids = [encoding.ids for encoding in tokenizer.encode_batch([document + END for document in documents])]
        self.ids = torch.tensor([i for document in ids for i in document])
        self.starts = torch.tensor([0, *[len(document) for document in ids]])[:-1].cumsum(0)

    def batch(self, starts: Tensor, length: int) -> Tensor:
        """[len(starts), length + 1]; the text is a ring."""
        return self.ids[(starts[:, None] + torch.arange(length + 1)) % len(self.ids)]

    def sample(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        return self.batch(self.starts[torch.randint(len(self.starts), (rows,), generator=generator)], length)

    def in_order(self, rows: int, length: int, most: int) -> Iterator[Tensor]:
        """The text once from its beginning, or as much of it as `most` batches hold."""
        starts = torch.arange(0, len(self.ids), length)
        yield from (self.batch(some, length) for some in starts.split(rows)[:most])


def loss_of(model: Scribe, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out(model: Scribe, windows: Windows, length: int = 512) -> float:
    """Mean loss per token in nats."""
    losses = [loss_of(model, tokens) for tokens in windows.in_order(16, length, 12)]
    return float(torch.stack(losses).mean())


Sources = dict[str, Windows]


def train(model: Scribe, learn: Sources, check: Sources, args: argparse.Namespace) -> dict[str, float]:
    """Muon for the matrices inside, AdamW for the rest; both rates rise for 40 steps and fall linearly to next to
    nothing at the last step, or when the time is over.

    The last tenth of the way takes windows eight times as long, so that far positions have been seen.
    """
    inner = [w for n, w in model.named_parameters() if w.ndim == 2 and "embed" not in n]
    rest = [w for n, w in model.named_parameters() if w.ndim != 2 or "embed" in n]
    optimisers = [
        torch.optim.Muon(inner, lr=args.rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    generator = torch.Generator().manual_seed(args.seed)
    began = time.monotonic()
    step, way = 0, 0.0
    while way < 1.0:
        rate = args.rate * min((step + 1) / 40, 1.02 - way)
        kind = "pages" if torch.rand((), generator=generator) < args.pages else "written"
        long = 8 if way >= 0.9 else 1
        loss = loss_of(model, learn[kind].sample(args.rows // long, args.length * long, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        way = max(step / args.steps, (time.monotonic() - began) / (60 * args.minutes))
        if step % 100 == 0 or way >= 1.0:
            figures = {name: held_out(model, windows) for name, windows in check.items()}
            told = ", ".join(f"{name} {loss:.3f}" for name, loss in figures.items())
            print(f"step {step}, {time.monotonic() - began:.0f} s, held out: {told}", flush=True)
            if args.out:
                save(model, args.tokenizer, args.out)
    return figures


def stored(weight: Tensor) -> Tensor:
    """Matrices in 8 bits, and no finer than 1/128: few different numbers are what a wheel compresses well."""
    return (weight * 128).round().div(128).to(torch.float8_e4m3fn) if weight.ndim == 2 else weight.bfloat16()


def save(model: Scribe, tokenizer: Tokenizer, out: Path) -> None:
    """The directory that `transformers` would write."""
    out.mkdir(parents=True, exist_ok=True)
    shape, end = model.shape, tokenizer.token_to_id(END)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head, "hidden_act": "silu", "rms_norm_eps": shape.eps, "rope_theta": shape.theta,
        "max_position_embeddings": shape.positions, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "initializer_range": 0.02, "use_cache": True, "bos_token_id": None, "eos_token_id": end,
        "pad_token_id": end,
    }  # fmt: skip
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "chat_template": TEMPLATE,
        "model_max_length": shape.positions, "clean_up_tokenization_spaces": False, "add_bos_token": False,
    }  # fmt: skip
    generation = {"eos_token_id": end, "pad_token_id": end, "do_sample": True, "temperature": 0.7}
    for name, content in [("config", config), ("tokenizer_config", about), ("generation_config", generation)]:
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {name: stored(weight.detach()).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most")
    parser.add_argument("--start", type=Path, help="a directory to go on from, with its tokenizer")
    parser.add_argument("--rows", type=int, default=16, help="windows of a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--pages", type=float, default=0.25, help="share of batches from the project's own pages")
    parser.add_argument("--documents", type=int, default=40_000, help="stories and chats to generate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    learn_pages, check_pages = split(pages(ROOT), 0.05)
    random.Random(args.seed).shuffle(learn_pages)
    learn_written = list(written(ROOT, learn_pages, args.seed, args.documents))
    if args.start:
        args.tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        args.tokenizer = tokenizer_of(learn_pages * 2 + learn_written[:2000], Shape().vocab)
    sources = {"pages": learn_pages, "written": learn_written}
    learn = {name: Windows(args.tokenizer, documents) for name, documents in sources.items()}
    check = {
        "pages": Windows(args.tokenizer, check_pages),
        "written": Windows(args.tokenizer, list(written(ROOT, learn_pages, args.seed + 1, 1000))),
    }
    model = Scribe(Shape())
    if args.start:
        model.load_state_dict(load_file(args.start / "model.safetensors"))
    tokens = {name: len(windows.ids) for name, windows in learn.items()}
    print(sum(weight.numel() for weight in model.parameters()), "parameters; tokens to learn from:", tokens)
    figures = train(model, learn, check, args)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
