"""From files to a Decoder: one loader, two kinds of file.

A checkpoint knows its config and can read each part of the model by this package's name for it
("layers.3.q"). The Decoder's own parameters say which parts they are made of: q, k and v are
one matrix there, gate and up another.

Legend: H query heads, H_kv key and value heads, D head dimension, d hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from onchip.engine.config import ModelConfig, from_gguf, from_hf
from onchip.engine.gguf import GGUFFile
from onchip.engine.model import Decoder

Progress = Callable[[int, int], None]

_HF_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "out": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


class Checkpoint(Protocol):
    """What the loader needs of a file.

    Attributes:
        path: for errors.
        config: the model's.
        shapes: the file's name of each tensor -> its shape.
    """

    path: Path
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]

    def name(self, part: str) -> str:
        """The file's name of a part, e.g. "layers.3.q"."""
        ...

    def read(self, part: str) -> Tensor:
        """A part's values, rotary pairs as halves of a head."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file and checks it, without reading its tensors.

    Raises:
        ValueError: if it is neither, is truncated, or holds a model that is not implemented.
    """
    path = Path(path)
    if path.is_dir():
        return HFFolder(path)
    if not path.is_file():
        raise ValueError(
            f"path: {path} does not exist; allowed: a Hugging Face folder (config.json, "
            f"*.safetensors, tokenizer.json) or a .gguf file. Download the model first."
        )
    return GGUFCheckpoint(path)


class HFFolder:
    """A Hugging Face folder: config.json and safetensors, in one file or in shards."""

    def __init__(self, path: Path):
        self.path = path
        generation = path / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
        self.config = from_hf(read_json(path / "config.json"), str(path / "config.json"), eos)
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._list_files():
            handle = _open_safetensors(file)
            for name in handle.keys():  # noqa: SIM118  (a handle is no dict)
                self._files[name] = handle
                self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def name(self, part: str) -> str:
        prefix, leaf = _split(part)
        return f"model.{prefix}{_HF_NAMES[leaf]}.weight" if prefix else f"{_HF_NAMES[leaf]}.weight"

    def read(self, part: str) -> Tensor:
        name = self.name(part)
        return self._files[name].get_tensor(name)

    def _list_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(read_json(index).get("weight_map", {}).values()))
        else:
            files = ["model.safetensors"]
        missing = [name for name in files if not (self.path / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.path}: {', '.join(missing)} missing; allowed: model.safetensors, or the "
                f"shards that model.safetensors.index.json names. Download them; other formats "
                f"(pytorch_model.bin) are not read."
            )
        return [self.path / name for name in files]


class GGUFCheckpoint:
    """A GGUF file of llama.cpp."""

    def __init__(self, path: Path):
        self.path = path
        self.file = GGUFFile(path)
        if self.file.metadata.get("split.count", 1) > 1:
            raise ValueError(f"{path}: one of several parts; merge them with llama-gguf-split.")
        self.shapes = {name: info.shape for name, info in self.file.tensors.items()}
        # Not a weight: llama.cpp's way to say Llama 3's context extension.
        factors = self.shapes.pop("rope_freqs.weight", None)
        self.config = from_gguf(
            self.file.metadata,
            str(path),
            vocab_size=self.shapes.get("token_embd.weight", (0,))[0],
            tied="output.weight" not in self.shapes,
            rope_factors=self.file.read("rope_freqs.weight").tolist() if factors else None,
        )

    def name(self, part: str) -> str:
        prefix, leaf = _split(part)
        return f"{prefix.replace('layers', 'blk')}{_GGUF_NAMES[leaf]}.weight"

    def read(self, part: str) -> Tensor:
        x = self.file.read(self.name(part))
        heads = {"q": self.config.num_heads, "k": self.config.num_kv_heads}
        leaf = _split(part)[1]
        if self.config.architecture == "llama" and leaf in heads:
            # llama.cpp stores Llama's rotary pairs side by side; here they are halves of a head.
            x = x.unflatten(0, (heads[leaf], -1, 2)).transpose(1, 2).flatten(0, 2)
        return x


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """Reads every weight into a Decoder.

    Args:
        checkpoint: an opened file.
        dtype: of the matrices.
        device: where they go.
        progress: called with (parameters done, parameters in all).

    Returns:
        The Decoder, in eval mode and without gradients.

    Raises:
        ValueError: if a tensor is missing, has another shape, or is one that the model does not
            have; before anything is read.
    """
    with torch.device("meta"):
        model = Decoder(checkpoint.config)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if checkpoint.config.tied:
        del wanted["head.weight"]
    _check_tensors(checkpoint, wanted)
    total, done, state = sum(map(_size, wanted.values())), 0, {}
    for name, shape in wanted.items():
        kept = dtype if len(shape) > 1 else torch.float32  # norms: small, and applied in float32
        state[name] = whole = torch.empty(shape, dtype=kept, device=device)
        row = 0
        for part in _parts(name):
            values = checkpoint.read(part)
            whole[row : row + len(values)] = values
            row += len(values)
        done += _size(shape)
        if progress is not None:
            progress(done, total)
    model.load_state_dict(state, strict=not checkpoint.config.tied, assign=True)
    if checkpoint.config.tied:
        model.head.weight = model.embed.weight
    return model.eval().requires_grad_(False)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: if the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; a Hugging Face folder has one. Download it.") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}). Download it again.") from None


def _open_safetensors(path: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path}: truncated or damaged ({error}; the file has {size} bytes). Download it again."
        ) from None


def _check_tensors(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Requires exactly the wanted tensors, in the shapes that the config implies."""
    config, have = checkpoint.config, dict(checkpoint.shapes)
    rows = {
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
        "v": config.num_kv_heads * config.head_dim,
        "gate": config.intermediate_size,
        "up": config.intermediate_size,
    }
    missing, wrong = [], []
    for name, shape in wanted.items():
        for part in _parts(name):
            leaf = _split(part)[1]
            expected = (rows[leaf], *shape[1:]) if leaf in rows else shape
            got = have.pop(checkpoint.name(part), None)
            if got is None:
                missing.append(checkpoint.name(part))
            elif got != expected:
                wrong.append(f"{checkpoint.name(part)} is {got}, not {expected}")
    if missing:
        raise ValueError(
            f"{checkpoint.path}: {_some(missing)} missing; the config asks for "
            f"{config.num_layers} layers of {config.architecture}. Download the model again."
        )
    if wrong:
        raise ValueError(
            f"{checkpoint.path}: {_some(wrong)}. Config and weights are of two models: "
            f"get both from one."
        )
    unused = [name for name in have if not _may_be_unused(name, checkpoint)]
    if unused:
        raise ValueError(
            f"{checkpoint.path}: {_some(unused)} unknown; {config.architecture} as implemented "
            f"has no such tensors, and leaving them out would change the result."
        )


def _may_be_unused(name: str, checkpoint: Checkpoint) -> bool:
    """Tied heads that were saved anyway, and old Llama files' rotary frequencies."""
    return name == checkpoint.name("head") or name.endswith("rotary_emb.inv_freq")


def _split(part: str) -> tuple[str, str]:
    """ "layers.3.q" -> ("layers.3.", "q")."""
    cut = part.rfind(".") + 1
    return part[:cut], part[cut:]


def _parts(parameter: str) -> list[str]:
    """ "layers.3.qkv.weight" -> ["layers.3.q", "layers.3.k", "layers.3.v"]."""
    prefix, leaf = _split(parameter.removesuffix(".weight"))
    return [prefix + part for part in _FUSED.get(leaf, (leaf,))]


def _size(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
