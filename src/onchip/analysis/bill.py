"""The bill of slow-memory bytes of each method, tensor by tensor and stage by stage.

A stage is one launch: what it computes, reads and writes. Of what its programs request, the L2
cache serves a part; the rest comes from slow memory. With no cache every request is slow.

Left out, since they are a few bytes for each sequence or head: lengths, offsets, slopes, sinks.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, D / D_v head dims,
N page size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from onchip.analysis import cost
from onchip.analysis.cost import Lengths
from onchip.analysis.reads import (
    Cache,
    Transfer,
    Walks,
    once,
    query_tiles,
    read_again,
    rounded,
    rows_seeing,
    scaled,
    summed,
)
from onchip.problem import Op, Problem

_TABLE_ITEMSIZE = 4  # block_table is int32
_SLOT_ITEMSIZE = 8  # slot_mapping is int64


@dataclass(frozen=True)
class Stage:
    """One launch.

    Args:
        name: what it does.
        flops: of its matrix products.
        exps: exponentials that it evaluates.
        reads: what it reads.
        writes: what it writes.
    """

    name: str
    flops: int
    exps: int
    reads: tuple[Transfer, ...]
    writes: tuple[Transfer, ...]

    @property
    def slow_bytes(self) -> int:
        """Bytes from and to slow memory."""
        return sum(t.slow_bytes for t in self.reads + self.writes)

    @property
    def requested_bytes(self) -> int:
        """Bytes that programs ask for, from the L2 cache or beyond."""
        return sum(t.requested_bytes for t in self.reads + self.writes)


@dataclass(frozen=True)
class Bill:
    """What a method does with a Problem.

    Args:
        method: its name.
        stages: its launches, in order.
    """

    method: str
    stages: tuple[Stage, ...]

    @property
    def flops(self) -> int:
        """FLOPs of all stages."""
        return sum(stage.flops for stage in self.stages)

    @property
    def exps(self) -> int:
        """Exponentials of all stages."""
        return sum(stage.exps for stage in self.stages)

    @property
    def slow_bytes(self) -> int:
        """Bytes from and to slow memory."""
        return sum(stage.slow_bytes for stage in self.stages)

    @property
    def saved_by_l2_bytes(self) -> int:
        """Requested bytes that the L2 cache serves."""
        return sum(stage.requested_bytes for stage in self.stages) - self.slow_bytes

    def by_tensor(self) -> dict[str, int]:
        """Tensor -> bytes from and to slow memory, over all stages."""
        total: Counter[str] = Counter()
        for stage in self.stages:
            for transfer in stage.reads + stage.writes:
                total[transfer.tensor] += transfer.slow_bytes
        return dict(total)


def _over(
    problem: Problem, lengths: Lengths | None, make: Callable[[int, int], list[Transfer]]
) -> list[Transfer]:
    """Transfers of all sequences, made once for each distinct pair of lengths."""
    given = Counter(cost.sequence_lengths(problem) if lengths is None else lengths)
    return [t for (s_q, s_k), n in given.items() for t in scaled(make(s_q, s_k), n)]


class _Sizes:
    """Bytes of whole tensors, and tokens of all sequences."""

    def __init__(self, problem: Problem, lengths: list[tuple[int, int]] | None):
        itemsize = problem.dtype.itemsize
        self.rows = cost.tokens_q(problem, lengths) * problem.num_heads
        keys = cost.tokens_k(problem, lengths) * problem.num_kv_heads
        self.q = self.rows * problem.head_dim * itemsize
        self.out = self.rows * problem.head_dim_v * cost.out_itemsize(problem)
        self.k = keys * problem.head_dim * problem.kv_dtype.itemsize
        self.v = keys * problem.head_dim_v * problem.kv_dtype.itemsize
        self.lse = self.rows * cost.lse_itemsize(problem)
        self.scores = cost.score_bytes(problem, lengths)
        self.all_pairs = self.scores // cost.out_itemsize(problem)
        self.pairs = cost.num_pairs(problem, lengths) * problem.num_heads


def _kept(lengths: Lengths | None) -> list[tuple[int, int]] | None:
    return None if lengths is None else list(lengths)


def three_step(problem: Problem, lengths: Lengths | None = None) -> Bill:
    """S = scale Q K^T, P = softmax(S), O = P V, one launch each, S and P in slow memory.

    Computes every pair, the hidden ones too. The backward keeps P and makes dP and dS.
    """
    size, d, d_v = _Sizes(problem, _kept(lengths)), problem.head_dim, problem.head_dim_v
    q, k, v = once("q", size.q), once("k", size.k), once("v", size.v)
    s, p, dp, ds = (once(name, size.scores) for name in ("s", "p", "dp", "ds"))
    out, dout = once("out", size.out), once("dout", size.out)
    dq, dk, dv = once("dq", size.q), once("dk", size.k), once("dv", size.v)
    by_d, by_d_v = 2 * size.all_pairs * d, 2 * size.all_pairs * d_v
    if problem.op is Op.BACKWARD:
        stages = (
            Stage("dv", by_d_v, 0, (p, dout), (dv,)),
            Stage("dp", by_d_v, 0, (dout, v), (dp,)),
            Stage("softmax", 0, 0, (p, dp), (ds,)),
            Stage("dq", by_d, 0, (ds, k), (dq,)),
            Stage("dk", by_d, 0, (ds, q), (dk,)),
        )
    else:
        stages = (
            Stage("scores", by_d, 0, (q, k), (s,)),
            Stage("softmax", 0, size.all_pairs, (s,), (p,)),
            Stage("values", by_d_v, 0, (p, v), (out,)),
        )
    return Bill("three-step", stages)


def _key_walks(problem: Problem, s_q: int, s_k: int, block_m: int, block_n: int) -> Walks:
    """Keys that each tile of queries reads."""
    return Walks(
        rounded(problem.mask.key_range(start, stop, s_q, s_k), block_n, s_k)
        for start, stop in query_tiles(s_q, block_m)
    )


def _kv_reads(
    problem: Problem, walks: Walks, cache: Cache | None, k_rounds: int = 1, repeats: int = 1
) -> list[Transfer]:
    """K, V and block_table reads of one sequence: `repeats` walks by each query tile."""
    size, heads = problem.kv_dtype.itemsize, problem.num_kv_heads
    d, d_v = problem.head_dim * size, problem.head_dim_v * size
    reads = scaled([read_again("k", walks, d, repeats * k_rounds, cache)], heads)
    reads += scaled([read_again("v", walks, d_v, repeats, cache)], heads)
    if problem.page_size:
        # A token's page number is wanted once in each round; k and v share it.
        pages = Walks(rounded_pages(span, problem.page_size) for span in walks.spans)
        rounds = repeats * k_rounds * heads
        reads.append(read_again("block_table", pages, _TABLE_ITEMSIZE, rounds, cache))
    return reads


def rounded_pages(span: range, page_size: int) -> range:
    """Pages that hold a span of tokens."""
    return range(span.start // page_size, -(-span.stop // page_size)) if span else range(0)


def _fused(problem, block_m, block_n, lengths, cache, k_rounds: int) -> tuple:
    lengths = _kept(lengths)
    size = _Sizes(problem, lengths)
    reads = _over(
        problem,
        lengths,
        lambda s_q, s_k: _kv_reads(
            problem,
            _key_walks(problem, s_q, s_k, block_m, block_n),
            cache,
            k_rounds,
            problem.group,
        ),
    )
    writes = (once("out", size.out), once("lse", size.lse))
    return size, summed([once("q", size.q), *reads]), summed(writes)


def fused_without_online_softmax(
    problem: Problem,
    block_m: int,
    block_n: int,
    lengths: Lengths | None = None,
    cache: Cache | None = None,
) -> Bill:
    """One launch, but three passes over K: the maximum, the denominator, the output.

    Nothing of S is stored, so each pass computes its scores again (`ladder.safe_three_pass`).
    """
    size, reads, writes = _fused(problem, block_m, block_n, lengths, cache, 3)
    flops = 2 * size.pairs * (3 * problem.head_dim + problem.head_dim_v)
    stage = Stage("three passes", flops, 2 * size.pairs, reads, writes)
    return Bill("fused, no online softmax", (stage,))


def flash(
    problem: Problem,
    block_m: int,
    block_n: int,
    lengths: Lengths | None = None,
    cache: Cache | None = None,
) -> Bill:
    """FlashAttention's forward: each tile of queries reads K and V once (Dao 2023, algorithm 1).

    With S_q / block_m tiles, and block_m as large as on-chip memory M allows, M / (4 D), that
    is the O(N^2 D^2 / M) of Dao et al. 2022, theorem 2.

    Args:
        problem: the call.
        block_m: query rows of a tile.
        block_n: keys of a tile; tiles that no row sees are skipped.
        lengths: (S_q, S_k) of each sequence.
        cache: the L2 cache; without one every request goes to slow memory.
    """
    size, reads, writes = _fused(problem, block_m, block_n, lengths, cache, 1)
    flops = cost.flops(problem, _kept(lengths))
    return Bill("flash", (Stage("flash", flops, size.pairs, reads, writes),))


def decode(
    problem: Problem, num_splits: int = 1, lengths: Lengths | None = None, block_n: int = 1
) -> Bill:
    """A few queries: heads of a group share one walk over the keys, which is split in pieces.

    With more than one split, each writes its output and LSE in float32, and a second launch
    merges them.

    Args:
        problem: the call; its rows, S_q x group, fit one program.
        num_splits: pieces of the keys, of each sequence.
        lengths: (S_q, S_k) of each sequence.
        block_n: keys of a tile.
    """
    lengths = _kept(lengths)
    size = _Sizes(problem, lengths)

    def reads_of(s_q: int, s_k: int) -> list[Transfer]:
        return _kv_reads(problem, _key_walks(problem, s_q, s_k, max(1, s_q), block_n), None)

    q = Transfer("q", size.q, size.q * num_splits)
    reads = summed([q, *_over(problem, lengths, reads_of)])
    out, lse = once("out", size.out), once("lse", size.lse)
    flops = cost.flops(problem, lengths)
    if num_splits == 1:
        return Bill("decode", (Stage("decode", flops, size.pairs, reads, summed([out, lse])),))
    parts = (
        once("partial out", 4 * size.rows * problem.head_dim_v * num_splits),
        once("partial lse", 4 * size.rows * num_splits),
    )
    merge = Stage("merge", 0, size.rows * num_splits, parts, summed([out, lse]))
    return Bill("decode", (Stage("split", flops, size.pairs, reads, parts), merge))


def backward(
    problem: Problem,
    dkdv: tuple[int, int],
    dq: tuple[int, int],
    lengths: Lengths | None = None,
    cache: Cache | None = None,
    dv: tuple[int, int] | None = None,
    copies_lse: bool = False,
) -> Bill:
    """The backward with recomputation, in three launches: D, then dK and dV, then dQ.

    P is computed again from Q, K and the LSE in both of the last, so there are 7 products
    rather than 5 (Dao et al. 2022, algorithm 4, without atomic additions); 8 in four launches
    if dV has one of its own.

    Args:
        problem: the call.
        dkdv: (query rows, keys) of a tile where a program owns keys.
        dq: (query rows, keys) of a tile where a program owns queries.
        lengths: (S_q, S_k) of each sequence.
        cache: the L2 cache; without one every request goes to slow memory.
        dv: as dkdv, of a launch that makes dV alone; `dkdv` makes dK alone then.
        copies_lse: whether the first launch also writes the LSE in another unit.
    """
    lengths = _kept(lengths)
    size = _Sizes(problem, lengths)
    delta, dout = once("delta", 4 * size.rows), once("dout", size.out)
    pre = _first_stage(size, copies_lse)
    parts = {"dkdv": dkdv} if dv is None else {"dv": dv, "dk": dkdv}
    keys = [_key_stage(problem, part, tile, lengths, cache) for part, tile in parts.items()]
    owned = [once("q", size.q), dout, once("lse", size.lse), delta]
    walked = _over(
        problem,
        lengths,
        lambda q, k: _kv_reads(problem, _key_walks(problem, q, k, *dq), cache, 1, problem.group),
    )
    flops = 2 * size.pairs * (2 * problem.head_dim + problem.head_dim_v)
    out = summed([once("dq", size.q)])
    queries = Stage("dq", flops, size.pairs, summed(owned + walked), out)
    return Bill("backward", (pre, *keys, queries))


def _first_stage(size: _Sizes, copies_lse: bool, *more: Transfer) -> Stage:
    """D = rowsum(dO * O), and what else the first launch of a backward writes."""
    lse = [once("lse", size.lse)] * copies_lse
    reads = [once("out", size.out), once("dout", size.out), *lse]
    writes = [once("delta", 4 * size.rows), *lse, *more]
    return Stage("delta", 0, 0, summed(reads), summed(writes))


def backward_summed(
    problem: Problem,
    tile: tuple[int, int],
    width: int,
    lengths: Lengths | None = None,
    cache: Cache | None = None,
    outside: float = 1.0,
) -> Bill:
    """The backward in 5 products: the launch that owns keys adds to dQ in float32.

    That sum is cleared by the first launch, fetched and written back for each wave of programs
    that add to it, and rounded to dQ by a last launch; but for a share `outside` of it the launch
    that owns keys clears and rounds it too.

    Args:
        problem: the call.
        tile: (query rows, keys) of a tile.
        width: columns of the float32 sum.
        lengths: (S_q, S_k) of each sequence.
        cache: the L2 cache; without one every request goes to slow memory.
        outside: share of the sum that the first and the last launch move.
    """
    lengths = _kept(lengths)
    size = _Sizes(problem, lengths)
    sums, rounded = 4 * size.rows * width, size.q
    before, behind = round(sums * outside), round(rounded * outside)
    keys = _key_stage(problem, "dkdv", tile, lengths, cache, width)
    cleared, rest = once("dq sum", before), once("dq sum", sums - before)
    keys = replace(
        keys,
        reads=summed([*keys.reads, rest]),
        writes=summed([*keys.writes, rest, once("dq", rounded - behind)]),
    )
    last = Stage("dq", 0, 0, summed([cleared]), summed([once("dq", behind)]))
    return Bill("backward", (_first_stage(size, True, cleared), keys, last))


def _key_stage(problem, part: str, tile: tuple[int, int], lengths, cache, width: int = 0) -> Stage:
    """The launch whose programs own keys: "dkdv", or "dv" or "dk" alone.

    `width`: columns of a float32 sum of dQ that it adds to; 0 for none.
    """
    size, d, d_v = _Sizes(problem, lengths), problem.head_dim, problem.head_dim_v
    makes_k, makes_v = "dk" in part, "dv" in part
    owned = [once("k", size.k), *([once("v", size.v)] if makes_k else [])]
    walked = _over(problem, lengths, lambda q, k: _row_reads(problem, q, k, *tile, cache, width))
    if not makes_k:
        walked = [t for t in walked if t.tensor != "delta"]
    writes = [once("dk", size.k)] * makes_k + [once("dv", size.v)] * makes_v
    writes += [t for t in walked if t.tensor == "dq sum"]
    # S again; then dO V^T and dS^T Q for dK, P^T dO for dV, dS K for dQ.
    widths = d + makes_k * (d_v + d) + makes_v * d_v + d * (width > 0)
    reads = summed(owned + walked)
    return Stage(part, 2 * size.pairs * widths, size.pairs, reads, summed(writes))


def _row_reads(
    problem, s_q: int, s_k: int, block_m: int, block_n: int, cache, width: int
) -> list[Transfer]:
    """What tiles of keys read of the query side, of one sequence."""
    walks = Walks(
        rounded(rows_seeing(problem, range(*tile), s_q, s_k), block_m, s_q)
        for tile in query_tiles(s_k, block_n)
    )
    size = problem.dtype.itemsize
    row_bytes = {
        "q": problem.head_dim * size,
        "dout": problem.head_dim_v * size,
        "lse": cost.lse_itemsize(problem),
        "delta": 4,
        "dq sum": 4 * width,
    }
    reads = [read_again(name, walks, n, 1, cache) for name, n in row_bytes.items()]
    return scaled(reads, problem.num_heads)


def store(problem: Problem, lengths: Lengths | None = None) -> Bill:
    """Appending to a paged cache: k and v in, converted, and out to their slots."""
    tokens = cost.tokens_q(problem, _kept(lengths))
    k = tokens * problem.num_kv_heads * problem.head_dim
    v = tokens * problem.num_kv_heads * problem.head_dim_v
    size, cached = problem.dtype.itemsize, problem.kv_dtype.itemsize
    slots = once("slot_mapping", tokens * _SLOT_ITEMSIZE)
    reads = summed([once("k", k * size), once("v", v * size), slots])
    writes = summed([once("k_cache", k * cached), once("v_cache", v * cached)])
    return Bill("store", (Stage("store", 0, 0, reads, writes),))
