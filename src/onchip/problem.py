"""The one vocabulary: what an attention call asks for, without its data.

A `Problem` is everything that decides which kernel may run and what the call costs: shapes,
dtypes, layouts and features. It is frozen and hashable, so dispatch, cost model, tests and
benchmarks all speak of the same thing. The data travel beside it as `Tensors`.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch


class Op(str, enum.Enum):
    """Which part of the work a kernel is asked for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STORE = "store"  # append keys and values to a paged cache


class Layout(str, enum.Enum):
    """How a sequence dimension lies in memory."""

    DENSE = "dense"  # (B, S, H, D)
    PACKED = "packed"  # (T, H, D), sequences cut by cu_seqlens
    PAGED = "paged"  # (P, N, H_kv, D), pages found through block_table


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: a band, aligned to the bottom right corner.

    Query i sees key j iff ``i + S_k - S_q - left <= j <= i + S_k - S_q + right``; -1 is
    unbounded on that side. Causal is ``right == 0``.

    Args:
        left: keys before the query's own position, -1 for all of them.
        right: keys after the query's own position, -1 for all of them.
    """

    left: int = -1
    right: int = -1

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int]) -> Mask:
        """The mask of a call's `causal` and `window` arguments (causal makes right 0)."""
        return cls(window[0], 0 if causal else window[1])

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.right == 0

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.left < 0 and self.right < 0

    def key_range(self, row_start: int, row_end: int, seqlen_q: int, seqlen_k: int) -> range:
        """Keys that at least one query of rows [row_start, row_end) sees."""
        shift = seqlen_k - seqlen_q
        start = 0 if self.left < 0 else max(0, row_start + shift - self.left)
        end = seqlen_k if self.right < 0 else min(seqlen_k, row_end + shift + self.right)
        return range(start, max(start, end))

    def row_range(self, seqlen_q: int, seqlen_k: int) -> range:
        """Queries that see at least one key: always one contiguous run."""
        shift = seqlen_k - seqlen_q
        if seqlen_k == 0:
            return range(0)
        start = 0 if self.right < 0 else max(0, -shift - self.right)
        end = seqlen_q if self.left < 0 else min(seqlen_q, seqlen_k - shift + self.left)
        return range(start, max(start, end))

    def num_visible(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of (query, key) pairs of one head that the mask lets through."""
        shift = seqlen_k - seqlen_q
        above = 0 if self.right < 0 else _pairs_beyond(seqlen_q, seqlen_k, shift + self.right)
        # Mirrored: keys hidden on the left become keys hidden on the right.
        below = 0 if self.left < 0 else _pairs_beyond(seqlen_q, seqlen_k, self.left)
        return seqlen_q * seqlen_k - above - below


def _pairs_beyond(seqlen_q: int, seqlen_k: int, offset: int) -> int:
    """Number of pairs with ``j > i + offset`` in a seqlen_q x seqlen_k rectangle."""
    # Row i hides clamp(seqlen_k - 1 - offset - i, 0, seqlen_k) keys: a run of full rows,
    # then an arithmetic series down to zero.
    first = seqlen_k - 1 - offset
    full_rows = min(seqlen_q, max(0, first - seqlen_k))
    high = min(seqlen_k, first - full_rows)
    terms = max(0, min(seqlen_q - full_rows, high))
    return full_rows * seqlen_k + terms * high - terms * (terms - 1) // 2


@dataclass(frozen=True)
class Problem:
    """What one attention call asks for.

    Args:
        op: forward, backward or store.
        device: "cpu", "cuda", ... (a torch device type).
        arch: "sm_90", "gfx942", ...; empty on a CPU.
        dtype: of q and of the output.
        kv_dtype: of k and v (differs from `dtype` only for a quantised cache).
        layout_q: dense or packed.
        layout_k: dense, packed or paged.
        batch: B, number of sequences.
        seqlen_q: longest query length (the exact one when dense).
        seqlen_k: longest key length (the exact one when dense).
        tokens_q: query tokens of all sequences.
        num_heads: H.
        num_kv_heads: H_kv.
        head_dim: D.
        head_dim_v: D_v.
        mask: which keys a query sees.
        scale: factor on Q K^T.
        softcap: 0 for none.
        alibi: dimensions of the slopes: 0 none, 1 for (H,), 2 for (B, H).
        sinks: whether exp(sink) joins each denominator.
        page_size: N, tokens of a page; 0 when not paged.
        num_pages: P, pages in the cache; 0 when not paged.
        seqused_k: whether a tensor cuts the key lengths short.
        leftpad: whether a tensor says where each sequence's keys begin.
        kv_scales: whether k_scale and v_scale are given.
        deterministic: whether gradients must be bitwise equal from run to run.
        num_splits: splits of the keys; 0 lets the kernel choose.
        copies: names of inputs that are copied first, since their last stride is not 1.
        unaligned: names of inputs that TMA couldn't read in place, see `is_unaligned`.
        dropout_p: probability that an entry of P is dropped; 0 for none.
        score_mod: key of the user's score function (`onchip.mods`); empty for none.
        mask_mod: key of the user's mask function; empty for none.
        aux_grad: whether the score function's own tensors want gradients.
        block_list: queries and keys of a block of the mask function's list; empty without one.
        out_dtype: name of the output's dtype where it is not q's; empty where it is.
    """

    op: Op
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout_q: Layout
    layout_k: Layout
    batch: int
    seqlen_q: int
    seqlen_k: int
    tokens_q: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    scale: float
    arch: str = ""
    softcap: float = 0.0
    alibi: int = 0
    sinks: bool = False
    page_size: int = 0
    num_pages: int = 0
    seqused_k: bool = False
    leftpad: bool = False
    kv_scales: bool = False
    deterministic: bool = False
    num_splits: int = 0
    copies: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    dropout_p: float = 0.0
    score_mod: str = ""
    mask_mod: str = ""
    aux_grad: bool = False
    block_list: tuple[int, ...] = ()
    out_dtype: str = ""

    @classmethod
    def of(cls, op: Op, tensors: Tensors, params: Params) -> Problem:
        """The Problem that these tensors and parameters pose."""
        q, k = tensors.q, tensors.k
        offsets = tensors.cu_seqlens_q
        dense_q = offsets is None
        paged = tensors.block_table is not None
        dense_k = not paged and tensors.cu_seqlens_k is None
        batch = q.shape[0] if offsets is None else offsets.shape[0] - 1
        inputs = {"q": q, "k": k, "v": tensors.v}
        return cls(
            op=op,
            device=q.device.type,
            arch=device_arch(q.device),
            dtype=q.dtype,
            kv_dtype=k.dtype,
            layout_q=Layout.DENSE if dense_q else Layout.PACKED,
            layout_k=Layout.PAGED if paged else Layout.DENSE if dense_k else Layout.PACKED,
            batch=batch,
            seqlen_q=params.max_seqlen_q,
            seqlen_k=params.max_seqlen_k,
            tokens_q=q.shape[0] * q.shape[1] if dense_q else q.shape[0],
            num_heads=q.shape[-2],
            num_kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=dim_v_of(tensors),
            mask=Mask(params.window_left, params.window_right),
            scale=params.scale,
            softcap=params.softcap,
            alibi=0 if tensors.alibi_slopes is None else tensors.alibi_slopes.dim(),
            sinks=tensors.sinks is not None,
            page_size=k.shape[1] if paged else 0,
            num_pages=k.shape[0] if paged else 0,
            seqused_k=tensors.seqused_k is not None,
            leftpad=tensors.leftpad_k is not None,
            kv_scales=tensors.k_scale is not None or tensors.v_scale is not None,
            deterministic=params.deterministic,
            num_splits=params.num_splits,
            copies=tuple(name for name, x in inputs.items() if needs_copy(x)),
            unaligned=_unaligned_names(tensors),
            dropout_p=params.dropout_p,
            score_mod=params.score_mod,
            mask_mod=params.mask_mod,
            aux_grad=params.aux_grad,
            block_list=(params.block_q, params.block_k) if tensors.block_list else (),
            out_dtype=params.out_dtype,
        )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def features(self) -> frozenset[str]:
        """Names of the optional features this call uses."""
        used = {
            "causal": self.mask.causal,
            "window": self.mask.left >= 0 or self.mask.right > 0,
            "softcap": self.softcap > 0,
            "alibi": self.alibi > 0,
            "sinks": self.sinks,
            "gqa": self.group > 1,
            "head_dim_v": self.head_dim_v != self.head_dim,
            "seqused_k": self.seqused_k,
            "leftpad": self.leftpad,
            "kv_scales": self.kv_scales,
            "dropout": self.dropout_p > 0,
            "score_mod": bool(self.score_mod),
            "mask_mod": bool(self.mask_mod),
        }
        return frozenset(name for name, on in used.items() if on)

    def describe(self) -> str:
        """One line for people."""
        dtype = str(self.dtype).removeprefix("torch.")
        keys = f"{self.layout_k.value} keys"
        if self.layout_k is Layout.PAGED:
            keys += f" (pages of {self.page_size})"
        words = [
            f"{self.op.value}: B={self.batch} S_q={self.seqlen_q} S_k={self.seqlen_k}",
            f"H={self.num_heads} H_kv={self.num_kv_heads} D={self.head_dim}",
            f"D_v={self.head_dim_v} {dtype} on {self.device},",
            f"{self.layout_q.value} queries, {keys}",
        ]
        line = " ".join(words)
        extras = sorted(self.features - {"gqa", "head_dim_v"})
        extras += ["deterministic"] * self.deterministic
        return line + (", " + ", ".join(extras) if extras else "")

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value):
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mask):
        return {"left": value.left, "right": value.right}
    return list(value) if isinstance(value, tuple) else value


@dataclass(slots=True)
class Tensors:
    """The data of one call, as every kernel receives them.

    Args:
        q: (B, S_q, H, D) or packed (T_q, H, D).
        k: (B, S_k, H_kv, D), packed (T_k, H_kv, D) or pages (P, N, H_kv, D).
        v: as k, with D_v.
        cu_seqlens_q: (B + 1,) int32, packed queries only.
        cu_seqlens_k: (B + 1,) int32, packed keys only.
        block_table: (B, max_pages) int32, paged keys only.
        seqused_k: (B,) int32, keys valid in each sequence.
        leftpad_k: (B,) int32, first key valid in each sequence.
        alibi_slopes: (H,) or (B, H) float32.
        sinks: (H,) logits that join each denominator.
        k_scale: (H_kv,) float32, factor on the stored keys.
        v_scale: (H_kv,) float32, factor on the stored values.
        dropout_rng: (2,) int64, seed and offset of the dropout's stream; drawn from torch's
            generator where dropout is asked for and none is given.
        score_aux: the user's tensors for `Params.score_mod`.
        mask_aux: the user's tensors for `Params.mask_mod`.
        block_list: int32 tensors that name the tiles to visit: counts (B or 1, H or 1, blocks)
            and indices (..., most) of key blocks for each query block, then the same of query
            blocks for each key block; or none. Each list ascends.
        scales: of float8 q, k and v, each (B, H or H_kv, blocks), see `kernels.fp8_layout`; none
            otherwise. v is then (B, H_kv, D_v, columns) or (H_kv, D_v, columns).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    dropout_rng: torch.Tensor | None = None
    score_aux: Sequence[torch.Tensor] = ()
    mask_aux: Sequence[torch.Tensor] = ()
    block_list: Sequence[torch.Tensor] = ()
    scales: Sequence[torch.Tensor] = ()


class Params(NamedTuple):
    """The numbers of one call, beside its tensors.

    Args:
        max_seqlen_q: longest query length.
        max_seqlen_k: longest key length.
        window_left: `Mask.left`.
        window_right: `Mask.right`.
        scale: factor on Q K^T.
        softcap: 0 for none.
        deterministic: whether gradients must be bitwise equal from run to run.
        num_splits: splits of the keys; 0 lets the kernel choose.
        kernel: name of the kernel to force; empty for the first that takes the problem.
        dropout_p: probability that an entry of P is dropped; 0 for none.
        score_mod: key of the user's score function; empty for none.
        mask_mod: key of the user's mask function; empty for none.
        aux_grad: whether `Tensors.score_aux` want gradients.
        block_q: queries of a block of `Tensors.block_list`.
        block_k: keys of a block.
        out_dtype: name of the output's dtype; empty for q's.
    """

    max_seqlen_q: int
    max_seqlen_k: int
    window_left: int
    window_right: int
    scale: float
    softcap: float
    deterministic: bool
    num_splits: int
    kernel: str
    dropout_p: float = 0.0
    score_mod: str = ""
    mask_mod: str = ""
    aux_grad: bool = False
    block_q: int = 0
    block_k: int = 0
    out_dtype: str = ""


@dataclass(slots=True)
class Saved:
    """What a backward receives beside the inputs.

    Args:
        dout: gradient of the output, as out.
        dlse: gradient of the LSE, as lse, or None when nothing arrived on it.
        out: the forward's output.
        lse: the forward's LSE, natural log, float32 (float64 for float64 inputs).
        aux_sums: zeros in float32, shaped as `Tensors.score_aux`: a kernel adds the gradients
            of those to them. Empty when none are wanted.
    """

    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    aux_sums: Sequence[torch.Tensor] = ()


@dataclass(slots=True)
class NewTokens:
    """What an append receives: tokens that go after those in a cache, and how they turn.

    Args:
        q: (B, S_q, H, D), turned like the last of the new keys.
        k: (B, S_new, H_kv, D).
        v: (B, S_new, H_kv, D_v).
        k_cache: pages (P, N, H_kv, D), written to.
        v_cache: (P, N, H_kv, D_v), written to.
        cache_seqlens: (B,) int32, tokens of each sequence before this call.
        block_table: (B, max_pages) int32.
        slot_mapping: (B * S_new,), slots instead of those that table and lengths give.
        rotary_cos: (S_max, rotary_dim / 2); None turns nothing.
        rotary_sin: as rotary_cos.
        k_scale: (H_kv,) float32, stored keys are k / k_scale.
        v_scale: (H_kv,) float32, stored values are v / v_scale.
        interleaved: whether features turn in pairs (0, 1), (2, 3), ... and not as halves.
        in_order: whether queries stand at the positions of the last new tokens, and not all of
            them at the first one's.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    interleaved: bool = False
    in_order: bool = True

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors, in order."""
        return (
            self.q,
            self.k,
            self.v,
            self.k_cache,
            self.v_cache,
            self.cache_seqlens,
            self.block_table,
            self.slot_mapping,
            self.rotary_cos,
            self.rotary_sin,
            self.k_scale,
            self.v_scale,
        )


def dim_v_of(tensors: Tensors) -> int:
    """D_v; float8 values have their keys in the last dimension."""
    return tensors.v.shape[-2 if tensors.scales else -1]


def needs_copy(x: torch.Tensor) -> bool:
    """Whether kernels can't read this tensor in place: its last dimension is not contiguous."""
    return x.shape[-1] > 1 and x.stride(-1) != 1


def is_unaligned(x: torch.Tensor) -> bool:
    """Whether TMA can't read this tensor: rows off 16 bytes, or an expanded dimension.

    Tensors that are copied first are not meant, nor those without memory.
    """
    if x.is_meta or type(x).__name__ == "FakeTensor" or needs_copy(x):
        return False
    *strides, _ = x.stride()
    mixed = x.data_ptr()
    for stride in strides:
        mixed |= stride * x.element_size()
    if mixed & 15 == 0 and 0 not in strides:
        return False  # almost every call
    return bool(x.data_ptr() & 15) or any(
        n > 1 and (stride * x.element_size() % 16 > 0 or stride == 0)
        for n, stride in zip(x.shape, strides, strict=False)
    )


def unaligned(tensors: Tensors) -> tuple[str, ...]:
    """`Problem.unaligned` of a call."""
    return _unaligned_names(tensors) if tensors.q.is_cuda else ()


def _unaligned_names(tensors: Tensors) -> tuple[str, ...]:
    """The same on any device: a CPU's tensors may be explained for a GPU."""
    return tuple(name for name in ("q", "k", "v") if is_unaligned(getattr(tensors, name)))


@lru_cache(maxsize=None)
def device_arch(device: torch.device) -> str:
    """The GPU architecture's name: "sm_90", "gfx942"; empty for a CPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
