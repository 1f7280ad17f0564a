"""A small language model with random weights, made here: no network, a moment to load."""

from __future__ import annotations

from pathlib import Path


def write_model(folder: Path, hidden: int = 128, layers: int = 2, length: int = 512, spread: float = 0.2) -> None:
    """A Llama of random weights whose tokens are bytes. spread: of the weights; with a small one outputs repeat."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    heads = max(2, hidden // 32)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        bos_token_id=257,
        eos_token_id=258,
        initializer_range=spread,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)} | {"<unk>": 256, "<s>": 257, "</s>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)
