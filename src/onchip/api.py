"""The public calls: check the user's words once, then hand tensors to the operators.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size.

What all calls compute, for query i and each key j that it sees:

    S_ij = scale * q_i . k_j                      softcap > 0: S = softcap * tanh(S / softcap)
    S_ij -= slope_h * |i + S_k - S_q - j|         with alibi_slopes
    S_ij = score_mod(S_ij, ...)                   with score_mod; mask_mod hides more keys
    lse_i = log(sum_j exp S_ij + exp sink_h)      natural log; the sink only with sinks
    out_i = sum_j exp(S_ij - lse_i) v_j           with dropout, over the entries that stay

Causal is bottom-right aligned: i sees j iff j <= i + S_k - S_q. A row that sees no key is 0, with
LSE -inf (or the sink) and zero gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from onchip import cache_ops, dispatch, fp8, ops, prepare, repeats, validate
from onchip.dispatch import Explanation
from onchip.fp8 import FP8QKV
from onchip.mods import MaskMod, ScoreMod
from onchip.prepare import CacheArguments, Options, mods_of
from onchip.problem import Op, Problem


def attention(
    q: Tensor | FP8QKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    num_splits: int | None = None,
    kernel: str | None = None,
    dropout_p: float = 0.0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of dense batches; causal is bottom-right, rows without a key give 0.

    Differentiable in q, k, v and sinks, through the output and the LSE.

    Args:
        q: (B, S_q, H, D); float16, bfloat16, float32 or (CPU) float64. Or an `FP8QKV`, which
            holds k and v too; it has no gradient.
        k: (B, S_k, H_kv, D), q's dtype; H_kv divides H, query head h reads h // (H // H_kv).
        v: (B, S_k, H_kv, D_v), q's dtype.
        causal: query i sees key j iff j <= i + S_k - S_q.
        window: (left, right): i sees j iff
            i + S_k - S_q - left <= j <= i + S_k - S_q + right; -1 is unbounded. Causal makes
            right 0.
        scale: factor on Q K^T; D ** -0.5 when None.
        softcap: S = softcap * tanh(S / softcap); 0 for none.
        alibi_slopes: (H,) or (B, H) float32; adds -slope * |i + S_k - S_q - j|. No gradient.
        sinks: (H,) float; exp(sink) joins each denominator.
        return_lse: also return the LSE.
        deterministic: gradients bitwise equal from run to run (implied by
            torch.use_deterministic_algorithms).
        num_splits: splits of the keys; None lets the kernel choose, 1 makes a sequence's output
            independent of its neighbours.
        kernel: force a kernel by name; never falls back.
        dropout_p: probability in [0, 1) that an entry of P becomes 0; those that stay are
            multiplied by 1 / (1 - p). p is rounded to a multiple of 2^-16. The choice comes from
            torch's generator of q's device (torch.manual_seed, checkpointing), the same in
            forward and backward; every replay of a CUDA graph draws a new one. The LSE is that
            of all entries.
        score_mod: a function of yours that changes logits, see `onchip.ScoreMod`. Its tensors
            have gradients if it says how.
        mask_mod: a function of yours that hides keys, see `onchip.MaskMod`.

    Returns:
        out (B, S_q, H, D_v) in q's dtype; with return_lse also lse (B, H, S_q) float32 (float64
        for float64 inputs), natural log.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
        NoKernelError: if no kernel takes the problem, with every kernel's reasons.
    """
    given: tuple = (q, k, v, alibi_slopes, sinks)
    asked = None
    is_plain = type(dropout_p) is float and dropout_p == 0 and score_mod is mask_mod is None
    if is_plain and repeats.may_repeat(q):
        numbers = (return_lse, deterministic, num_splits, kernel, causal, scale, softcap, window)
        found, asked = repeats.lookup(given, numbers)
        if found is not None:
            repeat, places = found
            out, lse = repeat(given[0], places)
            return (out, lse) if return_lse else out  # type: ignore[return-value]
    run = (return_lse, deterministic, num_splits, kernel, dropout_p)
    options = Options(causal, window, scale, softcap, *run)
    tensors = fp8.tensors_of(q, k, v, alibi_slopes=alibi_slopes, sinks=sinks)
    call = fp8.dense(tensors, options, mods_of(score_mod, mask_mod))
    out, lse = ops.attention(*call)
    repeats.keep_dense(asked, given, call, return_lse)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor | FP8QKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    num_splits: int | None = None,
    kernel: str | None = None,
    dropout_p: float = 0.0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of packed sequences, over packed or paged keys.

    Sequence b owns queries cu_seqlens_q[b] to cu_seqlens_q[b + 1]; it is one attention of its
    own, causal aligned to its own bottom right corner. Lengths of 0 are allowed.

    Args:
        q: (T_q, H, D), or an `FP8QKV` of packed sequences, which holds k and v too.
        k: (T_k, H_kv, D), or pages (P, N, H_kv, D) with block_table.
        v: (T_k, H_kv, D_v), or pages (P, N, H_kv, D_v).
        cu_seqlens_q: (B + 1,) int32, starts at 0, ends at T_q.
        cu_seqlens_k: (B + 1,) int32, running sum of the key lengths (with pages: of the tokens
            in the cache that count). None only for pages with seqused_k.
        max_seqlen_q: at least the longest query length.
        max_seqlen_k: at least the longest key length.
        block_table: (B, max_pages) int32, page ids; entries past a sequence's last page are
            never read. No gradient through pages.
        seqused_k: (B,) int32, only the first so many keys of each sequence count.
        causal, window, scale, softcap, alibi_slopes, sinks: as `attention`.
        return_lse, deterministic, num_splits, kernel: as `attention`.
        dropout_p, score_mod, mask_mod: as `attention`; positions count from the sequence's own
            first query and key.

    Returns:
        out (T_q, H, D_v); with return_lse also lse (H, T_q).

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it. Values in tensors
            are checked on a CPU, and on a GPU under ONCHIP_CHECK=1.
        NoKernelError: if no kernel takes the problem, with every kernel's reasons.
    """
    run = (return_lse, deterministic, num_splits, kernel, dropout_p)
    options = Options(causal, window, scale, softcap, *run)
    tensors = fp8.tensors_of(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    mods = mods_of(score_mod, mask_mod)
    out, lse = ops.attention(*fp8.varlen(tensors, max_seqlen_q, max_seqlen_k, options, mods))
    return (out, lse) if return_lse else out


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    num_splits: int | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of new queries over a KV cache, after appending new keys and values.

    No gradient. The S_q queries of a sequence are its last ones: with causal, the last query
    sees every key and the one before it one fewer.

    Args:
        q: (B, S_q, H, D).
        k_cache: pages (P, N, H_kv, D) with block_table, else rows (B, S_max, H_kv, D); q's dtype,
            or float8_e4m3fn.
        v_cache: as k_cache, with D_v.
        cache_seqlens: (B,) int32, valid tokens of each sequence before this call.
        block_table: (B, max_pages) int32, page ids; entries past a sequence's last page are
            never read.
        k: (B, S_new, H_kv, D), appended after cache_seqlens tokens and attended too. Their
            places must not be among other sequences' cache_seqlens tokens.
        v: (B, S_new, H_kv, D_v), given with k.
        slot_mapping: (B * S_new,) int32 or int64, where k and v go (page * N + offset, of a dense
            cache row * S_max + offset, -1 not stored) instead of where block_table and
            cache_seqlens say.
        rotary_cos: (S_max, rotary_dim / 2), any floating dtype; rotates k, and q as the last of
            the new tokens, by their positions in the cache before use. Only with k, and
            S_q <= S_new. Without causal and window all queries stand at position cache_seqlens.
        rotary_sin: as rotary_cos.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... instead of halves; with rotary_cos.
        cache_batch_idx: (B,) int32, row of a dense cache for each sequence.
        cache_leftpad: (B,) int32, first valid key of each sequence.
        k_scale: () or (H_kv,) float32, stored keys are k / k_scale.
        v_scale: () or (H_kv,) float32, stored values are v / v_scale.
        causal, window, scale, softcap, alibi_slopes, sinks: as `attention`.
        return_lse, deterministic, num_splits, kernel: as `attention`.

    Returns:
        out (B, S_q, H, D_v); with return_lse also lse (B, H, S_q).

    Mutates:
        k_cache, v_cache: the slots of the appended tokens, when k and v are given.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it; nothing was appended.
        NoKernelError: if no kernel takes the problem; nothing was appended.
    """
    given = (
        q, k_cache, v_cache, cache_seqlens, block_table, k, v, slot_mapping, rotary_cos,
        rotary_sin, cache_batch_idx, cache_leftpad, k_scale, v_scale, alibi_slopes, sinks,
    )  # fmt: skip
    asked = None
    if not torch.compiler.is_compiling():
        numbers = (
            return_lse, deterministic, num_splits, kernel, rotary_interleaved, causal, scale,
            softcap, window,
        )  # fmt: skip
        found, asked = repeats.lookup(given, numbers)
        if found is not None:
            repeat, places = found
            out, lse = repeat(q, places)
            if repeat.appends:
                cache_ops.mark_written(k_cache, v_cache)
            return (out, lse) if return_lse else out  # type: ignore[return-value]
    run = (return_lse, deterministic, num_splits, kernel)
    options = Options(causal, window, scale, softcap, *run)
    arguments = CacheArguments(*given)
    call, new = prepare.kvcache(arguments, rotary_interleaved, options)
    done = None
    if new is not None:
        done = cache_ops.append_and_attend(call.tensors, call.params, new)
        if done is None:
            call.tensors.q, call.tensors.seqused_k = cache_ops.append(new)
    out, lse = ops.attention(*call) if done is None else done
    repeats.keep(asked, given, call, new, return_lse, done is not None)
    return (out, lse) if return_lse else out


def store_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes new keys and values into the slots of a paged cache, without their autograd graph.

    Args:
        k: (T, H_kv, D).
        v: (T, H_kv, D_v).
        k_cache: (P, N, H_kv, D), k's dtype or float8_e4m3fn.
        v_cache: (P, N, H_kv, D_v), k_cache's dtype.
        slot_mapping: (T,) int32 or int64, page * N + offset; -1 stores nothing.
        k_scale: () or (H_kv,) float32, stored keys are k / k_scale.
        v_scale: () or (H_kv,) float32, stored values are v / v_scale.

    Mutates:
        k_cache, v_cache: the slots named.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it; nothing was stored.
        NoKernelError: if no kernel stores on this device; nothing was stored.
    """
    prepare.store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    scales = (prepare.per_head(k_scale, k_cache), prepare.per_head(v_scale, v_cache))
    cache_ops.store_op(k.detach(), v.detach(), k_cache, v_cache, slot_mapping, *scales)


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys into attention over all of them.

    Differentiable. lse = log(sum_s exp(lse_s)), out = sum_s exp(lse_s - lse) out_s, in float32
    (float64 for float64). A part that saw no key (LSE -inf) weighs nothing; of rows that no part
    saw, out is 0 and the LSE -inf.

    Args:
        outs: the parts, each (B, S_q, H, D_v) or packed (T_q, H, D_v).
        lses: their LSEs, each (B, H, S_q) or (H, T_q), natural log.

    Returns:
        out as one of outs; lse as one of lses.

    Raises:
        ValueError, TypeError: if there are no parts or they do not fit each other.
    """
    validate.states(outs, lses)
    merged = ops.merge(outs, lses)
    if merged is not None:
        return merged
    dtype = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    parts = torch.stack([lse.to(dtype) for lse in lses])  # (parts, ..., H, S_q)
    top = parts.detach().amax(0)
    top = top.where(top.isfinite(), 0.0)
    mass = (parts - top).exp()
    total = mass.sum(0)
    empty = total == 0
    # The inner `where` keeps 1 / 0 and log 0 out of the gradient of rows that saw nothing.
    weights = mass / total.where(~empty, 1.0)
    lse = (total.where(~empty, 1.0).log() + top).where(~empty, -torch.inf)
    weights = weights.transpose(-1, -2).unsqueeze(-1)  # (parts, ..., S_q, H, 1)
    # A part without mass counts for nothing, whatever its output holds.
    parts_out = torch.stack([o.to(dtype) for o in outs]).where(weights != 0, 0.0)
    out = (parts_out * weights).sum(0)
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


def explain(*args, **kwargs) -> Explanation:
    """What a call would do and cost: the kernel, why not the others, FLOPs, bytes, copies.

    Runs nothing, writes nothing and imports no kernel.

    Args:
        *args, **kwargs: those of `attention`; with cu_seqlens_q those of `attention_varlen`,
            with cache_seqlens those of `attention_with_kvcache`.

    Returns:
        An `Explanation`; print it, or take `to_dict()`. When an input requires a gradient, its
        `backward` explains the backward.

    Raises:
        ValueError, TypeError: as the call itself would. A problem that no kernel takes is
            explained, not raised.
    """
    call = attention
    if "cache_seqlens" in kwargs:
        call = attention_with_kvcache
    elif "cu_seqlens_q" in kwargs:
        call = attention_varlen
    bound = inspect.signature(call).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    options = Options(**{name: given.pop(name) for name in Options._fields if name in given})
    tensors, params, _ = _prepare(call, given, options)
    problem = Problem.of(Op.FORWARD, tensors, params)
    trains = ops.needs_grad(tensors)
    backward = Problem.of(Op.BACKWARD, tensors, params) if trains else None
    return dispatch.explain(problem, options.kernel, backward)


def _prepare(call, given: dict, options: Options) -> prepare.Call:
    """The operators' arguments for a public call's bound arguments."""
    if call is attention_with_kvcache:
        interleaved = given.pop("rotary_interleaved")
        return prepare.kvcache(CacheArguments(**given), interleaved, options)[0]
    mods = mods_of(given.pop("score_mod"), given.pop("mask_mod"))
    if call is attention_varlen:
        longest = (given.pop("max_seqlen_q"), given.pop("max_seqlen_k"))
        return fp8.varlen(fp8.tensors_of(**given), *longest, options, mods)
    return fp8.dense(fp8.tensors_of(**given), options, mods)
