"""Float8 attention: q, k and v quantised once, and the calls that take them so.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip import prepare, validate, values
from onchip.kernels.fp8_layout import (
    BLOCK_K,
    BLOCK_Q,
    FLOAT8,
    SMALLEST,
    Quantiser,
    Source,
    expanded,
    num_blocks,
)
from onchip.prepare import Call, Mods, Options
from onchip.problem import Params, Tensors, device_arch
from onchip.validate import reject

SCALES = ("block", "head", "tensor")
_NO_BACKWARD = (
    "Float8 has no backward: call it under torch.no_grad(), or attention itself to train."
)
#: Of packed sequences whose lengths the caller does not bound.
_ANY_LENGTHS = Params(2**31, 2**31, -1, -1, 1.0, 0.0, False, 0, "")
_INPUTS = (torch.float16, torch.bfloat16, torch.float32)
_lib = torch.library.Library("onchip", "FRAGMENT")
_lib.define(
    "quantize_qkv(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? rotary_cos, Tensor? rotary_sin, str scale, bool hadamard, "
    "bool rotary_interleaved) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, eq=False)
class FP8QKV:
    """Quantised q, k and v: what `onchip.attention` takes in their place.

    The layout, also of packed sequences, is that of `onchip.kernels.fp8_layout`.

    Args:
        q: (B, S_q, H, D) or packed (T_q, H, D), float8_e4m3fn.
        k: (B, S_k, H_kv, D) or packed (T_k, H_kv, D).
        v: (B, H_kv, D_v, columns) or packed (H_kv, D_v, columns), keys in the order that the
            tensor cores take.
        q_scale: (B, H, blocks) float32: q is close to codes * scale; blocks of 64 rows, of
            stride 0 where they share a scale.
        k_scale: (B, H_kv, blocks), blocks of 128 rows.
        v_scale: as k_scale.
        dtype: of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    dtype: torch.dtype

    @property
    def is_packed(self) -> bool:
        """Whether sequences are packed, for `onchip.attention_varlen`."""
        return self.q.dim() == 3


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: str = "block",
    hadamard: bool = True,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> FP8QKV:
    """Quantises q, k and v to float8_e4m3fn for `attention` and `attention_varlen`.

    No gradient. A NaN or Inf in q makes its row NaN; one in k or v makes NaN what sees that key.

    Args:
        q: (B, S_q, H, D) or packed (T_q, H, D); float16, bfloat16 or float32.
        k: (B, S_k, H_kv, D) or packed (T_k, H_kv, D), q's dtype.
        v: as k, with D_v.
        scale: what shares a scale: "block" (64 queries or 128 keys of a head), "head" (a
            sequence's head) or "tensor".
        hadamard: multiply q and k by the same orthogonal matrix, which leaves Q K^T as it is
            and spreads outliers over their row.
        cu_seqlens_q: (B + 1,) int32, for packed q; pass the same to `attention_varlen`.
        cu_seqlens_k: (B + 1,) int32, for packed k and v.
        seqused_k: (B,) int32, only the first so many keys of each packed sequence count.
        rotary_cos: (S_max, rotary_dim / 2): rotates q and k first. Key j stands at position j,
            the last query at the last key's.
        rotary_sin: as rotary_cos.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... instead of halves.

    Returns:
        An `FP8QKV`, of q's dtype.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    source = Source(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, rotary_cos, rotary_sin)
    how = Quantiser(scale, hadamard, rotary_interleaved)
    _check(source, how)
    parts = torch.ops.onchip.quantize_qkv(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        rotary_cos,
        rotary_sin,
        scale,
        hadamard,
        rotary_interleaved,
    )
    return FP8QKV(*parts, dtype=q.dtype)


def from_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> FP8QKV:
    """Takes q, k and v that are float8_e4m3fn already; v is transposed by a pass of its own.

    Args:
        q: (B, S_q, H, D) or packed (T_q, H, D), float8_e4m3fn.
        k: (B, S_k, H_kv, D) or packed (T_k, H_kv, D).
        v: as k, with D_v.
        q_descale: (B, H_kv) float32: q stands for q * q_descale in all query heads of a KV head;
            None for 1.
        k_descale, v_descale: as q_descale.
        cu_seqlens_q, cu_seqlens_k, seqused_k: as `quantize_qkv`.
        dtype: of the output.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    source = Source(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k)
    _check_tensors(source, (FLOAT8,))
    if dtype not in _INPUTS:
        reject("dtype", dtype, "float16, bfloat16 or float32", "Choose one.", TypeError)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    shape, group = (batch, k.shape[-2]), q.shape[-2] // k.shape[-2]
    given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    scales = [_descale(name, x, q, shape) for name, x in given.items()]
    scales[0] = scales[0].repeat_interleave(group, 1)
    scales[2] = scales[2].where(scales[2] != 0, SMALLEST)  # kernels divide by it
    n_q = num_blocks(q.shape[-3], None if cu_seqlens_q is None else batch, BLOCK_Q)
    n_k = num_blocks(k.shape[-3], None if cu_seqlens_k is None else batch, BLOCK_K)
    blocks = (n_q, n_k, n_k)
    parts = (expanded(s, n) for s, n in zip(scales, blocks, strict=True))
    return FP8QKV(q, *_implementation(k).relaid(source), *parts, dtype=dtype)


def _descale(name: str, x: Tensor | None, q: Tensor, shape: tuple[int, int]) -> Tensor:
    if x is None:
        return torch.ones(shape, device=q.device)
    validate.tensor(name, x)
    validate.same_device(name, x, q)
    if x.dtype != torch.float32:
        reject(name, f"dtype {x.dtype}", "float32", f"Use {name}.float().", TypeError)
    if tuple(x.shape) != shape:
        allowed = f"(B, H_kv) = {shape}"
        reject(name, f"shape {tuple(x.shape)}", allowed, "One scale for each sequence and head.")
    return x


def _check(source: Source, how: Quantiser) -> None:
    if how.scale not in SCALES:
        allowed = ", ".join(map(repr, SCALES))
        reject("scale", repr(how.scale), allowed, "Use 'block' for the smallest error.")
    validate.flag("hadamard", how.hadamard)
    validate.interleaving(how.rotary_interleaved, source.rotary_cos)
    _check_tensors(source, _INPUTS)
    cos, sin = source.rotary_cos, source.rotary_sin
    if (cos is None) != (sin is None):
        missing = "rotary_cos" if cos is None else "rotary_sin"
        reject(missing, None, "both or none of rotary_cos, rotary_sin", "Pass both.", TypeError)
    if cos is not None and sin is not None:
        validate.rotary_tables(cos, sin, source.q)
        _check_positions(source, cos.shape[0])


def _check_positions(s: Source, num_positions: int) -> None:
    """Requires rotary tables that reach each key, and queries that have a key's position."""
    lengths = [(s.q.shape[1], s.k.shape[1])] if s.cu_seqlens_q is None else []
    if s.cu_seqlens_q is not None and values.visible(s.q):
        assert s.cu_seqlens_k is not None
        keys = s.cu_seqlens_k.diff() if s.seqused_k is None else s.seqused_k
        lengths = list(zip(s.cu_seqlens_q.diff().tolist(), keys.tolist(), strict=True))
    for num_queries, num_keys in lengths:
        if num_queries > num_keys > 0:
            got, allowed = f"{num_queries} queries", f"up to {num_keys}, the keys, with rotary_cos"
            reject("q", got, allowed, "Each query stands at the position of a key, as the last do.")
        values.rotary_reach(num_positions, num_keys)


def _check_tensors(s: Source, dtypes: tuple[torch.dtype, ...]) -> None:
    validate.tensor("q", s.q)
    if s.q.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        reject("q", f"dtype {s.q.dtype}", names, "Cast q, k and v to one of these.", TypeError)
    packed = s.cu_seqlens_q is not None
    validate.queries_and_keys(s.q, s.k, s.v, *(3, 3) if packed else (4, 4), dtypes=dtypes)
    validate.no_gradient(_NO_BACKWARD, q=s.q, k=s.k, v=s.v)
    if s.cu_seqlens_q is not None:
        validate.varlen_offsets(Tensors(s.q, s.k, s.v, s.cu_seqlens_q, s.cu_seqlens_k))
        batch = s.cu_seqlens_q.shape[0] - 1
        if s.seqused_k is not None:
            validate.index_tensor("seqused_k", s.seqused_k, s.q, (batch,), "(B,)")
        if values.visible(s.q):
            offsets = (s.cu_seqlens_q, s.cu_seqlens_k)
            values.varlen_values(
                Tensors(s.q, s.k, s.v, *offsets, seqused_k=s.seqused_k), _ANY_LENGTHS
            )
        return
    validate.dense_batch(s.q, s.k)
    for name in ("cu_seqlens_k", "seqused_k"):
        if getattr(s, name) is not None:
            reject(name, "a tensor", "None without cu_seqlens_q", "Pack all or none.", TypeError)


def _implementation(x: Tensor):
    """The module that quantises on x's device: one launch of Triton's, or torch."""
    on_gpu = x.device.type == "cuda" and x.shape[-1] <= 256
    name = "portable.quantise" if on_gpu else "fp8_quantise"
    return importlib.import_module(f"onchip.kernels.{name}")


def _quantiser(source: Source, how: Quantiser):
    """The module that quantises: on Hopper its own, of what that takes."""
    if device_arch(source.q.device) == "sm_90":
        hopper = importlib.import_module("onchip.kernels.hopper.fp8_quantise")
        if hopper.takes(source, how):
            return hopper
    return _implementation(source.q)


def _quantize_op(q, k, v, cu_q, cu_k, used, cos, sin, scale, hadamard, interleaved):
    source, how = (
        Source(q, k, v, cu_q, cu_k, used, cos, sin),
        Quantiser(scale, hadamard, interleaved),
    )
    return _quantiser(source, how).quantise(source, how)


def _quantize_fake(q, k, v, cu_q, cu_k, used, cos, sin, scale, hadamard, interleaved):
    packed = cu_q is not None
    batch = cu_q.shape[0] - 1 if packed else q.shape[0]
    n_q = num_blocks(q.shape[-3], batch if packed else None, BLOCK_Q)
    n_k = num_blocks(k.shape[-3], batch if packed else None, BLOCK_K)
    lead = () if packed else (batch,)
    columns = k.new_empty(*lead, *v.shape[-2:], n_k * BLOCK_K, dtype=FLOAT8)

    def scales(x: Tensor, n: int) -> Tensor:
        shape = (1 if packed else batch, x.shape[-2], n) if scale == "block" else None
        if shape is None:
            tops = q.new_empty(batch, x.shape[-2], dtype=torch.float32)
            return expanded(tops, n)
        return q.new_empty(shape, dtype=torch.float32).expand(batch, -1, -1)

    codes = (torch.empty(x.shape, dtype=FLOAT8, device=x.device) for x in (q, k))
    return (*codes, columns, scales(q, n_q), scales(k, n_k), scales(v, n_k))


_lib.impl("quantize_qkv", _quantize_op, "CompositeExplicitAutograd")
torch.library.register_fake("onchip::quantize_qkv", _quantize_fake, lib=_lib)


def tensors_of(q, k, v, **others) -> Tensors:
    """The tensors of a call, whose q may be an `FP8QKV`."""
    return Tensors(q, k, v, **others)


def dense(t: Tensors, options: Options, mods: Mods) -> Call:
    """`prepare.dense`, also of an `FP8QKV` in place of q, k and v.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    if not isinstance(t.q, FP8QKV):
        _check_given(t)
        return prepare.dense(t, options, mods)
    x = _unpacked(t, is_packed=False)
    validate.features(x.q, x.q.shape[0], options, t.alibi_slopes, t.sinks)
    return _call(t, x, (x.q.shape[1], x.k.shape[1]), options, mods)


def varlen(t: Tensors, max_seqlen_q: int, max_seqlen_k: int, options: Options, mods: Mods) -> Call:
    """`prepare.varlen`, also of an `FP8QKV` in place of q, k and v.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    if not isinstance(t.q, FP8QKV):
        _check_given(t)
        return prepare.varlen(t, max_seqlen_q, max_seqlen_k, options, mods)
    x = _unpacked(t, is_packed=True)
    if t.block_table is not None:
        fix = "Quantised pages are for attention_with_kvcache, with 16-bit queries."
        reject("block_table", "a tensor", "None with an FP8QKV", fix, TypeError)
    validate.count("max_seqlen_q", max_seqlen_q, 0)
    validate.count("max_seqlen_k", max_seqlen_k, 0)
    t.q, t.k = x.q, x.k
    validate.varlen_offsets(t)
    assert t.cu_seqlens_q is not None
    batch = t.cu_seqlens_q.shape[0] - 1
    if batch != x.q_scale.shape[0]:
        fix = "Pass the offsets that quantize_qkv had."
        got = f"{batch} sequences"
        reject("cu_seqlens_q", got, f"{x.q_scale.shape[0]}, those of the FP8QKV", fix)
    if t.seqused_k is not None:
        validate.index_tensor("seqused_k", t.seqused_k, x.q, (batch,), "(B,)")
    validate.features(x.q, batch, options, t.alibi_slopes, t.sinks)
    call = _call(t, x, (max_seqlen_q, max_seqlen_k), options, mods)
    if values.visible(x.q):
        values.varlen_values(t, call.params)
    return call


def _check_given(t: Tensors) -> None:
    if t.k is None or t.v is None:
        fix = "Only an onchip.FP8QKV goes without k and v."
        reject("k" if t.k is None else "v", None, "a torch.Tensor", fix, TypeError)


def _unpacked(t: Tensors, is_packed: bool) -> FP8QKV:
    """The call's FP8QKV, whose form fits the call."""
    x = t.q
    assert isinstance(x, FP8QKV)
    for name in ("k", "v"):
        if getattr(t, name) is not None:
            fix = "It holds q, k and v."
            reject(name, "a tensor", "None with an FP8QKV", fix, TypeError)
    if x.is_packed != is_packed:
        other = "onchip.attention" if is_packed else "onchip.attention_varlen"
        kind = "dense" if is_packed else "packed"
        reject("q", f"an FP8QKV of {kind} sequences", "the other kind", f"Call {other}.")
    _check_fields(x)
    return x


def _check_fields(x: FP8QKV) -> None:
    """Requires scales and values that fit q and k, as those of `quantize_qkv` do."""
    packed = x.is_packed
    batch = x.q_scale.shape[0] if packed else x.q.shape[0]
    n_q, n_k = (
        num_blocks(y.shape[-3], batch if packed else None, size)
        for y, size in ((x.q, BLOCK_Q), (x.k, BLOCK_K))
    )
    lead = () if packed else (batch,)
    wanted = {
        "q_scale": (batch, x.q.shape[-2], n_q),
        "k_scale": (batch, x.k.shape[-2], n_k),
        "v_scale": (batch, x.k.shape[-2], n_k),
        "v": (*lead, x.k.shape[-2], x.v.shape[-2], n_k * BLOCK_K),
    }
    for name, shape in wanted.items():
        if tuple(getattr(x, name).shape) != shape:
            got = f"an FP8QKV with {name} of shape {tuple(getattr(x, name).shape)}"
            reject("q", got, str(shape), "Take it as quantize_qkv made it.")


def _call(t: Tensors, x: FP8QKV, longest: tuple[int, int], options: Options, mods: Mods) -> Call:
    """The operators' arguments. Mutates: t."""
    t.q, t.k, t.v = x.q, x.k, x.v
    t.scales = (x.q_scale, x.k_scale, x.v_scale)
    prepare.user_functions(mods)
    params = options.params(x.q.shape[-1], *longest)
    params = params._replace(out_dtype=str(x.dtype).removeprefix("torch."))
    if mods.score is not None:
        params = params._replace(score_mod=mods.score.key)
    if mods.mask is not None:
        params = params._replace(mask_mod=mods.mask.key)
    return Call(t, params)
