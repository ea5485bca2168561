"""One-pass tiled attention in torch: what no fused CPU operator computes, or not as quickly.

Forward: for each block of queries, keys come in tiles; the accumulator and the denominator are
rescaled when the running maximum grows (Dao 2023, FlashAttention-2, algorithm 1). Where |S| is
known to be small, by a softcap or by the norms of q and k, no maximum is needed: exp(S) is taken
as it is. Backward: for each tile of keys, S is computed again, P = exp(S - LSE) (ibid.,
algorithm 2).

Everything is float32 (float64 for float64), 16-bit inputs too: torch's 16-bit products on a CPU
round their results. Tiles hold all heads of a chunk, about `_TILE_SCORES` scores: they stay in
the L2 caches.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, G query heads of one
of them, C chunk of H_kv, D / D_v head dimensions, R query rows and K keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.problem import Mask, Saved

_TILE_SCORES = 1 << 18  # 1 MB of float32
_TILE_KEYS = 256
_WIDEST_TILE = 512  # keys of a tile that covers a whole window
_CHUNK_HEADS = 8
# exp(60) * 2^31 keys and exp(-60) are well inside float32.
_LARGEST_UNSHIFTED = 60.0
_LOG2_E = math.log2(math.e)


class Features(NamedTuple):
    """What turns products into visible scores."""

    mask: Mask
    scale: float
    softcap: float
    slopes: Tensor | None  # (H,) or (B, H)

    @property
    def factor(self) -> float:
        """q's factor: products are scores, or under a softcap tanh's arguments."""
        return self.scale / self.softcap if self.softcap > 0 else self.scale


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the LSE: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Chunk(NamedTuple):
    """Heads of one sequence that are computed together; k and v in the dtype of sums."""

    q: Tensor  # (C, G, S_q, D), a view of the caller's
    k: Tensor  # (C, S_k, D)
    v: Tensor  # (C, S_k, D_v)
    slopes: Tensor | None  # (C, G, 1, 1)
    batch: int
    heads: slice  # of H_kv
    block: tuple[int, int]  # R and K

    @property
    def lengths(self) -> tuple[int, int]:
        """S_q and S_k."""
        return self.q.shape[2], self.k.shape[1]


def _of_block(x: Tensor, c: _Chunk, rows: range) -> Tensor:
    """Some rows of (C, G, S_q, D) as (C, G * R, D), a copy in the dtype of sums."""
    part = x[:, :, rows.start : rows.stop]
    return torch.empty(part.shape, dtype=c.k.dtype).copy_(part).flatten(1, 2)


def _of_chunk(x: Tensor, c: _Chunk) -> Tensor:
    """A chunk's part (C, G, S, D) of (B, S, H, D), as a view."""
    grouped = x[c.batch].unflatten(1, (-1, c.q.shape[1]))
    return grouped[:, c.heads].permute(1, 2, 0, 3)


def _of_rows(x: Tensor, c: _Chunk) -> Tensor:
    """A chunk's part (C, G, S) of (B, H, S), as a view."""
    return x[c.batch].unflatten(0, (-1, c.q.shape[1]))[c.heads]


def _chunks(q: Tensor, k: Tensor, v: Tensor, f: Features) -> Iterator[_Chunk]:
    batch, (seqlen_k, num_kv_heads) = q.shape[0], k.shape[1:3]
    group = q.shape[2] // num_kv_heads
    slopes = f.slopes
    if slopes is not None:
        slopes = slopes.expand(batch, -1).reshape(batch, num_kv_heads, group, 1, 1)
    dtype = sum_dtype(q.dtype)
    step = max(1, _CHUNK_HEADS // group)
    for b in range(batch):
        by_head = q[b].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        for start in range(0, num_kv_heads, step):
            heads = slice(start, start + step)
            queries = by_head[heads]
            yield _Chunk(
                queries,
                k[b, :, heads].transpose(0, 1).to(dtype),
                v[b, :, heads].transpose(0, 1).to(dtype),
                None if slopes is None else slopes[b, heads].to(dtype),
                b,
                heads,
                _block(f.mask, queries.shape[0] * group, seqlen_k),
            )


def _block(mask: Mask, num_heads: int, seqlen_k: int) -> tuple[int, int]:
    """R and K of a tile of so many heads."""
    rows = max(16, _TILE_SCORES // (num_heads * min(_TILE_KEYS, seqlen_k)))
    if mask.left < 0 or mask.right < 0:
        return rows, _TILE_KEYS
    # A block of R rows meets R + band keys and sees `band` of them in each row.
    band = mask.left + mask.right + 1
    rows = min(rows, max(16, band // 4))
    keys = rows + band - 1
    return rows, keys if keys <= _WIDEST_TILE else _TILE_KEYS


class _Tile(NamedTuple):
    """One block's rows times keys [keys)."""

    keys: slice
    num_keys: int
    hidden: Tensor | None  # (R, K) 0 or -inf, None when every row sees every key
    distance: Tensor | None  # (R, K) |i + S_k - S_q - j|, with ALiBi only


def _tiles(c: _Chunk, f: Features, rows: range) -> Iterator[_Tile]:
    seqlen_q, seqlen_k = c.lengths
    keys = f.mask.key_range(rows.start, rows.stop, seqlen_q, seqlen_k)
    for start in range(keys.start, keys.stop, c.block[1]):
        stop = min(keys.stop, start + c.block[1])
        first = start - rows.start - seqlen_k + seqlen_q  # from row 0's own key to the first
        hidden = _hidden(len(rows), stop - start, first, f.mask, c.k.dtype)
        distance = None
        if c.slopes is not None:
            distance = _ahead(len(rows), stop - start, first).abs().to(c.k.dtype)
        yield _Tile(slice(start, stop), stop - start, hidden, distance)


def _ahead(num_rows: int, num_keys: int, first: int) -> Tensor:
    """How far each key lies ahead of each row's own key."""
    return torch.arange(first, first + num_keys) - torch.arange(num_rows)[:, None]


def _hidden(
    num_rows: int, num_keys: int, first: int, mask: Mask, dtype: torch.dtype
) -> Tensor | None:
    crosses_left = mask.left >= 0 and first - (num_rows - 1) < -mask.left
    crosses_right = mask.right >= 0 and first + num_keys - 1 > mask.right
    if not crosses_left and not crosses_right:
        return None
    return _hidden_matrix(num_rows, num_keys, first, mask, dtype)


@lru_cache(maxsize=16)
def _hidden_matrix(
    num_rows: int, num_keys: int, first: int, mask: Mask, dtype: torch.dtype
) -> Tensor:
    ahead = _ahead(num_rows, num_keys, first)
    hidden = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    if mask.left >= 0:
        hidden |= ahead < -mask.left
    if mask.right >= 0:
        hidden |= ahead > mask.right
    return torch.zeros(num_rows, num_keys, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _row_blocks(c: _Chunk, f: Features, spoilt: bool) -> Iterator[range]:
    """Blocks of rows that see a key.

    Single rows where a NaN or Inf could reach a row from a key that it does not see: nothing is
    hidden from a row that stands alone.
    """
    visible = f.mask.row_range(*c.lengths)
    step = 1 if spoilt and not f.mask.is_full else c.block[0]
    for start in range(visible.start, visible.stop, step):
        yield range(start, min(visible.stop, start + step))


def _is_spoilt(*xs: Tensor) -> bool:
    return not all(bool(x.sum().isfinite()) for x in xs)


class _Scratch:
    """Memory of one tile, used again by every tile of a chunk."""

    def __init__(self, c: _Chunk):
        self._heads = c.q.shape[0]
        seqlen_q, seqlen_k = c.lengths
        rows, keys = min(c.block[0], seqlen_q) * c.q.shape[1], min(c.block[1], seqlen_k)
        self._memory = c.k.new_empty(self._heads * rows * keys)

    def shaped(self, num_rows: int, num_keys: int) -> Tensor:
        """(C, G * R, K), uninitialised."""
        size = self._heads * num_rows * num_keys
        return self._memory[:size].view(self._heads, num_rows, num_keys)


def _mask(s: Tensor, c: _Chunk, t: _Tile) -> None:
    """Subtracts ALiBi's slope * distance, hides keys. Mutates: s (C, G * R, K)."""
    if t.distance is not None:
        assert c.slopes is not None
        s.unflatten(1, (c.q.shape[1], -1)).sub_(c.slopes * t.distance)
    if t.hidden is not None:
        # Adding is several times quicker than masked_fill_.
        s.unflatten(1, (c.q.shape[1], -1)).add_(t.hidden)


def _exp(x: Tensor) -> Tensor:
    """exp(x). Mutates and returns: x."""
    # torch's exp on a CPU may be a hundred times slower where it underflows; exp2 never is.
    # Measured 2026-11, AVX-512, MKL, 393,216 scores: exp 65 us, near -100 8 ms; exp2 104 us.
    return x.mul_(_LOG2_E).exp2_()


def _is_bounded(c: _Chunk, f: Features) -> bool:
    """Whether exp(S) can be taken without subtracting a maximum."""
    if c.slopes is not None:
        return False
    if 0 < f.softcap <= _LARGEST_UNSHIFTED:
        return True
    # |q . k| <= |q| |k|, and a softcap makes no score larger. NaN compares as false.
    dtype = c.k.dtype
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=dtype).amax() for x in (c.q, c.k)]
    return bool(norms[0] * norms[1] * abs(f.scale) <= _LARGEST_UNSHIFTED)


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
    out = q.new_zeros(batch, seqlen_q, num_heads, v.shape[-1])
    lse = torch.full((batch, num_heads, seqlen_q), -torch.inf, dtype=sum_dtype(q.dtype))
    for c in _chunks(q, k, v, f):
        block = _forward_bounded if _is_bounded(c, f) else _forward_shifted
        scores = _Scratch(c)
        out_c, lse_c = _of_chunk(out, c), _of_rows(lse, c)
        for rows in _row_blocks(c, f, _is_spoilt(c.k, c.v)):
            place = slice(rows.start, rows.stop)
            acc, total, top = block(c, f, rows, scores)
            shape = (*c.q.shape[:2], len(rows), -1)
            out_c[:, :, place] = acc.div_(total).view(shape)
            lse_c[:, :, place] = (total.log_() + top).view(shape[:3])
    return out, lse


class _Sums(NamedTuple):
    """What a block of rows has gathered; exp is taken of S - top."""

    acc: Tensor  # (C, G * R, D_v), sum of exp V
    total: Tensor  # (C, G * R, 1), sum of exp
    top: Tensor | float


def _forward_bounded(c: _Chunk, f: Features, rows: range, scores: _Scratch) -> _Sums:
    """Where exp(S) itself is safe: no maximum, nothing to rescale.

    Scores are taken times log2 e from the start, one pass less over them. Larger ones, and the
    backward, which subtracts their LSE, would lose digits by it.
    """
    q = _of_block(c.q, c, rows).mul_(f.factor if f.softcap > 0 else f.factor * _LOG2_E)
    acc = q.new_zeros(*q.shape[:2], c.v.shape[-1])
    total = q.new_zeros(*q.shape[:2], 1)
    for t in _tiles(c, f, rows):
        p = scores.shaped(q.shape[1], t.num_keys)
        torch.bmm(q, c.k[:, t.keys].transpose(1, 2), out=p)
        if f.softcap > 0:
            p.tanh_().mul_(f.softcap * _LOG2_E)
        _mask(p, c, t)  # no ALiBi here, see _is_bounded
        p.exp2_()
        total += p.sum(-1, keepdim=True)
        acc.baddbmm_(p, c.v[:, t.keys])
    return _Sums(acc, total, 0.0)


def _forward_shifted(c: _Chunk, f: Features, rows: range, scores: _Scratch) -> _Sums:
    """With a running maximum."""
    q = _of_block(c.q, c, rows).mul_(f.factor)
    acc = q.new_zeros(*q.shape[:2], c.v.shape[-1])
    total = q.new_zeros(*q.shape[:2], 1)
    top = q.new_full((*q.shape[:2], 1), -torch.inf)
    for t in _tiles(c, f, rows):
        s = scores.shaped(q.shape[1], t.num_keys)
        torch.bmm(q, c.k[:, t.keys].transpose(1, 2), out=s)
        if f.softcap > 0:
            s.tanh_().mul_(f.softcap)
        _mask(s, c, t)
        grown = torch.maximum(top, s.amax(-1, keepdim=True))
        # A row that has seen nothing yet keeps -inf; 0 stands in so that exp gives 0, not NaN.
        base = grown.where(grown != -torch.inf, 0.0)
        shrink = _exp(top - base)
        p = _exp(s.sub_(base))
        total.mul_(shrink).add_(p.sum(-1, keepdim=True))
        acc.mul_(shrink).baddbmm_(p, c.v[:, t.keys])
        top = grown
    return _Sums(acc, total, top)


class _Rows(NamedTuple):
    """What the backward is given of a chunk's rows, views; all (C, G, S_q, ...)."""

    dout: Tensor  # D_v columns
    out: Tensor
    lse: Tensor
    dlse: Tensor | None


class _Gradients(NamedTuple):
    dq: Tensor  # (C, G, S_q, D), a view of the result
    dk: Tensor  # (C, S_k, D), in the dtype of sums
    dv: Tensor  # (C, S_k, D_v), likewise


def backward(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, f: Features
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one piece: dV = P^T dO, dS = P * (dP - D), dQ = dS K, dK = dS^T Q.

    Args:
        q, k, v: as `forward`.
        saved: dout (B, S_q, H, D_v), dlse (B, H, S_q) or None, out as dout, lse (B, H, S_q).
        f: mask and scores.

    Returns:
        dq, dk, dv as q, k, v.
    """
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    dtype = sum_dtype(q.dtype)
    for c in _chunks(q, k, v, f):
        dlse = None if saved.dlse is None else _of_rows(saved.dlse, c)
        dout, out = _of_chunk(saved.dout, c), _of_chunk(saved.out, c)
        given = _Rows(dout, out, _of_rows(saved.lse, c), dlse)
        results = [x[c.batch, :, c.heads].transpose(0, 1) for x in (dk, dv)]
        # Sums of float32 are the results themselves.
        sums = [x if x.dtype == dtype else torch.zeros(x.shape, dtype=dtype) for x in results]
        grads = _Gradients(_of_chunk(dq, c), sums[0], sums[1])
        scratch = [_Scratch(c) for _ in range(3 if f.softcap > 0 else 2)]
        for rows in _row_blocks(
            c, f, _is_spoilt(c.q, c.k, c.v, dout, dout if dlse is None else dlse)
        ):
            _backward_block(c, f, rows, given, grads, scratch)
        if dtype != dk.dtype:
            for result, total in zip(results, sums, strict=True):
                result.copy_(total)
    return dq, dk, dv


def _backward_block(
    c: _Chunk, f: Features, rows: range, given: _Rows, grads: _Gradients, scratch: list[_Scratch]
) -> None:
    """Adds one block of rows to the gradients. Mutates: grads, scratch."""
    place = slice(rows.start, rows.stop)
    q = _of_block(c.q, c, rows).mul_(f.factor)
    dout = _of_block(given.dout, c, rows)
    minus_lse = given.lse[:, :, place].flatten(1, 2).unsqueeze(-1).neg()
    minus_d = (dout * _of_block(given.out, c, rows)).sum(-1, keepdim=True).neg_()
    if given.dlse is not None:
        minus_d += given.dlse[:, :, place].flatten(1, 2).unsqueeze(-1)
    # q holds scale / softcap and dS lacks the softcap.
    key_factor = f.softcap if f.softcap > 0 else 1.0
    dq = torch.zeros_like(q)
    for t in _tiles(c, f, rows):
        k, v = c.k[:, t.keys], c.v[:, t.keys]
        p, ds = (s.shaped(q.shape[1], t.num_keys) for s in scratch[:2])
        slope = None
        if f.softcap > 0:
            slope = torch.bmm(q, k.transpose(1, 2), out=scratch[2].shaped(*p.shape[1:])).tanh_()
            torch.add(minus_lse, slope, alpha=f.softcap, out=p)
        else:
            torch.baddbmm(minus_lse.expand_as(p), q, k.transpose(1, 2), out=p)
        _mask(p, c, t)
        _exp(p)
        torch.baddbmm(minus_d.expand_as(ds), dout, v.transpose(1, 2), out=ds).mul_(p)
        if slope is not None:
            # d(cap * tanh x) / dx = cap * (1 - tanh^2 x)
            ds.addcmul_(ds, slope.mul_(slope), value=-1.0)
        # baddbmm_ into a slice would run head by head.
        grads.dv[:, t.keys] += torch.bmm(p.transpose(1, 2), dout)
        grads.dk[:, t.keys].add_(torch.bmm(ds.transpose(1, 2), q), alpha=key_factor)
        dq.baddbmm_(ds, k)
    grads.dq[:, :, place] = dq.mul_(f.scale).view(*c.q.shape[:2], len(rows), -1)
