"""A checkpoint of any architecture of `transformers`, with its attention replaced by a function of ours.

`transformers` looks its attention up by name, so one registered function serves all architectures. It gets queries,
keys and values of all tokens of a step, and calls the function that was set with `attending`. Import this module only
where it is needed: it imports torch and transformers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.checkpoint import ROUNDED, AnyModelConfig, read_table, weight_files

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

NAME: Final = "reflex"
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # see `torch_runner`


@dataclass(frozen=True, slots=True)
class Attention:
    """The parameters of one layer's attention. window: how many of the last tokens a token sees; None: all. scale: of
    the scores. softcap: their soft bound, or None."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


Attending = Callable[[Any, Attention, Tensor, Tensor, Tensor], Tensor]
"""(module, its parameters, queries [batch, heads, tokens, head_dim], keys and values [batch, kv_heads, tokens,
head_dim]) → [batch, tokens, heads, head_dim]."""

_attending: ContextVar[Attending] = ContextVar("attending")


@contextmanager
def attending(function: Attending) -> Iterator[None]:
    """Use this function as attention inside of the block."""
    token = _attending.set(function)
    try:
        yield
    finally:
        _attending.reset(token)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, scaling: Any = None, **more: Any
) -> tuple[Tensor, None]:
    layer, size = getattr(module, "layer_idx", None), query.shape[-1]
    extra = [name for name, given in more.items() if torch.is_tensor(given) and name != "position_ids"]
    if layer is None or extra:
        what = f"attention with {', '.join(extra)}" if extra else "attention without a layer_idx"
        raise ConfigError(f"{type(module).__name__}: has {what}, which is not served")
    window = more.get("sliding_window")
    asked = Attention(
        layer, query.shape[1], key.shape[1], size, value.shape[-1], size**-0.5 if scaling is None else float(scaling),
        window or None, more.get("softcap"),
    )  # fmt: skip
    return _attending.get()(module, asked, query, key, value), None


def _experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute every expert for every token, with weight 0 if it was not chosen: only this form has fixed shapes."""
    count = module.num_experts
    chosen = torch.zeros(hidden.shape[0], count, dtype=hidden.dtype, device=hidden.device)
    chosen = chosen.scatter(1, index, weights.to(hidden.dtype))

    def product(states: Tensor, name: str) -> Tensor:
        matrix = getattr(module, name)
        result = torch.bmm(states, matrix if module.is_transposed else matrix.transpose(1, 2))
        return result + getattr(module, f"{name}_bias")[:, None] if module.has_bias else result

    states = hidden.repeat(count, 1).view(count, -1, hidden.shape[1])
    states = product(states, "gate_up_proj" if module.has_gate else "up_proj")
    states = product(module._apply_gate(states) if module.has_gate else module.act_fn(states), "down_proj")
    if module.has_post_expert_norm:
        states = module.post_expert_norm(states)
    return (states * chosen.transpose(0, 1)[..., None]).sum(0)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *given, **more: None)
ExpertsInterface.register(NAME, _experts)


def describe(directory: Path) -> AnyModelConfig:
    """The description of a checkpoint; no weight is read. Raises ConfigError if it is no decoder."""
    config = _text_config(directory)
    sinks = [name for file in weight_files(directory) for name in read_table(file) if name.endswith(".sinks")]
    if sinks:
        raise ConfigError(f"{directory}: tensor {sinks[0]}: attention with sinks is not served")
    return AnyModelConfig.of(directory, config)


def _text_config(directory: Path) -> Any:
    """The configuration of the checkpoint's text model, with the library's defaults. Raises ConfigError."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # wrong values lead to any kind of exception
        raise ConfigError(f"{directory / 'config.json'}: {_summary(error)}") from error
    auto, kind = transformers.models.auto.modeling_auto, f"model_type={config.model_type!r}"
    name = str(config.architectures).strip("[']")  # a file may have anything there
    if config.model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        why = f"{kind} is no decoder of text in transformers {transformers.__version__}"
    elif config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True):
        why = f"{kind} without is_decoder=true is an encoder, whose tokens depend on later ones; it is not served"
    elif name.endswith(("ForMaskedLM", "Model")) and not name.endswith("LMHeadModel"):
        why = f"architectures={config.architectures}: has no head that generates text; it is not served"
    elif getattr(config, "quantization_config", None) is not None:
        why = f"quantization_config: {ROUNDED}"
    else:
        return config.get_text_config(decoder=True)
    raise ConfigError(f"{directory / 'config.json'}: {why}")


def load(directory: Path, dtype: Any, *, fixed_shapes: bool = False) -> Any:
    """The model, on the CPU, with our attention. fixed_shapes: experts in the form that can be traced."""
    describe(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        try:
            model, read = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation=NAME, local_files_only=True, trust_remote_code=False,
                output_loading_info=True,
            )  # fmt: skip
            if fixed_shapes and hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation(NAME)
        except Exception as error:  # a model's code can raise anything
            raise ConfigError(f"{directory}: transformers cannot load it: {_summary(error)}") from error
    if missing := sorted(read["missing_keys"]):  # the library would draw them by chance
        kind = type(model).__name__
        raise ConfigError(f"{directory}: tensor {missing[0]}: not found, and {len(missing) - 1} more that {kind} needs")
    return model.eval().requires_grad_(False)


def layers_of(model: Any) -> dict[int, Attention]:
    """The attention of each layer, found by a run of three tokens. Raises ConfigError if a layer has none."""
    found: dict[int, Attention] = {}

    def seen(module: Any, asked: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found[asked.layer] = asked
        return query.transpose(1, 2)[..., : asked.value_dim].contiguous()

    ids = torch.arange(3, device=model.device)[None]
    with torch.inference_mode(), attending(seen):
        model(input_ids=ids, position_ids=ids, use_cache=False)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(found) != list(range(count)):
        what = f"{len(found)} of {count} layers have attention that can be replaced"
        why = "it keeps other state than keys and values, which is not served, or has attention of its own; then serve"
        why += " what `optimum-cli export openvino --task text-generation-with-past` makes of it"
        raise ConfigError(f"{model.config.model_type}: {what}: {why}")
    if any(asked.value_dim != asked.head_dim for asked in found.values()):
        raise ConfigError(f"{model.config.model_type}: keys and values have different sizes, which is not served")
    return found


def reference(model: Any, ids: list[int]) -> Tensor:
    """[tokens, vocab_size]: float32 logits by transformers' own attention."""
    model.set_attn_implementation("eager")
    experts = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)
    if experts == NAME:
        model.set_experts_implementation("eager")
    try:
        with torch.inference_mode():
            found: Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(NAME)
        if experts == NAME:
            model.set_experts_implementation(NAME)
    return found


class AnyDecoder:
    """The forward pass over a step's tokens by a model of transformers, with the interface of `Decoder`."""

    def __init__(self, directory: Path, device: str, dtype: Any) -> None:
        self._model = load(directory, dtype).to(device)
        layers = layers_of(self._model)
        self.layers = [layers[layer] for layer in sorted(layers)]
        self.config = self._model.config.get_text_config(decoder=True)

    def run(
        self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None, adapters: Tensor | None = None
    ) -> Tensor:
        """See `Decoder.run`. There are no adapters."""

        def function(module: Any, asked: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
            query = query * (asked.scale * asked.head_dim**0.5)  # `attend` divides by that root
            return attend(asked.layer, query, key, value)[None]

        with attending(function):
            logits = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            ).logits[0]  # fmt: skip
        picked: Tensor = logits if rows is None or len(logits) == len(rows) else logits[rows]
        return picked.float()

    def expected(self, ids: list[int]) -> Tensor:
        """[vocab_size]: the logits after these tokens, by transformers' own attention."""
        return reference(self._model, ids)[-1]


def _summary(error: BaseException) -> str:
    """The first line of the error's message, and the second if the first ends with a colon."""
    first, second, *_ = [*filter(None, map(str.strip, str(error).splitlines())), "", ""]
    return (f"{first} {second}" if first.endswith(":") else first)[:300].strip() or type(error).__name__
