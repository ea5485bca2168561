"""ModelConfig: what the decoder needs to know, whichever kind of file said it.

Read from a Hugging Face config.json or from the metadata of a GGUF file. Whatever would change
the result and is not implemented is refused here, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

_HF_ARCHITECTURES: dict[Any, str] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_GGUF_ARCHITECTURES = ("llama", "qwen3")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama-like decoder.

    Args:
        architecture: "llama" or "qwen3".
        vocab_size: V, rows of the embedding.
        hidden_size: features of a token between layers.
        intermediate_size: features inside the MLP.
        num_layers: decoder layers.
        num_heads: H.
        num_kv_heads: H_kv.
        head_dim: D.
        max_context: positions the model was trained for.
        rms_eps: epsilon of every RMSNorm.
        inv_freq: (D / 2,) rotary angle of a step, in radians, per pair of features.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        tied: whether the output head is the embedding.
        eos_token_ids: tokens that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    inv_freq: tuple[float, ...]
    qk_norm: bool
    tied: bool
    eos_token_ids: tuple[int, ...] = ()


def reject(where: str, name: str, got: Any, allowed: str, fix: str) -> NoReturn:
    """Raises the one form of error that a file's reader sees."""
    raise ValueError(f"{where}: {name} is {got!r}; allowed: {allowed}. {fix}")


def from_hf(config: Mapping[str, Any], where: str, eos_token_ids: Any = None) -> ModelConfig:
    """Reads a Hugging Face config.json.

    Args:
        config: the parsed file.
        where: its path, for errors.
        eos_token_ids: from generation_config.json, added to the config's own.

    Raises:
        ValueError: for an architecture or an option that is not implemented, or a missing key.
    """
    name = next(iter(config.get("architectures") or [None]))
    architecture = _HF_ARCHITECTURES.get(name)
    if architecture is None:
        allowed = ", ".join(_HF_ARCHITECTURES)
        reject(where, "architectures", name, allowed, "Use a Llama or Qwen3 checkpoint.")
    _refuse_hf_options(config, where)
    heads, hidden = _need(config, "num_attention_heads", where), _need(config, "hidden_size", where)
    head_dim = config.get("head_dim") or hidden // heads
    theta, scaling = _hf_rope(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_need(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_need(config, "intermediate_size", where),
        num_layers=_need(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_context=_need(config, "max_position_embeddings", where),
        rms_eps=_need(config, "rms_norm_eps", where),
        inv_freq=scale_rope(base_inv_freq(theta, head_dim), scaling, where),
        qk_norm=architecture == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(config.get("eos_token_id"), eos_token_ids),
    )


def from_gguf(metadata: Mapping[str, Any], where: str, **tensors: Any) -> ModelConfig:
    """Reads a GGUF file's metadata.

    Args:
        metadata: its key/value pairs.
        where: its path, for errors.
        tensors: what only the tensors say: vocab_size, tied and rope_factors, which divide the
            rotary frequencies (None for none).

    Raises:
        ValueError: as `from_hf`.
    """
    arch = metadata.get("general.architecture")
    if arch not in _GGUF_ARCHITECTURES:
        allowed = ", ".join(_GGUF_ARCHITECTURES)
        reject(where, "general.architecture", arch, allowed, "Use a Llama or Qwen3 model.")

    def need(key: str) -> Any:
        return _need(metadata, f"{arch}.{key}", where)

    if metadata.get(f"{arch}.expert_count", 0):
        reject(where, f"{arch}.expert_count", need("expert_count"), "0", "Use a dense model.")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if metadata.get(f"{arch}.{key}", head_dim) != head_dim:
            reject(where, f"{arch}.{key}", need(key), f"the head size {head_dim}", "Not supported.")
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = metadata.get(f"{arch}.rope.scaling.factor")
    theta = metadata.get(f"{arch}.rope.freq_base", 10000.0)
    inv_freq = scale_rope(
        base_inv_freq(theta, head_dim), {"rope_type": kind, "factor": factor}, where
    )
    if tensors["rope_factors"] is not None:
        inv_freq = tuple(f / g for f, g in zip(inv_freq, tensors["rope_factors"], strict=True))
    eos = metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")
    return ModelConfig(
        architecture=arch,
        vocab_size=tensors["vocab_size"],
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=need("context_length"),
        rms_eps=need("attention.layer_norm_rms_epsilon"),
        inv_freq=inv_freq,
        qk_norm=arch == "qwen3",
        tied=tensors["tied"],
        eos_token_ids=_token_ids(*eos),
    )


def base_inv_freq(theta: float, head_dim: int) -> list[float]:
    """theta ** (-2 i / D) for each pair i of features (Su et al. 2021, RoFormer, section 3.2.2)."""
    return [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]


def scale_rope(inv_freq: list[float], scaling: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """Stretches rotary frequencies to a longer context.

    "linear" divides every frequency by the factor. "llama3" divides those whose wave is longer
    than the old context / low_freq_factor, leaves those shorter than old context /
    high_freq_factor, and blends linearly in between (Llama 3.1's model card and config).

    Args:
        inv_freq: radians a step.
        scaling: rope_type and its numbers.
        where: the file, for errors.

    Raises:
        ValueError: for another rope_type, or a missing number.
    """
    kind = scaling.get("rope_type") or "default"
    if kind in ("default", "none"):
        return tuple(inv_freq)
    if kind not in ("linear", "llama3"):
        fix = "Use a checkpoint without context extension."
        reject(where, "rope_type", kind, "default, linear, llama3", fix)
    factor = _need(scaling, "factor", where)
    if kind == "linear":
        return tuple(f / factor for f in inv_freq)
    low = _need(scaling, "low_freq_factor", where)
    high = _need(scaling, "high_freq_factor", where)
    old_context = _need(scaling, "original_max_position_embeddings", where)

    def stretch(frequency: float) -> float:
        turns = old_context * frequency / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        return frequency * (keep + (1 - keep) / factor)

    return tuple(map(stretch, inv_freq))


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """(theta, scaling) from either spelling: rope_parameters, or rope_theta and rope_scaling."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.get("type"))
    return scaling.get("rope_theta") or config.get("rope_theta") or 10000.0, scaling


def _refuse_hf_options(config: Mapping[str, Any], where: str) -> None:
    implemented = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
    }
    for name, allowed in implemented.items():
        if config.get(name) not in allowed:
            fix = "Use a checkpoint without this option."
            reject(where, name, config[name], repr(allowed[0]), fix)


def _need(values: Mapping[str, Any], key: str, where: str) -> Any:
    if values.get(key) is None:
        raise ValueError(
            f"{where}: {key} is missing; every model of this family says it. "
            f"The file is not complete: get it again."
        )
    return values[key]


def _token_ids(*sources: Any) -> tuple[int, ...]:
    """Ids from several places that each give none, one or a list; in order, each once."""
    found: dict[int, None] = {}
    for source in sources:
        ids = source if isinstance(source, (list, tuple)) else [source]
        found.update(dict.fromkeys(i for i in ids if i is not None))
    return tuple(found)
