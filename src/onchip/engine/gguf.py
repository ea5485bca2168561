"""GGUF files: metadata and tensors, dequantised with torch.

Layout: magic, version, counts; key/value pairs; one record a tensor (name, sizes, type, offset);
then the data, aligned. Sizes are listed fastest-varying first, the reverse of torch's. Format:
the GGUF specification in ggml's docs/gguf.md; block layouts: ggml-common.h.

The header is parsed here and not by the gguf package, which takes 10 s on 2 cores for a
vocabulary of 49,152 tokens; this takes 0.1 s. K-quants are left to that package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file.

    Args:
        shape: as torch has it.
        type_id: ggml's number of the storage type.
        offset: first byte in the file.
        num_bytes: bytes in the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file, opened and checked: every tensor it lists lies inside it.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: its key/value pairs; arrays are lists.
        tensors: name -> TensorInfo.

    Raises:
        ValueError: if the file is no GGUF file, is truncated, or has a tensor type that nobody
            here can read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.stat().st_size == 0:
            raise ValueError(f"{self.path}: the file is empty. Get it again.")
        with open(self.path, "rb") as file:
            # A private mapping is writable, which torch.frombuffer asks for; nothing is written.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = 0
        self._read_header()

    def read(self, name: str) -> Tensor:
        """A tensor's values.

        Returns:
            float32, or the file's own float dtype where it has one.
        """
        info = self.tensors[name]
        raw = torch.frombuffer(
            self._data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset
        )
        return _format(info.type_id).decode(raw).reshape(info.shape)

    def _read_header(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ValueError(
                f"{self.path}: starts with {self._data[:4]!r}, a GGUF file starts with {_MAGIC!r}. "
                f"Give a .gguf file or a Hugging Face folder."
            )
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(
                f"{self.path}: GGUF version {version}; allowed: {_VERSIONS}, little endian. "
                f"Convert it with a current llama.cpp."
            )
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        records = [self._record() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors = {record[0]: self._locate(*record, start) for record in records}

    def _record(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("I")
        sizes = self._scalars("Q", num_dims)
        return name, tuple(reversed(sizes)), self._scalar("I"), self._scalar("Q")

    def _locate(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, start: int
    ) -> TensorInfo:
        try:
            form = _format(type_id)
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name}: {error}") from None
        if prod(shape) % form.block:
            raise ValueError(
                f"{self.path}: tensor {name} of shape {shape} does not divide into blocks of "
                f"{form.block}. The file is damaged: get it again."
            )
        num_bytes = prod(shape) // form.block * form.block_bytes
        if start + offset + num_bytes > len(self._data):
            self._truncated(f"tensor {name} ends at byte {start + offset + num_bytes}")
        return TensorInfo(shape, type_id, start + offset, num_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                return list(self._scalars(_SCALARS[item], count))
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: metadata of unknown type {kind}. Get the file again.")
        return self._scalar(_SCALARS[kind])

    def _string(self) -> str:
        length = self._scalar("Q")
        return self._take(length).decode("utf-8", errors="replace")

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple:
        num_bytes = count * struct.calcsize(f"<{code}")
        return struct.unpack(f"<{count}{code}", self._take(num_bytes))

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            self._truncated(f"the header needs byte {end}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _truncated(self, what: str) -> NoReturn:
        raise ValueError(
            f"{self.path}: truncated: the file has {len(self._data)} bytes, {what}. "
            f"Download it again."
        )


@dataclass(frozen=True)
class _Format:
    """A storage type: so many elements in so many bytes, and how to make floats of the bytes."""

    block: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]


def _halves(raw: Tensor) -> Tensor:
    """(n, 2) bytes -> (n, 1) float32."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """(n, 16) bytes -> (n, 32) float32: all low halves first, then all high ones."""
    return torch.cat((raw & 15, raw >> 4), dim=1).float()


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 18)
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks[:, :2]))


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 20)
    scaled = _nibbles(blocks[:, 4:]).mul_(_halves(blocks[:, :2]))
    return scaled.add_(_halves(blocks[:, 2:4]))


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 34)
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks[:, :2]))


_FORMATS = {
    0: _Format(1, 4, lambda raw: raw.view(torch.float32)),
    1: _Format(1, 2, lambda raw: raw.view(torch.float16)),
    2: _Format(32, 18, _q4_0),
    3: _Format(32, 20, _q4_1),
    8: _Format(32, 34, _q8_0),
    30: _Format(1, 2, lambda raw: raw.view(torch.bfloat16)),
}


def _format(type_id: int) -> _Format:
    if type_id in _FORMATS:
        return _FORMATS[type_id]
    try:
        import gguf
    except ImportError:
        raise ValueError(
            f"storage type {type_id} needs the gguf package; without it F32, F16, BF16, Q4_0, "
            f"Q4_1 and Q8_0 are read. Run: pip install '.[engine]' in onchip's folder"
        ) from None
    try:
        kind = gguf.GGMLQuantizationType(type_id)
    except ValueError:
        raise ValueError(
            f"storage type {type_id} is unknown; allowed: F32, F16, BF16 and ggml's block types. "
            f"Quantise it to one of them."
        ) from None

    def decode(raw: Tensor) -> Tensor:
        try:
            return torch.from_numpy(gguf.dequantize(raw.numpy(), kind))
        except NotImplementedError:
            raise ValueError(
                f"storage type {kind.name} can't be dequantised; allowed: F32, F16, BF16, Q4_0, "
                f"Q4_1, Q8_0 and K-quants. Quantise the model to one of them."
            ) from None

    return _Format(*gguf.GGML_QUANT_SIZES[kind], decode)
