"""What a call must compute and move, from its Problem alone.

FLOPs count multiplications and additions of the matrix products that the mask lets through.
Bytes are compulsory: every input read once, every output written once. What each method moves
beyond that is its bill, in `onchip.analysis.bill`.

Every function takes the lengths of the sequences, (S_q, S_k) of each, and is exact with them;
without them it takes the Problem's maxima, which for packed or paged sequences are an upper
bound.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, D / D_v head dims.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from onchip.problem import Layout, Op, Problem

Lengths = Iterable[tuple[int, int]]


def sequence_lengths(problem: Problem) -> list[tuple[int, int]]:
    """(S_q, S_k) of each sequence as far as the Problem knows them: the maxima when not dense."""
    return [(problem.seqlen_q, problem.seqlen_k)] * problem.batch


def num_pairs(problem: Problem, lengths: Lengths | None = None) -> int:
    """(query, key) pairs of one head that the mask lets through, over all sequences."""
    lengths = sequence_lengths(problem) if lengths is None else lengths
    return sum(problem.mask.num_visible(s_q, s_k) for s_q, s_k in lengths)


def flops(problem: Problem, lengths: Lengths | None = None) -> int:
    """FLOPs of the matrix products: 2 in the forward, 5 in the backward.

    Forward: Q K^T and P V. Backward: Q K^T again, dV = P^T dO, dP = dO V^T, dQ = dS K,
    dK = dS^T Q (Dao et al. 2022, FlashAttention, algorithm 4).
    """
    pairs = num_pairs(problem, lengths) * problem.num_heads
    if problem.op is Op.STORE:
        return 0
    if problem.op is Op.FORWARD:
        return 2 * pairs * (problem.head_dim + problem.head_dim_v)
    return 2 * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)


def tokens_k(problem: Problem, lengths: Lengths | None = None) -> int:
    """Key tokens of all sequences; without lengths an upper bound when packed or paged."""
    if lengths is None:
        return problem.batch * problem.seqlen_k
    return sum(s_k for _, s_k in lengths)


def tokens_q(problem: Problem, lengths: Lengths | None = None) -> int:
    """Query tokens of all sequences: exact from the Problem alone."""
    return problem.tokens_q if lengths is None else sum(s_q for s_q, _ in lengths)


def traffic_bytes(problem: Problem, lengths: Lengths | None = None) -> int:
    """Bytes that any implementation must move: inputs read once, outputs written once.

    Forward: q, k, v in, out and LSE out. Backward: q, k, v, out, dout, LSE in, dq, dk, dv out.
    Store: k, v in and out.
    """
    lengths = None if lengths is None else list(lengths)
    size, kv_size = problem.dtype.itemsize, problem.kv_dtype.itemsize
    kv_token = problem.num_kv_heads * (problem.head_dim + problem.head_dim_v)
    if problem.op is Op.STORE:
        return tokens_q(problem, lengths) * kv_token * (size + kv_size)
    rows = tokens_q(problem, lengths) * problem.num_heads
    q_bytes = rows * problem.head_dim * size
    out_bytes = rows * problem.head_dim_v * out_itemsize(problem)
    kv_bytes = tokens_k(problem, lengths) * kv_token * kv_size
    if problem.op is Op.FORWARD:
        return q_bytes + kv_bytes + out_bytes + rows * lse_itemsize(problem)
    return 2 * q_bytes + 2 * kv_bytes + 2 * out_bytes + rows * lse_itemsize(problem)


def lse_itemsize(problem: Problem) -> int:
    """Bytes of an LSE: float32, float64 for float64 inputs."""
    return max(4, problem.dtype.itemsize)


def out_itemsize(problem: Problem) -> int:
    """Bytes of an output's element: q's, but for float8, whose outputs are wider."""
    dtype = getattr(torch, problem.out_dtype) if problem.out_dtype else problem.dtype
    return dtype.itemsize


def score_bytes(problem: Problem, lengths: Lengths | None = None) -> int:
    """Bytes of S, all pairs of all heads, the hidden ones included: what three steps keep.

    In the dtype of the output: three steps keep no scores in float8.
    """
    lengths = sequence_lengths(problem) if lengths is None else lengths
    return problem.num_heads * sum(q * k for q, k in lengths) * out_itemsize(problem)


def three_step_bytes(problem: Problem, lengths: Lengths | None = None) -> int:
    """Bytes that S and P alone move when they are kept in memory (three-step attention).

    Forward: write S, softmax reads S and writes P, the second product reads P: four times
    H * S_q * S_k. Backward: read P, write dP, read P and dP and write dS, read dS twice:
    seven times.
    """
    if problem.op is Op.STORE:
        return 0
    return (4 if problem.op is Op.FORWARD else 7) * score_bytes(problem, lengths)


def is_upper_bound(problem: Problem) -> bool:
    """Whether lengths are only known as maxima, so that costs are upper bounds."""
    varied = problem.layout_q is not Layout.DENSE or problem.layout_k is not Layout.DENSE
    return varied or problem.seqused_k or problem.leftpad or bool(problem.mask_mod)
