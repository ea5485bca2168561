"""The kernels of the Hopper backward as tables of their roles; the method is in backward.py.

Legend: D / D_v head dimensions, BM / BN rows of a tile of queries and of keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper import (
    backward_keys,
    backward_pair,
    backward_queries,
    backward_round,
    backward_sums,
)
from onchip.kernels.hopper.backward_pieces import Pieces
from onchip.kernels.hopper.backward_walk import Sizes, Sources

_SIZES = "seqlen_q seqlen_k num_heads num_kv_heads group stats_width left right".split()
_SIZES += "units lag slots whole width".split()


@gluon.jit(do_not_specialize=_SIZES)
def attn_bwd_keys_hopper(
    q, k, v, do, lse, delta, dq_sum, dq, dk, dv, counters, piece_sums, piece_counters,
    dk_memory, dv_memory, cu_seqlens_q, cu_seqlens_k,
    seqlen_q, seqlen_k, num_heads, num_kv_heads, group, stats_width, left, right,
    units, lag, table, slots, whole, width, scale: gl.float32, factor: gl.float32,
    cap: gl.float32, SPEC: gl.constexpr,
):  # fmt: skip
    """One CTA: dK and dV of its tiles of BN keys, or of a piece of one, and what they add to dQ.

    `dq_sum` is the float32 dQ; `counters` are those of `backward_round`, then one for each tile of
    dQ where sums are ordered; `table` and `slots` are the CTAs' lists (`backward_table`), `whole`
    the tiles before those that are cut (`backward_pieces`), whose pieces' sums, counters and
    gradients are `piece_sums` to `dv_memory`.
    """
    sizes = Sizes(
        cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, num_heads, num_kv_heads, group,
        stats_width, left, right, units, lag, table, slots, whole, width,
    )  # fmt: skip
    sources = Sources(q, k, v, do, lse, delta)
    shared = Pieces(piece_sums, piece_counters, dk_memory, dv_memory)
    # Registers: what a role's sums need, 32 for each 64 x 64 of them, and two of S or dP decide.
    # A worker holds addresses in ordinary registers, the first role in uniform ones: at D = 128,
    # masked, a warpgroup of keys keeps 8 numbers in memory as a worker and 19 as the first role
    # (16k causal 648 TFLOP/s against 633; elsewhere, and in a fixed order, the first role is up to
    # 4 % quicker; H200, 2026-11-30).
    if not SPEC.apart and SPEC.multiplies_first:
        S = backward_pair.new_shared(lse, dq_sum, q.dtype, SPEC)
        gl.warp_specialize(
            [
                (backward_pair.compute, (0, S, sizes, shared, scale, factor, cap, SPEC)),
                (backward_pair.compute, (1, S, sizes, shared, scale, factor, cap, SPEC)),
                (backward_sums.make_dq, (S, sizes, SPEC)),
                (backward_pair.load, (sources, S, sizes, SPEC)),
                (backward_pair.keep, (sources, dk, dv, counters, S, sizes, SPEC)),
                (backward_sums.add_dq, (dq_sum, counters, S, sizes, SPEC)),
                (backward_round.round_dq, (dq_sum, dq, counters, S, sizes, scale, SPEC)),
            ],
            [4, 4, 1, 1, 1, 1],
            [208, 64, 32, 32, 32, 32],
        )
    elif not SPEC.apart:
        S = backward_pair.new_shared(lse, dq_sum, q.dtype, SPEC)
        gl.warp_specialize(
            [
                (backward_sums.make_dq, (S, sizes, SPEC)),
                (backward_pair.compute, (0, S, sizes, shared, scale, factor, cap, SPEC)),
                (backward_pair.compute, (1, S, sizes, shared, scale, factor, cap, SPEC)),
                (backward_pair.load, (sources, S, sizes, SPEC)),
                (backward_pair.keep, (sources, dk, dv, counters, S, sizes, SPEC)),
                (backward_sums.add_dq, (dq_sum, counters, S, sizes, SPEC)),
                (backward_round.round_dq, (dq_sum, dq, counters, S, sizes, scale, SPEC)),
            ],
            [4, 4, 1, 1, 1, 1],
            [208, 208, 32, 32, 32, 32],
        )
    else:
        S = backward_keys.new_shared(lse, q.dtype, SPEC)
        gl.warp_specialize(
            [
                (backward_keys.score, (S, sizes, factor, cap, SPEC)),
                (backward_keys.gradient, (S, sizes, scale, SPEC)),
                (backward_keys.load, (sources, dk, dv, S, sizes, SPEC)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit(do_not_specialize=_SIZES)
def attn_bwd_queries_hopper(
    q, k, v, do, lse, delta, dq, cu_seqlens_q, cu_seqlens_k,
    seqlen_q, seqlen_k, num_heads, num_kv_heads, group, stats_width, left, right,
    units, lag, table, slots, whole, width, scale: gl.float32, factor: gl.float32,
    cap: gl.float32, SPEC: gl.constexpr,
):  # fmt: skip
    """One CTA: dQ of BM queries of one head; `lse` and `delta` are pointers here."""
    S = backward_queries.new_shared(q.dtype, SPEC)
    sizes = Sizes(
        cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, num_heads, num_kv_heads, group,
        stats_width, left, right, units, lag, table, slots, whole, width,
    )  # fmt: skip
    sources = Sources(q, k, v, do, lse, delta)
    # As the default role, a consumer keeps the addresses of its 36 products in registers across
    # the loop, and spills 28 of them (triton 3.6); so the loads are the default one.
    gl.warp_specialize(
        [
            (backward_queries.load, (sources, dq, S, sizes, SPEC)),
            (backward_queries.compute, (0, lse, delta, S, sizes, scale, factor, cap, SPEC)),
            (backward_queries.compute, (1, lse, delta, S, sizes, scale, factor, cap, SPEC)),
        ],
        [4, 4],
        [240, 240],
    )
