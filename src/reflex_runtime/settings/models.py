"""The settings of `reflex serve` for language models."""

from __future__ import annotations

from dataclasses import dataclass

from reflex_runtime.settings.declare import again, option
from reflex_runtime.settings.server import ServerConfig


@dataclass(frozen=True)
class LLMServeConfig(ServerConfig):
    """The settings of `reflex serve MODEL_DIR`."""

    served_model_name: str = option(
        "", "model name that clients use and /v1/models lists; by default the directory's name", metavar="NAME",
        group="what is served",
    )
    lora: tuple[str, ...] = option(
        (), "a LoRA adapter (PEFT directory): requests ask for MODEL:NAME, and share steps with those that ask for the "
        "model itself",
        metavar="NAME=DIR", repeat=True,
    )
    device: str = option(
        "auto", "where the model runs; auto is a GPU if PyTorch finds one, else the CPU",
        choices=("auto", "cpu", "cuda")
    )
    runner: str = option(
        "auto", "library that runs the model; auto is OpenVINO on a CPU and PyTorch on a GPU",
        choices=("auto", "openvino", "torch")
    )
    dtype: str = option(
        "auto",
        "number format of the computation; auto is the checkpoint's own if the machine is fast at it",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = option(
        "none",
        "round the weights, on OpenVINO: int8 is a quarter of float32 and close to it, int4 half of that and coarse",
        choices=("none", "int8", "int4"),
    )
    cache_dir: str = option(
        "", "where models converted to OpenVINO are kept; by default in .reflex in the model's directory, or in the "
        "user's cache directory where that cannot be written",
        metavar="DIR",
    )
    threads: int = option(0, "CPU threads of a step; 0 is the runner's default", low=0, high=1024)
    max_model_len: int = option(
        0, "most tokens of one request, prompt and output; 0 is the model's own limit", low=0, high=1 << 24
    )
    workers: int = option(
        0, "runtime processes, each with its own copy of the model; 0 runs it in the server's process",
        low=0, high=64
    )
    max_body_bytes: int = again(ServerConfig, "max_body_bytes", 4 * 2**20, group="listening and trust")
    max_gap_ms: float = option(
        0.0,
        "longest gap between two tokens of an answer: prompts are read in steps that keep it, and requests wait while "
        "one more answer would break it; 0 is 100 ms or eight times the fixed part of a step, and nobody waits",
        low=0, high=60_000, unit="ms",
        group="batching",
    )
    max_num_batched_tokens: int = option(
        2048, "most tokens in a step; it bounds the memory of a step", low=1, high=1 << 20
    )
    max_num_seqs: int = option(256, "most requests that generate at the same time", low=1, high=1 << 16)
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step, so that others fit beside it; 0 is no limit of its own",
        low=0, high=1 << 20,
    )
    speculate: str = option(
        "off",
        "ngram guesses the next tokens of an answer by what the prompt or the answer said before, and computes guesses "
        "beside the next token where that gives more tokens a second; answers stay the same",
        choices=("off", "ngram"),
    )
    default_tiers: bool = option(
        False,
        "a request that names no priority is urgent if it streams, and background if it holds several prompts; else "
        "all are default",
    )
    max_queue: int = option(1000, "most waiting requests; beyond it 429", low=1, high=1_000_000, group="queue")
    max_queued_tokens: int = option(
        1_000_000, "most prompt tokens of waiting requests; beyond it 429", low=1, high=1_000_000_000, unit="tokens"
    )
    block_size: int = option(
        0, "tokens in a block of the cache; 0 is the runner's default", low=0, high=4096,
        group="the cache",
    )
    kv_cache_gb: float = option(
        0.0,
        "memory for keys and values in each process; 0 is 1 GiB",
        low=0, high=100_000, unit="GB",
    )
    prefix_caching: bool = option(True, "the common beginning of prompts is computed once")
    watchdog_s: float = option(
        60.0,
        "a step that runs longer ends with an error for its callers; after twice the time the server ends; 0 is off",
        low=0, high=3600, unit="s",
        group="faults and the end",
    )
    drain_timeout_s: float = option(
        30.0, "time to finish accepted requests after SIGTERM; the rest ends with an error", low=0, high=600, unit="s"
    )
    trace: str = option(
        "", "write every step to FILE as a JSON line; read it with reflex trace", metavar="FILE",
        group="trace",
    )
