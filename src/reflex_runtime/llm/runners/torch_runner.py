"""The runner in torch over a paged cache: for GPUs, and as a readable reference.

The decoder computes a model of the Llama, Mistral, Qwen2 or Qwen3 family, in plain torch, over one array with the
tokens of many sequences. Only attention depends on the sequence of a token: a function of the runner computes it.

Sequences with one new token attend together, as a padded batch over their block tables. Longer runs attend one by one,
over exactly their own rows. On CUDA, steps of single tokens replay a recorded graph, one per batch size and table
width. This module imports torch; import it only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from reflex_runtime.extras import needed_by
from reflex_runtime.llm.runners import runner
from reflex_runtime.llm.runners.adapters import AdapterStack, not_adaptable
from reflex_runtime.llm.runners.checkpoint import EMBEDDING, AnyModelConfig, Checkpoint, is_known, require
from reflex_runtime.run.processor import Record, recorder

if TYPE_CHECKING:
    from reflex_runtime.llm.runners.transformers_model import AnyDecoder


with needed_by("the torch runner"):
    import torch
    from torch import Tensor
    from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [t, heads, head_dim], keys and values [t, kv_heads, head_dim]) → [t, heads, head_dim]."""


class Addition(NamedTuple):
    """What adapters add to the outputs from `begin` on: a [R, in], b [outputs, R]; see `adapters`."""

    begin: int
    a: Tensor
    b: Tensor


class Linear(NamedTuple):
    """x [.., in] → [.., out]; weight is [out, in]."""

    weight: Tensor
    bias: Tensor | None
    additions: tuple[Addition, ...] = ()

    def __call__(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """chosen: [t, R], for each token the row of its adapter in the adapters' table; None: no token has one."""
        y = functional.linear(x, self.weight, self.bias)
        for begin, a, b in self.additions if chosen is not None else ():
            y[..., begin : begin + len(b)] += functional.linear(functional.linear(x, a) * chosen, b)
        return y


class Layer:
    """One layer's weights. Projections of the same input are one matrix: `qkv`, and `gate_up` of the MLP."""

    def __init__(
        self, name: str, tensor: Callable[[str], Tensor], linear: Callable[..., Linear], qk_norm: bool
    ) -> None:
        """name: the beginning of its tensors' names."""
        attention = f"{name}.self_attn"
        self.norm, self.mlp_norm = (tensor(f"{name}.{at}_layernorm.weight") for at in ("input", "post_attention"))
        self.qkv = linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        self.q_norm = tensor(f"{attention}.q_norm.weight") if qk_norm else None
        self.k_norm = tensor(f"{attention}.k_norm.weight") if qk_norm else None
        self.out = linear(f"{attention}.o_proj")
        self.gate_up = linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        self.down = linear(f"{name}.mlp.down_proj")


class Decoder:
    """A checkpoint's weights on a device, in one dtype, and the forward pass over them."""

    def __init__(
        self, checkpoint: Checkpoint, device: str, dtype: torch.dtype, adapters: AdapterStack | None = None
    ) -> None:
        self.config = checkpoint.config
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._adapted = {} if adapters is None else adapters.layers
        self._table = None if adapters is None else torch.tensor(adapters.table, device=device, dtype=dtype)
        self._embedding = self._tensor(EMBEDDING)
        self._head = self._embedding if self.config.tie_word_embeddings else self._tensor(checkpoint.head)
        self._norm = self._tensor("model.norm.weight")
        self._layers = [
            Layer(f"model.layers.{i}", self._tensor, self._linear, self.config.qk_norm)
            for i in range(self.config.num_hidden_layers)
        ]
        self._frequencies = torch.tensor(self.config.inverse_frequencies(), device=device)

    def _tensor(self, name: str) -> Tensor:
        """A copy of a weight on the device."""
        kind, data, shape = self._checkpoint.raw(name)
        stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        copied = torch.from_numpy(np.array(data))  # the file is read-only, which torch would warn of
        return copied.view(stored).view(shape).to(self._device, self._dtype)

    def _linear(self, *names: str) -> Linear:
        """Projections of the same input as one matrix. Either all of them have biases, or none."""
        biased = f"{names[0]}.bias" in self.config.tensors()
        bias = torch.cat([self._tensor(f"{name}.bias") for name in names]) if biased else None
        weights = [self._tensor(f"{name}.weight") for name in names]
        begins = np.cumsum([0, *map(len, weights)]).tolist()
        additions = [
            Addition(begin, *(torch.tensor(x, device=self._device, dtype=self._dtype) for x in self._adapted[name]))
            for begin, name in zip(begins, names, strict=False)
            if name in self._adapted
        ]
        return Linear(torch.cat(weights), bias, tuple(additions))

    def run(
        self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None, adapters: Tensor | None = None
    ) -> Tensor:
        """float32 logits [n, vocab_size] of the tokens at `rows`; None: of all. ids and positions are [t]; `attend` is
        called once per layer. adapters: [t], the number of each token's adapter; None: no token has one."""
        chosen = None if adapters is None or self._table is None else self._table[adapters]
        eps = self.config.rms_norm_eps
        cos, sin = self._rotations(positions)
        x = self._embedding[ids]
        for i, layer in enumerate(self._layers):
            turned, v = self._heads(layer, rms_norm(x, layer.norm, eps), cos, sin, chosen)
            q, k = turned.split([self.config.num_attention_heads, self.config.num_key_value_heads], dim=1)
            mixed = attend(i, q, k, v)
            x = x + layer.out(mixed.flatten(1), chosen)
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps), chosen).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up, chosen)
        return functional.linear(rms_norm(x if rows is None else x[rows], self._norm, eps), self._head).float()

    def _heads(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """(rotated queries followed by rotated keys, values), each [t, heads, head_dim]."""
        config = self.config
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        heads = layer.qkv(x, chosen).view(len(x), -1, config.head_dim)
        both, v = heads.split([queries + keys, keys], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = both.split([queries, keys], dim=1)
            eps = config.rms_norm_eps
            both = torch.cat([rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)], dim=1)
        return rotate(both, cos, sin), v

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For `rotate`: cosine and sine of each position's angles, float32 [t, 1, head_dim]. The first half of the sine
        is negated."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        cos, sin = angles.cos() * self.config.attention_factor, angles.sin() * self.config.attention_factor
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x divided by the root of its mean square along the last axis, times weight."""
    return weight * functional.rms_norm(x, (x.shape[-1],), None, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's dimensions i and i + head_dim / 2 as a pair; x is [t, heads, head_dim]. Uses few kernels: on a
    GPU their launches take the time of a small step."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


# -- the runner --------------------------------------------------------------------------------------------------------


_MOST_RECORDED: Final = 256  # sequences in a recorded step; in larger ones kernels take longer than their launches
_Masks = dict[int | None, Tensor]  # by sliding window; None: all tokens


@dataclass(frozen=True, slots=True)
class _Singles:
    """Sequences with one new token each. tokens: their indices in the step; None: all. rows: the cache rows [d, length]
    that each may read, padded with those of the unused block. masks: of these rows by window, [d, 1, 1, length]."""

    tokens: Tensor | None
    rows: Tensor
    masks: _Masks


@dataclass(frozen=True, slots=True)
class _Run:
    """A sequence with several new tokens. begin, end: their place in the step. rows: the cache rows of all its tokens.
    masks: by window, the rows that each new token reads, [new, all]; None: all tokens are new, and attention is causal.
    """

    begin: int
    end: int
    rows: Tensor
    masks: dict[int | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The input of attention for a step, the same in every layer. rows: where new keys and values are written, [t]."""

    rows: Tensor
    singles: _Singles | None
    runs: list[_Run]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step of fixed size: fill the inputs, replay, read the logits. lengths include the new token."""

    ids: Tensor  # [size]
    tables: Tensor  # [size, width] blocks
    lengths: Tensor  # [size]
    logits: Tensor  # [size, vocab]
    replay: Callable[[], None]


class TorchRunner:
    """Runs steps of a Hugging Face checkpoint in torch.

    device: "cpu" or "cuda". dtype: "float32", "bfloat16", or "auto": bfloat16 if the weights are stored so, else
    float32. num_blocks: blocks of the cache; None for as many as fit into `kv_cache_bytes`. max_model_len: at most the
    checkpoint's own limit; None for that. threads: torch's CPU threads in the whole process; None does not change them.
    cuda_graphs: record steps of single tokens; the first step of each size then takes longer, later ones cost one
    launch. adapters: directories of LoRA adapters, by name; then no step is recorded. Raises ConfigError, if possible
    before any weight is read.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        block_size: int = runner.BLOCK_SIZES["torch"],
        num_blocks: int | None = None,
        kv_cache_bytes: int = runner.GIB,
        max_model_len: int | None = None,
        threads: int | None = None,
        cuda_graphs: bool = True,
        adapters: Mapping[str, Path] | None = None,
    ) -> None:
        root, checkpoint = Path(directory), Checkpoint.open(directory) if is_known(directory) else None
        config = _described(root) if checkpoint is None else checkpoint.config
        if dtype == "auto":
            dtype = "bfloat16" if config.torch_dtype == "bfloat16" else "float32"
        kind: torch.dtype = getattr(torch, dtype)
        self.vocab_size, self.block_size = config.vocab_size, block_size
        self.max_model_len = runner.context_length(max_model_len, config.max_position_embeddings)
        self.name = f"torch {device} {dtype}"
        self.adapters: tuple[str, ...] = ()
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = device
        self._decoder: Decoder | AnyDecoder
        if checkpoint is None:
            from reflex_runtime.llm.runners.transformers_model import AnyDecoder

            if adapters:
                raise not_adaptable()
            self._decoder = decoder = AnyDecoder(root, device, kind)
            self._windows = tuple(layer.window for layer in decoder.layers)
            self._caps = tuple(layer.softcap for layer in decoder.layers)
            sizes = [(layer.kv_heads, layer.head_dim) for layer in decoder.layers]
        else:
            own = checkpoint.config
            stack = AdapterStack.read(adapters, own) if adapters else None
            self.adapters = () if stack is None else stack.names
            self._decoder, self._windows = Decoder(checkpoint, device, kind, stack), own.windows
            self._caps = (None,) * own.num_hidden_layers
            sizes = [(own.num_key_value_heads, own.head_dim)] * own.num_hidden_layers
        block = 2 * block_size * kind.itemsize * sum(heads * size for heads, size in sizes)  # layers may differ
        self.num_blocks = runner.blocks_in(kv_cache_bytes, block, runner.free_bytes(device), num_blocks)
        # Padding reads and writes the last block, which no sequence gets. All blocks are zeroed: attention multiplies
        # rows that were never written by zero, and NaN times zero is NaN.
        shape = (self.num_blocks + 1, block_size)
        self._keys = [torch.zeros(*shape, *size, dtype=kind, device=device) for size in sizes]
        self._values = [torch.zeros(*shape, *size, dtype=kind, device=device) for size in sizes]
        # models of transformers may have operations that cannot be recorded, and a recorded step has no adapters
        recorded = device == "cuda" and cuda_graphs and checkpoint is not None and not adapters
        self._record: Record | None = recorder() if recorded else None
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._host = torch.empty(0, 0)
        if checkpoint is None and self.num_blocks * block_size >= runner.PROBE:
            expected = decoder.expected(runner.probe(self.vocab_size).tolist()).cpu().numpy()
            runner.check_paging(self, expected, 0.01 if dtype == "float32" else 0.15, str(root))

    def forward(self, step: runner.Step) -> npt.NDArray[np.float32]:
        """Logits [n, vocab_size] after each sequence's last token of the step, or after its `rows`.

        Raises ValueError for a token id that the model does not have, before anything is written.
        """
        low, high = int(step.token_ids.min()), int(step.token_ids.max())
        if low < 0 or high >= self.vocab_size:  # on a GPU such an id would end the process
            raise ValueError(f"token ids from {low} to {high}: must be in [0, {self.vocab_size})")
        with torch.inference_mode():
            singles = len(step.token_ids) == len(step.past_lens) == len(step.picked) <= _MOST_RECORDED
            if self._record is not None and singles:
                logits = self._replayed(step, self._record)
            else:
                rows = self._tensor(step.picked)
                ids, positions, plan = self._tensor(step.token_ids), self._tensor(step.positions), self._plan(step)
                chosen = None if step.adapters is None else self._tensor(step.adapter_ids.astype(np.int64))
                logits = self._decoder.run(ids, positions, partial(self._attend, plan), rows, chosen)
            return self._on_host(logits)

    def _on_host(self, logits: Tensor) -> npt.NDArray[np.float32]:
        """The logits as a numpy array; from a GPU they are copied to pinned memory that the next call reuses."""
        if self._device == "cuda":
            if len(self._host) < len(logits):
                self._host = torch.empty(_power_of_two(len(logits)), self.vocab_size, pin_memory=True)
            logits = self._host[: len(logits)].copy_(logits)
        result: npt.NDArray[np.float32] = logits.numpy()
        return result

    def close(self) -> None:
        """Free weights, cache and recorded graphs."""
        self._recorded.clear()
        self._host = torch.empty(0, 0)
        self._keys.clear()
        self._values.clear()
        self.__dict__.pop("_decoder", None)

    def _tensor(self, values: npt.ArrayLike) -> Tensor:
        return torch.tensor(values, device=self._device)

    # -- planning: once per step ---------------------------------------------------------------------------------------

    def _plan(self, step: runner.Step) -> _Plan:
        size, counts = self.block_size, np.diff(step.begins)
        single = counts == 1
        runs = []
        for i in np.flatnonzero(~single):
            table = step.blocks[step.block_begins[i] : step.block_begins[i + 1]].astype(np.int64)
            rows = (table[:, None] * size + np.arange(size)).ravel()[: step.past_lens[i] + counts[i]]
            runs.append(self._run_of(int(step.begins[i]), int(counts[i]), self._tensor(rows)))
        singles = None
        if single.any():
            tables = self._tensor(self._tables(step, single))
            tokens = self._tensor(step.begins[:-1][single].astype(np.int64)) if runs else None
            singles = self._singles(tokens, tables, self._tensor(step.past_lens[single].astype(np.int64) + 1))
        owner = np.repeat(np.arange(len(counts)), counts)
        block = step.blocks[step.block_begins[owner] + step.positions // size].astype(np.int64)
        return _Plan(self._tensor(block * size + step.positions % size), singles, runs)

    def _tables(
        self, step: runner.Step, which: npt.NDArray[np.bool_], count: int = 0, width: int = 0
    ) -> npt.NDArray[np.int64]:
        """Block tables of the sequences in `which`, at least [count, width], padded with the unused block."""
        widths = np.diff(step.block_begins)
        shape = max(count, int(which.sum())), max(width, int(widths[which].max()))
        padded = np.full(shape, self.num_blocks, np.int64)
        there = np.arange(shape[1]) < widths[which][:, None]
        padded[: len(there)][there] = step.blocks[np.repeat(which, widths)]
        return padded

    def _run_of(self, begin: int, count: int, rows: Tensor) -> _Run:
        past, at = len(rows) - count, torch.arange(len(rows), device=self._device)
        own = at[past:, None]
        masks: dict[int | None, Tensor | None] = {}
        for window in set(self._windows):
            if window is None or window >= len(rows):
                masks[window] = (at <= own) if past else None
            else:
                masks[window] = (at <= own) & (at > own - window)
        return _Run(begin, begin + count, rows, masks)

    def _singles(self, tokens: Tensor | None, tables: Tensor, lengths: Tensor) -> _Singles:
        """tables: [d, width] blocks; lengths: [d], with the new token. It runs on the device, so it can be recorded."""
        size = self.block_size
        rows = (tables[:, :, None] * size + torch.arange(size, device=self._device)).flatten(1)
        at, length = torch.arange(rows.shape[1], device=self._device), lengths[:, None]
        seen = at < length
        masks = {
            window: (seen if window is None else seen & (at >= length - window))[:, None, None]
            for window in set(self._windows)
        }
        # rows after a sequence's end become those of the unused block, and are masked
        return _Singles(tokens, torch.where(seen, rows, self.num_blocks * size), masks)

    # -- attention: once per layer -------------------------------------------------------------------------------------

    def _attend(self, plan: _Plan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)  # [rows, kv_heads, head_dim]
        keys[plan.rows] = k
        values[plan.rows] = v
        window, cap, singles = self._windows[layer], self._caps[layer], plan.singles
        if singles is not None and singles.tokens is None:
            return _attend_singles(q, keys[singles.rows], values[singles.rows], singles.masks[window], cap)
        out = torch.empty_like(q)
        if singles is not None:
            mask, one = singles.masks[window], q[singles.tokens]
            out[singles.tokens] = _attend_singles(one, keys[singles.rows], values[singles.rows], mask, cap)
        for run in plan.runs:
            mine = slice(run.begin, run.end)
            out[mine] = _attend_run(q[mine], keys[run.rows], values[run.rows], run.masks[window], cap)
        return out

    # -- recorded decode steps -----------------------------------------------------------------------------------------

    def _replayed(self, step: runner.Step, record: Record) -> Tensor:
        """Replay a step of single tokens with the smallest recorded size that is large enough; record it if needed."""
        count, widest = len(step.past_lens), int(np.diff(step.block_begins).max())
        size, width = _power_of_two(count), _power_of_two(widest)
        tables = self._tables(step, np.ones(count, np.bool_), size, width)
        ids, lengths = np.zeros(size, np.int64), np.ones(size, np.int64)
        ids[:count], lengths[:count] = step.token_ids, step.past_lens + 1
        inputs = [self._tensor(values) for values in (ids, tables, lengths)]
        recorded = self._recorded.get((size, width))
        if recorded is None:
            recorded = self._recorded[size, width] = self._recording(record, *inputs)
        else:
            for buffer, values in zip((recorded.ids, recorded.tables, recorded.lengths), inputs, strict=True):
                buffer.copy_(values)
        recorded.replay()
        return recorded.logits[:count]

    def _recording(self, record: Record, ids: Tensor, tables: Tensor, lengths: Tensor) -> _Recorded:
        """Record a step with these tensors as its inputs. Repeated runs write the same keys and values."""
        logits = torch.empty(len(ids), self.vocab_size, device=self._device)

        def run() -> None:
            at = lengths - 1
            block = tables.gather(1, (at // self.block_size)[:, None])[:, 0]
            plan = _Plan(block * self.block_size + at % self.block_size, self._singles(None, tables, lengths), [])
            logits.copy_(self._decoder.run(ids, at, partial(self._attend, plan), None))

        return _Recorded(ids, tables, lengths, logits, record(run))


def _attend_singles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float | None) -> Tensor:
    """q [d, heads, head_dim]; k, v [d, length, kv_heads, head_dim]; mask [d, 1, 1, length]. Query heads that share keys
    are passed as several queries of one head, so that no key is copied."""
    shared = q.view(len(q), k.shape[2], -1, q.shape[2])
    return _mixed(shared, k.transpose(1, 2), v.transpose(1, 2), mask, cap).reshape(q.shape)


def _attend_run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float | None) -> Tensor:
    """q [new, heads, head_dim]; k, v [all, kv_heads, head_dim]; mask [new, all]; None: all are new, and causal."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return _mixed(q, k, v, mask, cap)[0].transpose(0, 1)


def _mixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float | None) -> Tensor:
    """Attention of queries [.., heads, n, d] over keys and values [.., kv_heads, m, d]; without a mask it is causal.
    cap: a soft bound of the scores, for which there is no fused kernel."""
    if cap is None:
        gqa = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa
        )  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 / cap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    mixed: Tensor = scores.masked_fill(~mask, -torch.inf).float().softmax(-1).to(v.dtype) @ v
    return mixed


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` >= 1."""
    return 1 << (number - 1).bit_length()


def _described(root: Path) -> AnyModelConfig:
    """The description of a checkpoint that `Decoder` does not know. Raises ConfigError if a library is missing."""
    require(root)
    from reflex_runtime.llm.runners.transformers_model import describe

    return describe(root)
