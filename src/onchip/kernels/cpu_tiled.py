"""One-pass tiled attention in torch: the features that no fused CPU operator has.

Forward: for each block of queries, keys come in tiles; a running maximum m and an accumulator
whose last column is the denominator l are rescaled when m grows (Dao 2023, FlashAttention-2,
algorithm 1). Under a softcap |S| is bounded, so m is not needed: exp(S) is taken as it is.
Backward: for each tile of keys, S is computed again, P = exp(S - LSE) (ibid., algorithm 2).

Tiles hold all heads of a chunk, about `_TILE_SCORES` scores: they stay in the L2 caches.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, G query heads of one
of them, C chunk of B * H_kv, D / D_v head dimensions, R query rows and K keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.problem import Mask, Saved

_TILE_SCORES = 1 << 18
_TILE_KEYS = 256
_CHUNK_HEADS = 8
# exp(60) * 2^31 keys and exp(-60) are well inside float32.
_LARGEST_UNSHIFTED_CAP = 60.0


class Features(NamedTuple):
    """What turns products into visible scores."""

    mask: Mask
    scale: float
    softcap: float
    slopes: Tensor | None  # (H,) or (B, H)

    @property
    def is_bounded(self) -> bool:
        """Whether exp(S) can be taken without subtracting a maximum."""
        return 0 < self.softcap <= _LARGEST_UNSHIFTED_CAP and self.slopes is None


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the LSE: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Chunk(NamedTuple):
    """Heads that are computed together, scaled and in the dtype of sums."""

    q: Tensor  # (C, G, S_q, D)
    k: Tensor  # (C, S_k, D)
    v: Tensor  # (C, S_k, D_v)
    slopes: Tensor | None  # (C, G, 1, 1)
    heads: slice  # of B * H_kv


def _by_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """(B, S, H, D) -> (B * H_kv, G, S, D), a view where strides allow."""
    grouped = x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return grouped.flatten(0, 1)


def _chunks(q: Tensor, k: Tensor, v: Tensor, f: Features) -> Iterator[_Chunk]:
    num_kv_heads = k.shape[2]
    group = q.shape[2] // num_kv_heads
    q, k, v = _by_head(q, num_kv_heads), _by_head(k, num_kv_heads), _by_head(v, num_kv_heads)
    slopes = f.slopes
    if slopes is not None:
        batch = q.shape[0] // num_kv_heads
        slopes = slopes.expand(batch, -1).reshape(q.shape[0], group, 1, 1)
    factor = f.scale / f.softcap if f.softcap > 0 else f.scale
    dtype = sum_dtype(q.dtype)
    step = max(1, _CHUNK_HEADS // group)
    for start in range(0, q.shape[0], step):
        heads = slice(start, start + step)
        yield _Chunk(
            (q[heads].to(dtype) * factor).contiguous(),
            k[heads, 0].to(dtype),
            v[heads, 0].to(dtype),
            None if slopes is None else slopes[heads].to(dtype),
            heads,
        )


class _Tile(NamedTuple):
    """Rows [rows) times keys [keys) of one chunk."""

    rows: range
    keys: range
    hidden: Tensor | None  # (R, K) bool, None when every row sees every key
    distance: Tensor | None  # (R, K) |i + S_k - S_q - j|, with ALiBi only


def _tile(f: Features, rows: range, keys: range, shift: int, dtype: torch.dtype) -> _Tile:
    left, right = f.mask.left, f.mask.right
    crosses = (left >= 0 and keys.start < rows.stop - 1 + shift - left) or (
        right >= 0 and keys.stop - 1 > rows.start + shift + right
    )
    if not crosses and f.slopes is None:
        return _Tile(rows, keys, None, None)
    ahead = (
        torch.arange(keys.start, keys.stop) - torch.arange(rows.start, rows.stop)[:, None] - shift
    )
    hidden = None
    if crosses:
        hidden = torch.zeros(ahead.shape, dtype=torch.bool)
        if left >= 0:
            hidden |= ahead < -left
        if right >= 0:
            hidden |= ahead > right
    distance = ahead.abs().to(dtype) if f.slopes is not None else None
    return _Tile(rows, keys, hidden, distance)


def _scores(c: _Chunk, q: Tensor, t: _Tile, f: Features) -> tuple[Tensor, Tensor | None]:
    """S of a tile (C, G, R, K) with hidden keys at -inf, and tanh under a softcap."""
    keys = c.k[:, t.keys.start : t.keys.stop]
    s = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).view(*q.shape[:3], -1)
    capped = None
    if f.softcap > 0:
        capped = s.tanh_()
        s = capped * f.softcap
    if t.distance is not None:
        assert c.slopes is not None
        s -= c.slopes * t.distance
    if t.hidden is not None:
        s.masked_fill_(t.hidden, -torch.inf)
    return s, capped


def _row_blocks(f: Features, c: _Chunk) -> Iterator[range]:
    seqlen_q, seqlen_k = c.q.shape[2], c.k.shape[1]
    visible = f.mask.row_range(seqlen_q, seqlen_k)
    heads = c.q.shape[0] * c.q.shape[1]
    step = max(16, _TILE_SCORES // (heads * min(_TILE_KEYS, seqlen_k)))
    for start in range(visible.start, visible.stop, step):
        yield range(start, min(visible.stop, start + step))


def _key_tiles(f: Features, rows: range, seqlen_q: int, seqlen_k: int) -> Iterator[range]:
    keys = f.mask.key_range(rows.start, rows.stop, seqlen_q, seqlen_k)
    for start in range(keys.start, keys.stop, _TILE_KEYS):
        yield range(start, min(keys.stop, start + _TILE_KEYS))


def forward(q: Tensor, k: Tensor, v: Tensor, f: Features) -> tuple[Tensor, Tensor]:
    """Attention of one piece.

    Args:
        q: (B, S_q, H, D).
        k: (B, S_k, H_kv, D).
        v: (B, S_k, H_kv, D_v).
        f: mask and scores.

    Returns:
        out (B, S_q, H, D_v) in q's dtype and lse (B, H, S_q).
    """
    batch, seqlen_q, num_heads, _ = q.shape
    num_kv_heads = k.shape[2]
    out = q.new_zeros(batch, seqlen_q, num_heads, v.shape[-1])
    lse = torch.full((batch, num_heads, seqlen_q), -torch.inf, dtype=sum_dtype(q.dtype))
    lse_by_head = lse.view(batch * num_kv_heads, -1, seqlen_q)
    out_by_head = out.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)  # (B, H_kv, G, S, D)
    for c in _chunks(q, k, v, f):
        block = _forward_block_bounded if f.is_bounded else _forward_block
        spoilt = None if bool(c.v.sum().isfinite()) else c.v
        # Zeros in front of NaN and Inf: 0 * NaN would reach rows that do not see the key.
        values = c.v if spoilt is None else c.v.nan_to_num(0.0, 0.0, 0.0)
        values = torch.cat((values, values.new_ones(*values.shape[:2], 1)), dim=-1)
        index = [divmod(n, num_kv_heads) for n in range(*c.heads.indices(lse_by_head.shape[0]))]
        for rows in _row_blocks(f, c):
            acc, top = block(c, values, f, rows)  # (C, G, R, D_v + 1), (C, G, R)
            total = acc[..., -1]
            result = acc[..., :-1] / total[..., None]
            if spoilt is not None:
                result = result + _nonfinite_part(f, rows, seqlen_q, spoilt)
            place = slice(rows.start, rows.stop)
            lse_by_head[c.heads, :, place] = total.log() + top
            for n, (b, h) in enumerate(index):
                out_by_head[b, h, :, place] = result[n].to(out.dtype)
    return out, lse


def _forward_block(c: _Chunk, values: Tensor, f: Features, rows: range) -> tuple[Tensor, Tensor]:
    q = c.q[:, :, rows.start : rows.stop].contiguous()  # (C, G, R, D)
    seqlen_q, seqlen_k = c.q.shape[2], c.k.shape[1]
    acc = q.new_zeros(*q.shape[:3], values.shape[-1])
    top = q.new_full(q.shape[:3], -torch.inf)
    for keys in _key_tiles(f, rows, seqlen_q, seqlen_k):
        t = _tile(f, rows, keys, seqlen_k - seqlen_q, q.dtype)
        s, _ = _scores(c, q, t, f)
        grown = torch.maximum(top, s.amax(-1))
        # A row that has seen nothing yet keeps -inf; 0 stands in so that exp gives 0, not NaN.
        base = grown.where(grown > -torch.inf, 0.0) if t.hidden is not None else grown
        p = s.sub_(base[..., None]).exp_()
        acc *= (top - base).exp_()[..., None]
        tile_values = values[:, keys.start : keys.stop]
        acc.flatten(1, 2).baddbmm_(p.flatten(1, 2), tile_values)
        top = grown
    return acc, top


def _forward_block_bounded(
    c: _Chunk, values: Tensor, f: Features, rows: range
) -> tuple[Tensor, Tensor]:
    """`_forward_block` where |S| <= softcap: no maximum, nothing to rescale."""
    q = c.q[:, :, rows.start : rows.stop].contiguous()
    seqlen_q, seqlen_k = c.q.shape[2], c.k.shape[1]
    acc = q.new_zeros(*q.shape[:3], values.shape[-1])
    flat = acc.flatten(1, 2)
    queries = q.flatten(1, 2)
    scratch = q.new_empty(queries.shape[0], queries.shape[1], _TILE_KEYS)
    for keys in _key_tiles(f, rows, seqlen_q, seqlen_k):
        t = _tile(f, rows, keys, seqlen_k - seqlen_q, q.dtype)
        span = slice(keys.start, keys.stop)
        if len(keys) == _TILE_KEYS:
            p = torch.bmm(queries, c.k[:, span].transpose(1, 2), out=scratch)
        else:
            p = torch.bmm(queries, c.k[:, span].transpose(1, 2))
        p.tanh_().mul_(f.softcap).exp_()
        if t.hidden is not None:
            p.view(*q.shape[:3], -1).masked_fill_(t.hidden, 0.0)
        flat.baddbmm_(p, values[:, span])
    return acc, q.new_zeros(())


def _nonfinite_part(f: Features, rows: range, seqlen_q: int, v: Tensor) -> Tensor:
    """What NaN and Inf among the values add to each row that sees them: (C, 1, R, D_v)."""
    seqlen_k = v.shape[1]
    added = v.new_zeros(v.shape[0], len(rows), v.shape[2])
    for keys in _key_tiles(f, rows, seqlen_q, seqlen_k):
        part = v[:, keys.start : keys.stop]
        if bool(part.sum().isfinite()):
            continue
        plain = Features(f.mask, f.scale, 0.0, None)
        hidden = _tile(plain, rows, keys, seqlen_k - seqlen_q, v.dtype).hidden
        seen = v.new_ones(len(rows), len(keys))
        if hidden is not None:
            seen.masked_fill_(hidden, 0.0)
        for value in (torch.nan, torch.inf, -torch.inf):
            is_value = part.isnan() if value != value else part == value
            met = seen @ is_value.to(v.dtype) > 0  # (C, R, D_v)
            added += torch.zeros_like(added).masked_fill_(met, value)
    return added.unsqueeze(1)


def backward(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, f: Features
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one piece: dV = P^T dO, dS = P * (dP - D), dQ = dS K, dK = dS^T Q.

    Args:
        q, k, v: as `forward`.
        saved: dout (B, S_q, H, D_v), dlse (B, H, S_q) or None, out as dout, lse (B, H, S_q).
        f: mask and scores.

    Returns:
        dq, dk, dv in the dtype of sums.
    """
    num_kv_heads, seqlen_q, seqlen_k = k.shape[2], q.shape[1], k.shape[1]
    dtype = sum_dtype(q.dtype)
    dout = _by_head(saved.dout, num_kv_heads)
    d = (saved.dout.to(dtype) * saved.out.to(dtype)).sum(-1).transpose(1, 2)  # (B, H, S_q)
    if saved.dlse is not None:
        d = d - saved.dlse
    d = d.reshape(dout.shape[0], -1, seqlen_q)
    lse = saved.lse.reshape(dout.shape[0], -1, seqlen_q)
    dq = torch.zeros(*dout.shape[:3], q.shape[-1], dtype=dtype)
    dk, dv = (torch.zeros(dout.shape[0], seqlen_k, x.shape[-1], dtype=dtype) for x in (k, v))
    for c in _chunks(q, k, v, f):
        grads = _Gradients(dq[c.heads], dk[c.heads], dv[c.heads])
        given = (dout[c.heads].to(dtype), lse[c.heads], d[c.heads])
        for rows in _row_blocks(f, c):
            _backward_block(c, f, rows, given, grads)
    # q was scaled already: dS^T q holds the factor for dK, not for dQ; softcap cancels in both.
    factor = f.scale / f.softcap if f.softcap > 0 else f.scale
    dq *= factor
    shape = (q.shape[0], num_kv_heads)
    dq = dq.unflatten(0, shape).permute(0, 3, 1, 2, 4).flatten(2, 3)
    dk, dv = (x.unflatten(0, shape).transpose(1, 2) for x in (dk, dv))
    return dq, dk, dv


class _Gradients(NamedTuple):
    dq: Tensor  # (C, G, S_q, D)
    dk: Tensor  # (C, S_k, D)
    dv: Tensor  # (C, S_k, D_v)


def _backward_block(
    c: _Chunk, f: Features, rows: range, given: tuple[Tensor, Tensor, Tensor], grads: _Gradients
) -> None:
    """Adds one block of rows to the gradients. Mutates: grads."""
    place = slice(rows.start, rows.stop)
    q = c.q[:, :, place].contiguous()
    dout, lse, d = (x[:, :, place] for x in given)
    dout = dout.reshape(q.shape[0], -1, dout.shape[-1])  # (C, G * R, D_v)
    seqlen_q, seqlen_k = c.q.shape[2], c.k.shape[1]
    dq = q.new_zeros(q.shape).flatten(1, 2)
    for keys in _key_tiles(f, rows, seqlen_q, seqlen_k):
        span = slice(keys.start, keys.stop)
        t = _tile(f, rows, keys, seqlen_k - seqlen_q, q.dtype)
        s, capped = _scores(c, q, t, f)
        p = s.sub_(lse[..., None]).exp_()  # (C, G, R, K)
        ds = torch.bmm(dout, c.v[:, span].transpose(1, 2)).view_as(p)
        ds.sub_(d[..., None]).mul_(p)
        if capped is not None:
            # d(cap * tanh x) / dx = cap * (1 - tanh^2 x)
            ds.mul_(capped.square_().neg_().add_(1.0)).mul_(f.softcap)
        if t.hidden is not None:
            ds.masked_fill_(t.hidden, 0.0)
        p, ds = p.flatten(1, 2), ds.flatten(1, 2)
        grads.dv[:, span].baddbmm_(p.transpose(1, 2), dout)
        grads.dk[:, span].baddbmm_(ds.transpose(1, 2), q.flatten(1, 2))
        dq.baddbmm_(ds, c.k[:, span])
    grads.dq[:, :, place] = dq.view_as(q)
