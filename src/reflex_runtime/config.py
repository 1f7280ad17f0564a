"""The settings of the commands: frozen values, declared with `option`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import again, flag, one_line, option, validate

DEFAULT_POLICY = "default"  # the name of SOURCE; its policy is asked where a request names none
MAX_POLICIES = 32
MAX_MODELS = 16
_ORIGIN = r"\*|https?://([\w.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(:[0-9]{1,5})?"
_ZMQ_ADDRESS = r"tcp://(\*|localhost|[0-9.]{7,15}|\[[0-9a-fA-F:.]{2,45}\]):(?P<port>[0-9]{1,5})"


@dataclass(frozen=True)
class ServerConfig:
    """What both kinds of server have. Errors name flags."""

    host: str = option(
        "127.0.0.1", "address to bind; set --api-key if it is not loopback",
        group="listening and trust",
    )
    port: int = option(8000, "port to bind; 0 picks a free one", low=0, high=65535)
    api_key: str = option(
        "", "key that clients must send as Authorization: Bearer, X-Reflex-Key or x-api-key", secret=True
    )
    api_key_file: str = option("", "file that holds the key", metavar="FILE")
    allow_host: tuple[str, ...] = option(
        (), "without a key: a further host name of the server, and a site whose pages may POST; * is any",
        metavar="NAME", repeat=True, unless="api_key",
    )
    cors: tuple[str, ...] = option(
        (), "a site whose pages may ask this server and read its answers; * is any; operators' paths take no part",
        metavar="ORIGIN", repeat=True,
    )
    max_body_bytes: int = option(16 * 2**20, "largest request body; beyond it 413", low=1024, high=2**31, unit="bytes")
    max_bodies_mb: float = option(
        256.0, "memory for all request bodies together; beyond it 503 overloaded", low=1, high=1_000_000, unit="MB"
    )
    max_connections: int = option(
        4096, "most open connections; a further one closes the one that was idle for longest", low=1, high=1_000_000
    )
    idle_timeout_s: float = option(
        75.0, "a connection without a request is closed after this time", low=0.1, high=86_400, unit="s"
    )
    head_timeout_s: float = option(
        10.0, "time for the head of a request to arrive; beyond it 408", low=0.1, high=3600, unit="s"
    )
    body_timeout_s: float = option(
        60.0, "time for the body of a request to arrive; beyond it 408", low=0.1, high=3600, unit="s"
    )
    supervise: bool = option(
        True,
        "a small parent process restarts the server after a crash; off under another supervisor",
        group="faults and the end",
    )
    log_format: str = option(
        "text", "lines for people, or a JSON object a line for a log collector", choices=("text", "json")
    )
    otel: str = option(
        "", "send spans of requests and batches to this OpenTelemetry collector, over OTLP/HTTP",
        metavar="http://HOST:4318",
        group="spans",
    )
    otel_sample: float = option(
        1.0, "share of the requests that get a span, where the caller's traceparent does not decide it",
        low=0, high=1, needs="otel",
    )

    def __post_init__(self) -> None:
        validate(self)
        _check_endpoint(self.otel)
        _check_trust(self)
        for origin in self.cors:
            if not re.fullmatch(_ORIGIN, origin):
                expected = "*, or a site such as https://example.org or http://localhost:3000, without a path"
                raise ConfigError(f"--cors={one_line(origin)}: must be {expected}", field="cors")


@dataclass(frozen=True)
class ServeConfig(ServerConfig):
    """The settings of `reflex serve` for a policy."""

    provider: str = option(
        "cpu", "execution provider: cpu, cuda or an ONNX Runtime provider name; there is no silent fallback to another",
        group="what is served",
    )
    threads: int = option(1, "threads of the model per call", low=1, high=256)
    dtype: str = option(
        "stored", "type of the weights and numbers of a model in PyTorch; by default that of the file",
        choices=("stored", "float32", "bfloat16", "float16"), needs="a model in PyTorch",
    )
    compile: bool = option(
        False, "compile a model in PyTorch with torch.compile; warming up then takes minutes",
        needs="a model in PyTorch",
    )
    cuda_graphs: str = option(
        "",
        "batch sizes, 1 to 4096, to capture as CUDA graphs and to pad to (in PyTorch the steps of staged policies); "
        "without SIZES 1,2,4,8,16,32; GPU only",
        metavar="SIZES", bare="1,2,4,8,16,32",
    )
    replicas: int = option(
        1, "processes that each have a copy of the policy, behind one port; see docs/replicas.md", low=1, high=64
    )
    devices: str = option(
        "", "a replica for each device, such as cuda:0,cuda:1 or cpu,cpu", metavar="DEVICES"
    )
    robot_id: str = option("", "name of the robot this server belongs to, shown on /health")
    on_bad_action: str = option(
        "error", "for an action that is not finite: answer an error, or repeat (hold) the episode's last good action",
        choices=("error", "hold"),
    )
    policy: tuple[str, ...] = option(
        (), "a further policy: its name in requests, and its source; see docs/several-policies.md",
        metavar="NAME=SOURCE", repeat=True,
        group="several policies",
    )
    policy_a: str = option(
        "", "export of slot a; with --policy-b, two versions side by side", metavar="DIR",
        group="two versions",
    )
    policy_b: str = option("", "export of slot b", metavar="DIR")
    split: int = option(
        50, "percent of the episodes that go to a; at 100 b is loaded and warm but gets none",
        low=0, high=100, needs="policy_b", unless="ramp",
    )
    shadow_policy: str = option(
        "", "export that runs copies of requests when the device is idle; its answers are compared, not sent",
        metavar="DIR",
    )
    shadow_sample: float = option(
        0.1, "share of the requests that are copied to the shadow", low=0, high=1, needs="shadow_policy"
    )
    ramp: str = option(
        "", "b's share in percent, stage by stage, such as 5,20,50,100", metavar="PERCENTS", needs="policy_b"
    )
    ramp_every: str = option(
        "10m", "how long a stage of the ramp lasts, and how long the guard watches after a hot swap", metavar="TIME",
        needs="ramp|guard",
    )
    guard: str = option(
        "", "limits for b on a ramp, and for a new policy after a hot swap; beyond them it is rolled back",
        metavar="p99=150ms,error=1%",
    )
    ramp_evidence: bool = option(
        False, "a stage also waits until outcomes show that b is not worse than a by more than --ramp-margin",
        needs="ramp",
    )
    ramp_margin: float = option(
        5.0, "the margin, in percentage points of success", low=0.1, high=50, unit="points", needs="ramp_evidence"
    )
    max_concurrent: int = option(
        0, "most HTTP requests in progress; beyond it 429; 0 is off", low=0, high=1_000_000,
        group="listening and trust",
    )
    gr00t: str = option(
        "", "also serve clients of GR00T, on this ZeroMQ address; elsewhere than loopback only with --api-key",
        metavar="tcp://127.0.0.1:5555",
    )
    gr00t_config: str = option(
        "n1.6", "the release whose form get_modality_config has; all else is answered in the caller's own",
        choices=("n1.6", "n1.5"), needs="gr00t",
    )
    oip_grpc: str = option(
        "", "also serve OIP (Triton, KServe) over gRPC; elsewhere than loopback only with --api-key",
        metavar="HOST:PORT",
    )
    lerobot: str = option(
        "", "also serve LeRobot's asynchronous clients, over gRPC; elsewhere than loopback only with --api-key",
        metavar="HOST:PORT",
    )
    max_batch_cost_ms: float | None = option(
        None,
        "most predicted device time of a batch; larger values favour throughput, smaller ones tail latency; by default "
        "100, or eight times the fixed part of the model's time if that is more (twice beside other policies)",
        low=10, high=10_000, unit="ms",
        group="batching",
    )
    batch_timeout_ms: float | None = option(
        None,
        "longest time that a free device waits for clients whose next request is due; by default as long as a batch "
        "may take; 0: it never waits",
        low=0, high=1000, unit="ms",
    )
    max_batch_size: int = option(256, "most requests in a batch, whatever their cost", low=1, high=4096)
    cost_model: str = option(
        "affine",
        "how batch time is predicted: affine learns a fixed and a marginal part, median takes measured time / size",
        choices=("affine", "median"),
    )
    brief_ms: float = option(
        0.3,
        "batches that are proven to be this brief run on the event loop, without a hand-over to the device thread; "
        "0: none do",
        low=0, high=5, unit="ms",
    )
    max_batch: int = option(1, "ignored, accepted for old scripts; use --max-batch-cost-ms", low=1, high=100_000)
    deadline_ms: float = option(
        0.0, "time limit for requests that have none; 0 is none", low=0, high=600_000, unit="ms",
        group="deadlines and queue",
    )
    max_queue: int = option(1000, "most waiting requests per slot; beyond it 503 queue_full", low=1, high=100_000)
    max_queue_s: float = option(
        2.0,
        "most waiting predicted device time per slot, without background; beyond it 503 queue_full; 0 is no limit",
        low=0, high=3600, unit="s",
    )
    latest_only: bool = option(
        False, "a newer request of the same robot replaces its waiting older one (409 superseded)"
    )
    max_in_flight_per_client: int = option(
        0, "most unanswered requests per robot; beyond it 429 client_at_capacity; 0 is off", low=0, high=100_000
    )
    slo: str = option("", "latency objective, such as p99=150ms", metavar="pNN=MSms")
    slo_mode: str = option(
        "log_only", "when the objective is violated: log it, answer 503, or shrink the budget",
        choices=("log_only", "503", "degrade"), needs="slo",
    )
    rtc: bool | None = option(
        None, "real-time chunking: a chunk continues the episode's last one",
        group="chunks and the prefix cache",
    )
    rtc_per_episode: bool = option(
        False, "allow --rtc with two policies: a chunk never continues one of the other policy", needs="rtc"
    )
    rtc_schedule: str = option(
        "LINEAR", "how the weight of the old chunk falls up to the horizon", choices=("ZEROS", "ONES", "LINEAR", "EXP"),
        needs="rtc",
    )
    rtc_horizon: int = option(
        10, "number of actions of the new chunk that the old one affects", low=1, high=1000, needs="rtc"
    )
    adaptive_steps: bool = option(
        False, "stop denoising when the velocity changes by less than 1 %, after 2 steps at the earliest"
    )
    prefix_cache_mb: float = option(
        256.0, "memory for cached prefixes; 0 is off", low=0, high=1_000_000, unit="MB",
        needs="a decomposed export",
    )
    prefix_max_age_chunks: int = option(
        0,
        "chunks for which a cached prefix is used although the images changed (the policy does not see the new ones)",
        low=0,
        high=1000,
        needs="prefix_cache_mb",
    )
    watchdog_s: float = option(
        10.0, "a batch that runs longer is given up and its callers get an error; 0 is off", low=0, high=3600, unit="s",
        group="faults and the end",
    )
    max_consecutive_crashes: int = option(
        5, "crashed batches in a row until /health says degraded; 0 is off", low=0, high=10_000
    )
    probe_cooldown_s: float = option(
        30.0,
        "while degraded, time until one request is admitted as a probe; doubled if it crashes too, up to 16 times",
        low=0, high=480, unit="s", needs="max_consecutive_crashes",
    )
    drain_timeout_s: float = option(10.0, "time to finish queued requests after SIGTERM", low=0, high=600, unit="s")
    trace: str = option(
        "", "write every batch to FILE as a JSON line; read it with reflex trace", metavar="FILE",
        group="recording and trace",
    )
    record: str = option(
        "", "write every request and answer to a file in DIR; read it with reflex replay and reflex report",
        metavar="DIR",
    )
    record_images: str = option(
        "hash_only", "what is recorded of images; only full can be replayed through a model that sees images",
        choices=("full", "hash_only", "none"),
        needs="record",
    )
    record_no_gzip: bool = option(False, "do not compress recordings", needs="record")
    record_max_mb: int = option(
        0, "size of a file after which the next one begins; 0 is no limit", low=0, high=1_000_000, unit="MiB",
        needs="record",
    )
    inject_latency_ms: float = option(
        0.0, "latency added to every batch", low=0, high=60_000, unit="ms",
        group="drills",
    )
    inject_fault: tuple[str, ...] = option(
        (), "a fault, SLOT:KIND:RATE[:MS], where KIND is raise, nan, hang, slow or die", metavar="FAULT", repeat=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.captured_sizes
        found = re.fullmatch(_ZMQ_ADDRESS, self.gr00t)
        if self.gr00t and (found is None or int(found["port"]) > 65535):
            expected = "tcp://ADDRESS:PORT with localhost, a numeric address or *, and a port up to 65535"
            raise ConfigError(f"--gr00t={one_line(self.gr00t)}: must be {expected}", field="gr00t")
        _check_address("oip_grpc", self.oip_grpc)
        _check_address("lerobot", self.lerobot)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """What `cuda_graphs` names."""
        return _sizes(self.cuda_graphs) if self.cuda_graphs else ()


@dataclass(frozen=True, slots=True)
class RayConfig:
    """What `reflex ray` has besides the settings of `reflex serve`: how many replicas there are, what each takes."""

    replicas: int = option(
        2, "fewest replicas, each with the whole policy and a device of its own", low=1, high=1000, group="replicas"
    )
    max_replicas: int = option(
        0, "most replicas; more than --replicas: Ray adds and removes replicas with the load; 0: as many as --replicas",
        low=0, high=1000,
    )
    target_backlog_s: float = option(
        0.2, "waiting work of a replica, in predicted seconds of its device, above which there are to be more replicas",
        low=0.001, high=3600, unit="s", needs="max_replicas",
    )
    scale_out_delay_s: float = option(
        10.0, "how long more replicas must be needed before they start", low=0, high=3600, unit="s",
        needs="max_replicas",
    )
    scale_in_delay_s: float = option(
        300.0, "how long fewer replicas must be enough before one is drained", low=0, high=86_400, unit="s",
        needs="max_replicas",
    )
    scale_in_wait_s: float = option(
        60.0, "how long a replica that is drained waits for the websockets that are open on it", low=0, high=86_400,
        unit="s",
    )
    replica_cpus: float = option(
        0.0, "CPUs that Ray reserves for a replica; 0: as many as --threads", low=0, high=1024
    )
    replica_gpus: float = option(
        -1.0, "GPUs that Ray reserves for a replica; -1: one with --provider cuda, else none", low=-1, high=64
    )

    def __post_init__(self) -> None:
        validate(self)
        if 0 < self.max_replicas < self.replicas:
            told = f"--max-replicas={self.max_replicas}: must be at least --replicas={self.replicas}, or 0"
            raise ConfigError(told, field="max_replicas")

    @property
    def scales(self) -> bool:
        """Whether their number follows the load."""
        return self.max_replicas > self.replicas


OWN_SETTINGS = frozenset({
    "provider", "threads", "dtype", "compile", "cuda_graphs", "on_bad_action",
    "policy_a", "policy_b", "split", "shadow_policy", "shadow_sample",
    "ramp", "ramp_every", "guard", "ramp_evidence", "ramp_margin",
    "max_batch_cost_ms", "batch_timeout_ms", "max_batch_size", "cost_model",
    "deadline_ms", "max_queue", "max_queue_s", "latest_only", "max_in_flight_per_client", "slo", "slo_mode",
    "rtc", "rtc_per_episode", "rtc_schedule", "rtc_horizon", "adaptive_steps",
    "prefix_cache_mb", "prefix_max_age_chunks", "max_consecutive_crashes", "probe_cooldown_s",
})  # fmt: skip
"""The settings that each of several policies may have to itself, in its table [policies.NAME]."""


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """What a table [policies.NAME] may have beside `OWN_SETTINGS`, and [models.NAME] beside `MODEL_SETTINGS`."""

    source: str = option("", "where the policy or the model comes from, as SOURCE or MODEL_DIR")
    weight: float = option(1.0, "share of the device's time against the others", low=0.01, high=100)

    def __post_init__(self) -> None:
        validate(self, "policy")


@dataclass(frozen=True)
class LLMServeConfig(ServerConfig):
    """The settings of `reflex serve MODEL_DIR`."""

    served_model_name: str = option(
        "", "model name that clients use and /v1/models lists; by default the directory's name", metavar="NAME",
        group="what is served",
    )
    alias: tuple[str, ...] = option(
        (), "a further name of the model; of several models, ALIAS=MODEL says which", metavar="ALIAS[=MODEL]",
        repeat=True,
    )
    lora: tuple[str, ...] = option(
        (), "a LoRA adapter (PEFT directory): requests ask for MODEL:NAME, and share steps with those that ask for the "
        "model itself; of several models, MODEL:NAME=DIR",
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
        0, "runtime processes, each with its own copy of the model; 0 runs the model in the server's process",
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
        "memory for keys and values in each process; models without their own share it evenly; 0 is 1 GiB",
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


MODEL_SETTINGS = frozenset({
    "alias", "lora", "runner", "dtype", "quantization", "threads", "max_model_len",
    "max_gap_ms", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "speculate",
    "max_queue", "max_queued_tokens", "block_size", "kv_cache_gb", "prefix_caching",
})  # fmt: skip
"""The settings that each of several language models may have to itself, in its table [models.NAME]."""


@dataclass(frozen=True, slots=True)
class EmbeddingServeConfig(ServerConfig):
    """The settings of `reflex serve MODEL_DIR` for an embedding model."""

    served_model_name: str = again(LLMServeConfig, "served_model_name", "", group="what is served")
    device: str = again(LLMServeConfig, "device", "auto", group="")
    runner: str = again(LLMServeConfig, "runner", "auto", group="")
    dtype: str = option(
        "auto", "number format of the computation; auto is float32", choices=("auto", "float32", "bfloat16")
    )
    pooling: str = option(
        "auto",
        "how the states of a text's tokens become its vector: their mean, that of the first token (cls) or of the last "
        "one; auto is what the directory says, and mean where it says nothing",
        choices=("auto", "mean", "cls", "last"),
    )
    cache_dir: str = again(LLMServeConfig, "cache_dir", "", group="")
    threads: int = option(0, "CPU threads of a call; 0 is the runner's default", low=0, high=1024)
    max_model_len: int = option(
        0, "most tokens of a text, up to the model's own places; 0 is what the directory says, as far as a text's "
        "attention scores are within 1 GiB",
        low=0, high=1 << 24,
    )
    max_body_bytes: int = again(ServerConfig, "max_body_bytes", 16 * 2**20, group="listening and trust")
    max_batch_cost_ms: float = option(
        100.0,
        "most predicted time of a batch; smaller values let short texts wait less, larger ones pad less",
        low=1, high=60_000, unit="ms",
        group="batching",
    )
    max_queue: int = option(4096, "most waiting texts; beyond it 429", low=1, high=1_000_000, group="queue")
    max_queued_tokens: int = option(
        1_000_000, "most tokens of waiting texts; beyond it 429", low=1, high=1_000_000_000, unit="tokens"
    )
    watchdog_s: float = option(
        60.0,
        "a batch that runs longer ends with an error for its callers; after twice the time the server ends; 0 is off",
        low=0, high=3600, unit="s",
        group="faults and the end",
    )
    drain_timeout_s: float = again(LLMServeConfig, "drain_timeout_s", 30.0, group="")
    trace: str = option(
        "", "write every batch to FILE as a JSON line; read it with reflex trace", metavar="FILE",
        group="trace",
    )


@dataclass(frozen=True, slots=True)
class FeedsConfig:
    """The settings of `reflex feeds`."""

    processor: str = option(
        "", "your processor: module:name of a class, of a function that returns one, or of an instance",
        metavar="MODULE:NAME",
        group="the processor",
    )
    onnx: str = option(
        "", "a detector or classifier in ONNX, as the processor; shapes is the bundled one", metavar="FILE"
    )
    size: str = option(
        "", "with --onnx: size that frames are brought to, where the graph leaves it open; by default what it was "
        "exported for",
        metavar="640|WxH", needs="onnx",
    )
    resize: str = option(
        "auto", "with --onnx: letterbox keeps the shape of a frame, stretch does not, crop takes its middle; auto is "
        "what the kind of model needs",
        choices=("auto", "letterbox", "stretch", "crop"), needs="onnx",
    )
    names: str = option(
        "", "with --onnx: file with the names of the classes, one a line or as a list; by default those in the graph",
        metavar="FILE", needs="onnx",
    )
    score: float | None = option(
        None, "with --onnx: what scores less is left out; by default 0.25 for YOLO, 0.5 for other detectors, 0 for "
        "classifiers",
        low=0, high=1, metavar="SCORE", needs="onnx",
    )
    iou: float | None = option(
        None, "with --onnx: of two boxes of a class that share more of their union than this, the better one stays; "
        "0.7 by default. For graphs that do not do it themselves",
        low=0, high=1, metavar="SHARE", needs="onnx",
    )
    classes: tuple[str, ...] = option(
        (), "with --onnx: the only classes to report, by name or number, with commas", metavar="NAME,…", needs="onnx"
    )
    max_detections: int = option(
        0, "with --onnx: most detections of a frame; 0 is 300, and the 5 best classes of a classifier",
        low=0, high=1000, needs="onnx",
    )
    provider: str = option("cpu", "with --onnx: cpu, cuda, openvino or an ONNX Runtime provider name", needs="onnx")
    threads: int = option(1, "with --onnx: ONNX Runtime threads per call", low=1, high=256, needs="onnx")
    then: str = option(
        "", "a second model in ONNX, such as a classifier: it is asked about what was found, each box as a picture",
        metavar="FILE",
    )
    then_classes: tuple[str, ...] = option(
        (), "with --then: the only classes that it is asked about, by name or number, with commas", metavar="NAME,…",
        needs="then",
    )
    then_most: int = option(
        16, "with --then: most boxes of a frame that it is asked about, those with the highest scores", low=1, high=300,
        needs="then",
    )
    then_batch_size: int = option(
        8, "with --then: most boxes in a call of the second model", low=1, high=4096, needs="then"
    )
    startup_timeout_s: float = option(30.0, "how long the processor may take to start", low=0.1, high=3600, unit="s")
    max_batch_size: int = option(4, "most frames in a call of the processor", low=1, high=4096, group="batching")
    max_latency_ms: float = option(
        50.0, "longest time that a free processor waits for feeds that are due; it waits only if that pays",
        low=0, high=60_000, unit="ms",
    )
    queue_capacity: int = option(
        0, "most frames waiting for the processor; 0 is four batches, and at least one place per feed",
        low=0, high=1_000_000
    )
    response_timeout_s: float = option(
        5.0, "time that a feed waits for its answer, in addition to --max-latency-ms", low=0.01, high=3600, unit="s"
    )
    watchdog_s: float = option(
        60.0, "a batch that runs longer is reported and its feeds go on without it; 0 is off",
        low=0, high=3600, unit="s"
    )
    realtime: bool = option(
        False, "play files at their own pace, as if they were cameras: the newest frame wins", needs="a file",
        group="the feeds",
    )
    loop: bool = option(False, "start files over when they end; needs --realtime", needs="a file")
    max_age_ms: float = option(
        1000.0, "live: a frame older than this is dropped, not computed", low=1, high=3_600_000, unit="ms",
        needs="a live feed",
    )
    restarts: int = option(
        0, "live: total number of times that a lost source is opened again; 0 is no limit",
        low=0, high=1_000_000, needs="a live feed",
    )
    read_timeout_s: float = option(
        5.0, "a camera that sends nothing for this long counts as lost", low=0.1, high=600, unit="s", needs="a camera"
    )
    every: int = option(1, "take one of so many pictures", low=1, high=1_000_000)
    fps: float = option(0.0, "take at most so many pictures a second; 0 takes all", low=0, high=1000)
    rotate: str = option("0", "turn pictures clockwise by so many degrees", choices=("0", "90", "180", "270"))
    roi: str = option(
        "", "the part of the (turned) picture that the processor gets, in pixels; results are in pixels of the whole "
        "picture",
        metavar="X,Y,W,H",
    )
    hwaccel: str = option(
        "", "decode on a device: auto, or one that FFmpeg knows, such as cuda or vaapi. Where it does not work, a line "
        "says so and the CPU decodes",
        metavar="DEVICE", needs="a video",
    )
    duration_s: float = option(
        0.0, "stop this long after the start of the feeds; 0 runs until every feed has ended", low=0, high=1e9, unit="s"
    )
    track: bool = option(
        False, "number the objects of each feed from frame to frame, by ByteTrack", group="after the batch"
    )
    track_score: float = option(
        0.5, "a detection that scores this begins a track; others only continue one", low=0, high=1, needs="track"
    )
    zone: tuple[str, ...] = option(
        (), "count detections inside of this polygon, in pixels of the frame", metavar="NAME=X1,Y1,…", repeat=True
    )
    line: tuple[str, ...] = option(
        (), "count objects that cross this line", metavar="NAME=X1,Y1,X2,Y2", repeat=True, needs="track"
    )
    stage: tuple[str, ...] = option(
        (), "your own stage: module:name of a function that gets and returns a result, or of a class, which may keep "
        "state",
        metavar="MODULE:NAME", repeat=True,
    )
    results: str = option(
        "", "write every result to FILE as a JSON line; - is standard output; FILE.parquet is a folder of Parquet",
        metavar="FILE",
        group="results",
    )
    annotate: str = option("", "write each feed to DIR as a video with the results drawn on it", metavar="DIR")
    crops: str = option("", "write what was found as pictures below DIR, cut out of the frames", metavar="DIR")
    crops_keep: int = option(
        1000, "pictures of a feed that --crops keeps; older ones are deleted", low=1, high=1_000_000, needs="crops"
    )
    trace: str = option("", "write every batch to FILE as a JSON line; read it with reflex trace", metavar="FILE")
    publish: str = option(
        "", "publish every result to this MQTT broker, under TOPIC/feeds/NAME; mqtts is over TLS. While the broker is "
        "away the newest results wait",
        metavar="mqtt://HOST/TOPIC", secret=True, group="receivers",
    )
    publish_qos: int = option(
        0, "MQTT quality of service: 0 at most once, 1 at least once, 2 exactly once", low=0, high=2, needs="publish"
    )
    publish_user: str = option("", "user at the broker, unless it stands in --publish", metavar="NAME", needs="publish")
    publish_password: str = option(
        "", "password at the broker, unless it stands in --publish; better set as REFLEX_PUBLISH_PASSWORD",
        secret=True, needs="publish_user",
    )
    webhook: str = option(
        "", "POST every result to this URL, as JSON lines, several in a request where they come fast; tried again when "
        "the server is away, and the newest results wait",
        metavar="URL", secret=True,
    )
    table: bool | None = option(
        None,
        "a live table on standard error, by default if that is a terminal; otherwise a line per feed every 5 s",
        group="watching",
    )
    port: int = option(
        -1, "port for /dashboard, /feeds, /metrics and /health; 0 picks a free one, -1 is off", low=-1, high=65535
    )
    host: str = option("127.0.0.1", "address to bind for --port", needs="port")
    api_key: str = option(
        "", "key that callers of --port must send as Authorization: Bearer or X-Reflex-Key", secret=True, needs="port"
    )
    api_key_file: str = option("", "file that holds the key", metavar="FILE", needs="port")
    allow_host: tuple[str, ...] = option(
        (), "without a key: a further host name of --port; * is any", metavar="NAME", repeat=True, needs="port",
        unless="api_key",
    )
    add_files: str = option(
        "", "folder of files that POST /feeds may name; by default only cameras can be added", metavar="DIR",
        needs="api_key",
    )
    otel: str = option(
        "", "send spans of frames and batches to this OpenTelemetry collector, over OTLP/HTTP",
        metavar="http://HOST:4318",
        group="spans",
    )
    otel_sample: float = option(1.0, "share of the frames that get a span", low=0, high=1, needs="otel")

    def __post_init__(self) -> None:
        validate(self)
        _check_endpoint(self.otel)
        _check_trust(self)


def _check_endpoint(endpoint: str) -> None:
    """ConfigError for a collector's address that is none, or that has a secret in it: settings are shown."""
    if not endpoint:
        return
    if any(mark in endpoint for mark in "@?#"):
        expected = "must have no user, query or fragment; headers of your own stand in OTEL_EXPORTER_OTLP_HEADERS"
        raise ConfigError(f"--otel: {expected}", field="otel")
    try:
        found = urlsplit(endpoint)
        plain = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a wrong port or address
        plain = False
    if not (plain and endpoint.isascii() and endpoint.isprintable()) or " " in endpoint or len(endpoint) > 1000:
        expected = "must be http://HOST:PORT or https://HOST:PORT of a collector"
        raise ConfigError(f"--otel={one_line(endpoint)}: {expected}", field="otel")


def _check_address(name: str, address: str) -> None:
    """ConfigError for an address that is not HOST:PORT."""
    found = re.fullmatch(r"(?:localhost|[0-9.]{7,15}|\[[0-9a-fA-F:.]{2,45}\]):([0-9]{1,5})", address)
    if address and (found is None or int(found[1]) > 65_535):
        expected = "ADDRESS:PORT, and ADDRESS localhost or numeric"
        raise ConfigError(f"{flag(name)}={one_line(address)}: must be {expected}", field=name)


def _check_trust(config: ServerConfig | FeedsConfig) -> None:
    """Read the key from its file. ConfigError for a host name that is none."""
    if config.api_key_file and not config.api_key:
        object.__setattr__(config, "api_key", _key_in(config.api_key_file))
    for name in config.allow_host:
        if not re.fullmatch(r"\*|[\w.-]{1,253}|\[?[0-9a-fA-F:.]{2,45}\]?", name):
            expected = "a host name or an address without a port, or *"
            raise ConfigError(f"--allow-host={one_line(name)}: must be {expected}", field="allow_host")


def _key_in(file: str) -> str:
    """The key that a file holds: one line."""
    where = f"--api-key-file={one_line(file)}"
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(4097)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}", field="api_key_file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is no UTF-8 text", field="api_key_file") from None
    key = text.strip()
    if not key or len(text) > 4096 or not key.isprintable():
        raise ConfigError(f"{where}: must hold one line of at most 4096 characters, the key", field="api_key_file")
    return key


def _sizes(text: str) -> tuple[int, ...]:
    """The batch sizes of --cuda-graphs."""
    sizes = tuple(int(part) for part in text.split(",")) if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text) else ()
    if not sizes or sizes[0] < 1 or sizes[-1] > 4096 or any(a >= b for a, b in pairwise(sizes)):
        expected = "ascending whole numbers in [1, 4096], such as 1,2,4,8"
        raise ConfigError(f"--cuda-graphs={one_line(text)}: must be {expected}", field="cuda_graphs")
    return sizes
