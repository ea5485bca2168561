"""The oracle: dense attention and its backward, written out by hand, in float64 by default.

Nothing here is fast: S and P are whole matrices. It defines what every kernel must compute.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Gradients(NamedTuple):
    """Gradients of one call, shaped as its inputs; dsinks is None without sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


class Extras(NamedTuple):
    """Dropout and user functions, as whole matrices (B, H, S_q, S_k) or what broadcasts to them.

    Args:
        keep: bool, entries of P that dropout leaves; None for no dropout.
        dropout_p: probability that one was dropped.
        score_mod: logits -> logits, differentiable; before the mask.
        mask: bool, pairs that are let through.
    """

    keep: Tensor | None = None
    dropout_p: float = 0.0
    score_mod: Callable[[Tensor], Tensor] | None = None
    mask: Tensor | None = None

    def dropped(self, x: Tensor) -> Tensor:
        """x / (1 - p) where kept, else 0."""
        return x if self.keep is None else (x / (1 - self.dropout_p)).where(self.keep, 0.0)


_NOTHING = Extras()


class _Scores(NamedTuple):
    q: Tensor  # (B, H, S_q, D)
    k: Tensor  # (B, H, S_k, D), each KV head repeated for its query heads
    v: Tensor  # (B, H, S_k, D_v)
    scale: float
    capped: Tensor  # (B, H, S_q, S_k), after scale and softcap
    natural: Tensor  # (B, H, S_q, S_k), after ALiBi, before score_mod
    s: Tensor  # (B, H, S_q, S_k), after score_mod and mask
    seen: Tensor  # (S_q, S_k) bool, or (B, H, S_q, S_k)


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Which key each query sees: ``i' - left <= j <= i' + right``, ``i' = i + S_k - S_q``.

    Args:
        seqlen_q: S_q.
        seqlen_k: S_k.
        causal: makes right 0, whatever the window says.
        window: (left, right), -1 for unbounded on that side.

    Returns:
        (S_q, S_k) bool.
    """
    left, right = window[0], 0 if causal else window[1]
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def _scores(q, k, v, causal, window, scale, softcap, alibi_slopes, dtype, extras=None) -> _Scores:
    group = q.shape[2] // k.shape[2]
    assert group * k.shape[2] == q.shape[2], "H must be a multiple of H_kv"
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = scale * (q @ k.transpose(-1, -2))
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    capped = s
    seqlen_q, seqlen_k = s.shape[-2:]
    if alibi_slopes is not None:
        i = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        distance = (i - torch.arange(seqlen_k, device=q.device)).abs().to(dtype)
        s = s - alibi_slopes.to(dtype).reshape(-1, q.shape[1], 1, 1) * distance
    natural = s
    seen = visible(seqlen_q, seqlen_k, causal, window).to(q.device)
    if extras is not None and extras.score_mod is not None:
        s = extras.score_mod(s)
    if extras is not None and extras.mask is not None:
        seen = (seen & extras.mask).expand(s.shape)
    return _Scores(q, k, v, scale, capped, natural, s.masked_fill(~seen, -torch.inf), seen)


def _lse(s: Tensor, sinks: Tensor | None) -> Tensor:
    """log(sum_j exp(s_j) + exp(sink)), (B, H, S_q); -inf where there is nothing to sum."""
    if sinks is not None:
        column = sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
        s = torch.cat((s, column), dim=-1)
    if s.shape[-1] == 0:
        return s.new_full(s.shape[:-1], -torch.inf)
    return s.logsumexp(-1)


def _probabilities(t: _Scores, lse: Tensor) -> Tensor:
    """P = exp(S - LSE); 0 for hidden keys, also in rows that see nothing or hold a NaN."""
    # exp(-inf - -inf) is NaN; a row that sees nothing has no probabilities at all.
    safe = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    return (t.s - safe[..., None]).exp().where(t.seen, 0.0)


def _product(p: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """p @ x, where NaN and Inf of x reach only the rows that see them (0 * NaN is NaN)."""
    finite = x.isfinite()
    out = p @ x.where(finite, 0.0)
    if bool(finite.all()):
        return out
    touched = seen.to(p.dtype) @ (~finite).to(p.dtype) > 0
    terms = p[..., None] * x[..., None, :, :].where(seen[..., None], 0.0)
    return torch.where(touched, terms.sum(-2), out)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    extras: Extras | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """out = softmax(S) V and its LSE, from the whole matrix S.

    S = scale Q K^T, then softcap tanh(S / softcap), then ALiBi, then the mask.

    Args:
        q: (B, S_q, H, D), any float dtype.
        k: (B, S_k, H_kv, D).
        v: (B, S_k, H_kv, D_v).
        causal: no query sees a later key (bottom-right aligned).
        window: (left, right) keys around a query's own position, -1 for all.
        scale: factor on Q K^T, D ** -0.5 by default.
        softcap: bound of the scores, 0 for none.
        alibi_slopes: (H,) or (B, H); score -= slope * |i + S_k - S_q - j|.
        sinks: (H,) logits that join the denominator only.
        extras: dropout and user functions.
        dtype: of every computation and of the results.

    Returns:
        out (B, S_q, H, D_v) and lse (B, H, S_q), natural log. A row that sees no key has out 0
        and LSE -inf, or the sink.
    """
    t = _scores(q, k, v, causal, window, scale, softcap, alibi_slopes, dtype, extras)
    lse = _lse(t.s, sinks)
    p = (extras or _NOTHING).dropped(_probabilities(t, lse))
    return _product(p, t.v, t.seen).transpose(1, 2), lse


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    extras: Extras | None = None,
    dtype: torch.dtype = torch.float64,
) -> Gradients:
    """The gradients of `attention`, step by step.

    dV = P^T dO; dP = dO V^T; D = rowsum(dO * O) - dLSE; dS = P * (dP - D); through the softcap
    dS *= 1 - (S / softcap)^2; dQ = scale dS K; dK = scale dS^T Q; dsink = -sum_i P_i,sink D_i with
    P_i,sink = exp(sink - LSE_i). Query heads that share a KV head add up in dK and dV.
    Source: Dao et al. 2022, FlashAttention, appendix B.2; the LSE's part follows from
    dLSE / dS = P. Under dropout with Z = keep / (1 - p): dV = (Z * P)^T dO, dP = Z * (dO V^T).

    Args:
        q, k, v, causal, window, scale, softcap, alibi_slopes, sinks, extras, dtype: as `attention`.
        dout: (B, S_q, H, D_v).
        dlse: (B, H, S_q), or None when nothing arrives on the LSE.

    Returns:
        Gradients in `dtype`. Rows that see no key add 0 to dQ, dK and dV.
    """
    t = _scores(q, k, v, causal, window, scale, softcap, alibi_slopes, dtype, extras)
    lse = _lse(t.s, sinks)
    p = _probabilities(t, lse)
    do = dout.to(dtype).transpose(1, 2)  # (B, H, S_q, D_v)
    seen_t = t.seen.transpose(-1, -2)

    extras = extras or _NOTHING
    kept = extras.dropped(p)
    dv = _product(kept.transpose(-1, -2), do, seen_t)
    dp = extras.dropped(do @ t.v.transpose(-1, -2))  # (B, H, S_q, S_k)
    d = (do * _product(kept, t.v, t.seen)).sum(-1)  # (B, H, S_q)
    if dlse is not None:
        d = d - dlse.to(dtype)
    ds = p * (dp - d[..., None])
    if extras.score_mod is not None:
        with torch.enable_grad():
            natural = t.natural.detach().requires_grad_()
            (ds,) = torch.autograd.grad(extras.score_mod(natural), natural, ds)
    if softcap > 0:
        ds = ds * (1 - (t.capped / softcap).square())
    ds = ds.where(t.seen, 0.0)
    dq = t.scale * _product(ds, t.k, t.seen)
    dk = t.scale * _product(ds.transpose(-1, -2), t.q, seen_t)

    dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dk, dv))
    dsinks = None if sinks is None else _sink_gradient(sinks.to(dtype), lse, d)
    return Gradients(dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dsinks)


def _sink_gradient(sinks: Tensor, lse: Tensor, d: Tensor) -> Tensor:
    share = (sinks[None, :, None] - lse).exp()  # (B, H, S_q)
    share = share.where(sinks[None, :, None] > -torch.inf, 0.0)
    return -(share * d).sum((0, 2))


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor]:
    """What a user would write: scores and softmax in the inputs' own dtype.

    Not an oracle but the yardstick of the tolerance in tests. Differentiable by autograd.

    Args:
        q, k, v, causal, window, scale, softcap, alibi_slopes, sinks, extras: as `attention`.

    Returns:
        out (B, S_q, H, D_v) and lse (B, H, S_q), in q's dtype.
    """
    t = _scores(q, k, v, causal, window, scale, softcap, alibi_slopes, q.dtype, extras)
    lse = _lse(t.s, sinks)
    p = (extras or _NOTHING).dropped(_probabilities(t, lse))
    return (p @ t.v).transpose(1, 2), lse


def gather_pages(cache: Tensor, block_table_row: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one sequence.

    Args:
        cache: (P, N, H_kv, D).
        block_table_row: (max_pages,); entries past the sequence's last page are never read.
        length: tokens to gather.

    Returns:
        (length, H_kv, D).
    """
    return cache.flatten(0, 1)[_page_slots(block_table_row, length, cache.shape[1])]


def _page_slots(block_table_row: Tensor, length: int, page_size: int) -> Tensor:
    """(length,) slots ``page * N + offset`` of a sequence's tokens."""
    tokens = torch.arange(length, device=block_table_row.device)
    return block_table_row[tokens // page_size].long() * page_size + tokens % page_size


class _Sequence(NamedTuple):
    rows: slice  # its queries among the packed ones
    keys: Tensor  # (S_k,) its keys among all tokens
    features: dict


def _sequences(
    page_size: int | None, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, leftpad, features
) -> Iterator[_Sequence]:
    """Where each sequence's queries and keys lie, and its share of the features."""
    slopes = features.get("alibi_slopes")
    for b, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        first, last = (0, 0) if cu_seqlens_k is None else cu_seqlens_k[b : b + 2].tolist()
        length = last - first if seqused_k is None else int(seqused_k[b])
        if page_size is None:
            keys = torch.arange(first, first + length)
        else:
            keys = _page_slots(block_table[b], length, page_size)
        if leftpad is not None:
            # Cutting the front off moves no key against the bottom right corner.
            keys = keys[int(leftpad[b]) :]
        own = {} if slopes is None or slopes.dim() == 1 else {"alibi_slopes": slopes[b]}
        yield _Sequence(slice(start, end), keys, {**features, **own})


def _plan(k, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, leftpad, features):
    assert cu_seqlens_k is not None or seqused_k is not None, "no key lengths"
    page_size = None if block_table is None else k.shape[1]
    return _sequences(
        page_size, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, leftpad, features
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad: Tensor | None = None,
    **features,
) -> tuple[Tensor, Tensor]:
    """`attention` of each packed sequence in turn.

    Args:
        q: (T_q, H, D).
        k: (T_k, H_kv, D), or pages (P, N, H_kv, D) with block_table.
        v: as k, with D_v.
        cu_seqlens_q: (B + 1,) where each sequence's queries begin.
        cu_seqlens_k: (B + 1,) the same for keys; None where seqused_k gives the lengths of pages.
        block_table: (B, max_pages) pages of each sequence.
        seqused_k: (B,) keys that count, from the sequence's first.
        leftpad: (B,) first key that counts.
        **features: keywords of `attention`; alibi_slopes (H,) or (B, H).

    Returns:
        out (T_q, H, D_v) and lse (H, T_q).
    """
    dtype = features.get("dtype", torch.float64)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype)
    flat_k, flat_v = (x if block_table is None else x.flatten(0, 1) for x in (k, v))
    plan = _plan(k, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, leftpad, features)
    for rows, keys, own in plan:
        part = attention(q[None, rows], flat_k[None, keys], flat_v[None, keys], **own)
        out[rows], lse[:, rows] = part[0][0], part[1][0]
    return out, lse


def attention_varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad: Tensor | None = None,
    **features,
) -> Gradients:
    """`attention_backward` of each packed sequence in turn.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, leftpad, **features: as
            `attention_varlen`.
        dout: (T_q, H, D_v).
        dlse: (H, T_q) or None.

    Returns:
        Gradients shaped as the inputs; sequences that share a page add up, tokens that belong to
        no sequence get 0.
    """
    dtype = features.get("dtype", torch.float64)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    paged = block_table is not None
    flat_k, flat_v, flat_dk, flat_dv = (x.flatten(0, 1) if paged else x for x in (k, v, dk, dv))
    sinks = features.get("sinks")
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
    plan = _plan(k, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, leftpad, features)
    for rows, keys, own in plan:
        inputs = q[None, rows], flat_k[None, keys], flat_v[None, keys]
        part_dlse = None if dlse is None else dlse[None, :, rows]
        part = attention_backward(*inputs, dout[None, rows], part_dlse, **own)
        dq[rows] = part.dq[0]
        flat_dk.index_add_(0, keys.to(k.device), part.dk[0])
        flat_dv.index_add_(0, keys.to(k.device), part.dv[0])
        if dsinks is not None and part.dsinks is not None:
            dsinks += part.dsinks
    if paged:
        dk, dv = flat_dk.view(k.shape), flat_dv.view(v.shape)
    return Gradients(dq, dk, dv, dsinks)


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    **features,
) -> tuple[Tensor, Tensor]:
    """`attention` of each row of q over its cache. Appends nothing.

    Args:
        q: (B, S_q, H, D).
        k_cache: pages (P, N, H_kv, D) with block_table, else rows (B_c, S_max, H_kv, D).
        v_cache: as k_cache, with D_v.
        cache_seqlens: (B,) tokens valid in the cache, whatever was just appended included.
        block_table: (B, max_pages) pages of each sequence.
        cache_batch_idx: (B,) row of a dense cache for each sequence; b itself by default.
        cache_leftpad: (B,) first key that counts.
        **features: keywords of `attention`.

    Returns:
        out (B, S_q, H, D_v) and lse (B, H, S_q).
    """
    batch, seqlen_q = q.shape[:2]
    if block_table is None:
        # A row of a dense cache is one page of S_max tokens.
        rows = torch.arange(batch) if cache_batch_idx is None else cache_batch_idx
        block_table = rows[:, None]
    out, lse = attention_varlen(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        cu_seqlens_q=torch.arange(batch + 1) * seqlen_q,
        block_table=block_table,
        seqused_k=cache_seqlens,
        leftpad=cache_leftpad,
        **features,
    )
    return out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
