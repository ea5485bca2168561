"""The bill of slow-memory bytes of each method, tensor by tensor and stage by stage.

A stage is one launch: what it computes, reads and writes. Of what its programs request, the L2
cache serves a part; the rest comes from slow memory. With no cache every request is slow.

Left out, since they are a few bytes for each sequence or head: lengths, offsets, slopes, sinks.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, D / D_v head dims,
N page size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from onchip.analysis import cost
from onchip.analysis.cost import Lengths
from onchip.problem import Op, Problem

_TABLE_ITEMSIZE = 4  # block_table is int32
_SLOT_ITEMSIZE = 8  # slot_mapping is int64


@dataclass(frozen=True)
class Transfer:
    """Bytes of one tensor that a stage reads or writes.

    Args:
        tensor: its name.
        slow_bytes: what slow memory serves.
        requested_bytes: what the programs ask for; the L2 cache serves the difference.
    """

    tensor: str
    slow_bytes: int
    requested_bytes: int


def once(tensor: str, num_bytes: int) -> Transfer:
    """A tensor of which every byte is moved once."""
    return Transfer(tensor, num_bytes, num_bytes)


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


@dataclass(frozen=True)
class Cache:
    """The L2 cache, as programs that read the same tensor again see it.

    Args:
        size_bytes: how much of that tensor it can hold.
        num_programs: programs that run at one time; they walk in step and share what they read.
    """

    size_bytes: int
    num_programs: int

    def slow_bytes(self, unique_bytes: int, requested_bytes: int, num_walks: int) -> int:
        """Slow bytes of `num_walks` programs that walk over the same `unique_bytes`.

        Once if it stays in the cache, else once for each wave of programs.
        """
        if unique_bytes <= self.size_bytes:
            return unique_bytes
        num_waves = -(-num_walks // max(1, self.num_programs))
        return min(requested_bytes, unique_bytes * num_waves)


def rounded(span: range, block: int, limit: int) -> range:
    """The span with its ends moved out to whole blocks, but not beyond `limit`."""
    if not span:
        return range(0)
    return range(span.start // block * block, min(limit, -(-span.stop // block) * block))


def query_tiles(s_q: int, block_m: int) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of each tile of queries."""
    for start in range(0, s_q, block_m):
        yield start, min(start + block_m, s_q)


def rows_seeing(problem: Problem, keys: range, s_q: int, s_k: int) -> range:
    """Queries that see at least one of some keys: `Mask.key_range` the other way round."""
    mask, shift = problem.mask, s_k - s_q
    start = 0 if mask.right < 0 else max(0, keys.start - shift - mask.right)
    stop = s_q if mask.left < 0 else min(s_q, keys.stop - shift + mask.left)
    return range(start, max(start, stop))


class _Walks:
    """Tokens that the tiles of one side read of the other, over all sequences.

    Args:
        spans: tokens that each tile of one sequence reads.
    """

    def __init__(self, spans: Iterable[range]):
        spans = [span for span in spans if span]
        self.count = len(spans)
        self.requested = sum(map(len, spans))
        # Bands move on monotonically, so that the union of their spans has no gap.
        self.unique = range(
            min((span.start for span in spans), default=0),
            max((span.stop for span in spans), default=0),
        )
        self.spans = spans


def _read_again(
    tensor: str, walks: _Walks, token_bytes: int, repeats: int, cache: Cache | None
) -> Transfer:
    """A tensor that `repeats` rounds of walks read, one head of one sequence."""
    requested = walks.requested * repeats * token_bytes
    if cache is None:
        return once(tensor, requested)
    unique = len(walks.unique) * token_bytes
    return Transfer(tensor, cache.slow_bytes(unique, requested, walks.count * repeats), requested)


def _scaled(transfers: Iterable[Transfer], factor: int) -> list[Transfer]:
    return [
        Transfer(t.tensor, t.slow_bytes * factor, t.requested_bytes * factor) for t in transfers
    ]


def _summed(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Transfers of the same tensor added up; tensors of no bytes are left out."""
    slow: Counter[str] = Counter()
    requested: Counter[str] = Counter()
    for transfer in transfers:
        slow[transfer.tensor] += transfer.slow_bytes
        requested[transfer.tensor] += transfer.requested_bytes
    return tuple(Transfer(name, slow[name], requested[name]) for name in slow if requested[name])


def _over(
    problem: Problem, lengths: Lengths | None, make: Callable[[int, int], list[Transfer]]
) -> list[Transfer]:
    """Transfers of all sequences, made once for each distinct pair of lengths."""
    given = Counter(cost.sequence_lengths(problem) if lengths is None else lengths)
    return [t for (s_q, s_k), n in given.items() for t in _scaled(make(s_q, s_k), n)]


class _Sizes:
    """Bytes of whole tensors, and tokens of all sequences."""

    def __init__(self, problem: Problem, lengths: list[tuple[int, int]] | None):
        itemsize = problem.dtype.itemsize
        self.rows = cost.tokens_q(problem, lengths) * problem.num_heads
        keys = cost.tokens_k(problem, lengths) * problem.num_kv_heads
        self.q = self.rows * problem.head_dim * itemsize
        self.out = self.rows * problem.head_dim_v * itemsize
        self.k = keys * problem.head_dim * problem.kv_dtype.itemsize
        self.v = keys * problem.head_dim_v * problem.kv_dtype.itemsize
        self.lse = self.rows * cost.lse_itemsize(problem)
        self.scores = cost.score_bytes(problem, lengths)
        self.all_pairs = self.scores // itemsize
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


def _key_walks(problem: Problem, s_q: int, s_k: int, block_m: int, block_n: int) -> _Walks:
    """Keys that each tile of queries reads."""
    return _Walks(
        rounded(problem.mask.key_range(start, stop, s_q, s_k), block_n, s_k)
        for start, stop in query_tiles(s_q, block_m)
    )


def _kv_reads(
    problem: Problem, walks: _Walks, cache: Cache | None, k_rounds: int = 1, repeats: int = 1
) -> list[Transfer]:
    """K, V and block_table reads of one sequence: `repeats` walks by each query tile."""
    size, heads = problem.kv_dtype.itemsize, problem.num_kv_heads
    d, d_v = problem.head_dim * size, problem.head_dim_v * size
    reads = _scaled([_read_again("k", walks, d, repeats * k_rounds, cache)], heads)
    reads += _scaled([_read_again("v", walks, d_v, repeats, cache)], heads)
    if problem.page_size:
        # A token's page number is wanted once in each round; k and v share it.
        pages = _Walks(rounded_pages(span, problem.page_size) for span in walks.spans)
        rounds = repeats * k_rounds * heads
        reads.append(_read_again("block_table", pages, _TABLE_ITEMSIZE, rounds, cache))
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
    return size, _summed([once("q", size.q), *reads]), _summed(writes)


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
    reads = _summed([q, *_over(problem, lengths, reads_of)])
    out, lse = once("out", size.out), once("lse", size.lse)
    flops = cost.flops(problem, lengths)
    if num_splits == 1:
        return Bill("decode", (Stage("decode", flops, size.pairs, reads, _summed([out, lse])),))
    parts = (
        once("partial out", 4 * size.rows * problem.head_dim_v * num_splits),
        once("partial lse", 4 * size.rows * num_splits),
    )
    merge = Stage("merge", 0, size.rows * num_splits, parts, _summed([out, lse]))
    return Bill("decode", (Stage("split", flops, size.pairs, reads, parts), merge))


def backward(
    problem: Problem,
    dkdv: tuple[int, int],
    dq: tuple[int, int],
    lengths: Lengths | None = None,
    cache: Cache | None = None,
    dv: tuple[int, int] | None = None,
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
    """
    lengths = _kept(lengths)
    size = _Sizes(problem, lengths)
    delta, dout = once("delta", 4 * size.rows), once("dout", size.out)
    pre = Stage("delta", 0, 0, _summed([once("out", size.out), dout]), _summed([delta]))
    parts = {"dkdv": dkdv} if dv is None else {"dv": dv, "dk": dkdv}
    keys = [_key_stage(problem, part, tile, lengths, cache) for part, tile in parts.items()]
    owned = [once("q", size.q), dout, once("lse", size.lse), delta]
    walked = _over(
        problem,
        lengths,
        lambda q, k: _kv_reads(problem, _key_walks(problem, q, k, *dq), cache, 1, problem.group),
    )
    flops = 2 * size.pairs * (2 * problem.head_dim + problem.head_dim_v)
    out = _summed([once("dq", size.q)])
    queries = Stage("dq", flops, size.pairs, _summed(owned + walked), out)
    return Bill("backward", (pre, *keys, queries))


def _key_stage(problem, part: str, tile: tuple[int, int], lengths, cache) -> Stage:
    """The launch whose programs own keys: "dkdv", or "dv" or "dk" alone."""
    size, d, d_v = _Sizes(problem, lengths), problem.head_dim, problem.head_dim_v
    makes_k, makes_v = "dk" in part, "dv" in part
    owned = [once("k", size.k), *([once("v", size.v)] if makes_k else [])]
    walked = _over(problem, lengths, lambda q, k: _row_reads(problem, q, k, *tile, cache))
    if not makes_k:
        walked = [t for t in walked if t.tensor != "delta"]
    writes = [once("dk", size.k)] * makes_k + [once("dv", size.v)] * makes_v
    # S again; then dO V^T and dS^T Q for dK, P^T dO for dV.
    widths = d + makes_k * (d_v + d) + makes_v * d_v
    reads = _summed(owned + walked)
    return Stage(part, 2 * size.pairs * widths, size.pairs, reads, _summed(writes))


def _row_reads(problem, s_q: int, s_k: int, block_m: int, block_n: int, cache) -> list[Transfer]:
    """What tiles of keys read of the query side, of one sequence."""
    walks = _Walks(
        rounded(rows_seeing(problem, range(*tile), s_q, s_k), block_m, s_q)
        for tile in query_tiles(s_k, block_n)
    )
    size = problem.dtype.itemsize
    row_bytes = {
        "q": problem.head_dim * size,
        "dout": problem.head_dim_v * size,
        "lse": cost.lse_itemsize(problem),
        "delta": 4,
    }
    reads = [_read_again(name, walks, n, 1, cache) for name, n in row_bytes.items()]
    return _scaled(reads, problem.num_heads)


def store(problem: Problem, lengths: Lengths | None = None) -> Bill:
    """Appending to a paged cache: k and v in, converted, and out to their slots."""
    tokens = cost.tokens_q(problem, _kept(lengths))
    k = tokens * problem.num_kv_heads * problem.head_dim
    v = tokens * problem.num_kv_heads * problem.head_dim_v
    size, cached = problem.dtype.itemsize, problem.kv_dtype.itemsize
    slots = once("slot_mapping", tokens * _SLOT_ITEMSIZE)
    reads = _summed([once("k", k * size), once("v", v * size), slots])
    writes = _summed([once("k_cache", k * cached), once("v_cache", v * cached)])
    return Bill("store", (Stage("store", 0, 0, reads, writes),))
