"""The mask's arithmetic against the matrix itself, and what a Problem says about itself."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from onchip import reference
from onchip.problem import Layout, Mask, Op, Params, Problem, Tensors, needs_copy

LENGTHS = list(itertools.product(range(6), range(6)))
SIDES = [-1, 0, 1, 2, 4, 7]


def masks_and_matrices():
    for (seqlen_q, seqlen_k), left, right in itertools.product(LENGTHS, SIDES, SIDES):
        matrix = reference.visible(seqlen_q, seqlen_k, window=(left, right)).numpy()
        yield Mask(left, right), seqlen_q, seqlen_k, matrix


def test_num_visible_counts_the_matrix():
    for mask, seqlen_q, seqlen_k, matrix in masks_and_matrices():
        assert mask.num_visible(seqlen_q, seqlen_k) == matrix.sum(), (mask, seqlen_q, seqlen_k)


def test_num_visible_of_long_sequences():
    assert Mask(right=0).num_visible(2**20, 2**20) == 2**19 * (2**20 + 1)
    assert Mask(left=127, right=0).num_visible(10**6, 10**6) == 128 * 10**6 - 127 * 64
    assert Mask().num_visible(2**31, 2**31) == 2**62


def test_row_range_is_the_rows_that_see_a_key():
    for mask, seqlen_q, seqlen_k, matrix in masks_and_matrices():
        rows = [i for i in range(seqlen_q) if matrix[i].any()]
        assert list(mask.row_range(seqlen_q, seqlen_k)) == rows, (mask, seqlen_q, seqlen_k)


def test_key_range_spans_the_keys_that_some_row_sees():
    for mask, seqlen_q, seqlen_k, matrix in masks_and_matrices():
        for start, end in itertools.combinations(range(seqlen_q + 1), 2):
            seen = [j for j in range(seqlen_k) if matrix[start:end, j].any()]
            got = mask.key_range(start, end, seqlen_q, seqlen_k)
            # Rows that see nothing may sit inside the block; one band leaves no gap otherwise.
            want = range(seen[0], seen[-1] + 1) if seen else range(0)
            assert list(got) == list(want), (mask, seqlen_q, seqlen_k, start, end)


def test_mask_of_call_arguments():
    assert Mask.of(False, (-1, -1)).is_full
    assert Mask.of(True, (-1, -1)) == Mask(-1, 0)
    assert Mask.of(True, (3, 9)) == Mask(3, 0)
    assert Mask.of(False, (3, 9)) == Mask(3, 9)
    assert Mask(3, 0).causal and not Mask(3, 1).causal and not Mask(3, -1).is_full


def params(seqlen_q, seqlen_k, **changes) -> Params:
    return Params(seqlen_q, seqlen_k, -1, -1, 0.5, 0.0, False, 0, "")._replace(**changes)


def test_dense_problem():
    q, kv = torch.zeros(2, 5, 6, 8), torch.zeros(2, 7, 2, 8)
    p = Problem.of(Op.FORWARD, Tensors(q, kv, kv[..., :4]), params(5, 7, window_right=0))
    assert (p.batch, p.seqlen_q, p.seqlen_k, p.tokens_q) == (2, 5, 7, 10)
    assert (p.num_heads, p.num_kv_heads, p.group, p.head_dim, p.head_dim_v) == (6, 2, 3, 8, 4)
    assert p.layout_q is p.layout_k is Layout.DENSE
    assert p.features == {"causal", "gqa", "head_dim_v"}
    assert hash(p) == hash(dataclasses.replace(p)) and p.copies == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(p, "batch", 3)  # noqa: B010 (a type checker would refuse the plain form)
    assert p.describe() == (
        "forward: B=2 S_q=5 S_k=7 H=6 H_kv=2 D=8 D_v=4 float32 on cpu, dense queries, "
        "dense keys, causal"
    )


def test_paged_problem_is_json():
    q, cache = torch.zeros(9, 4, 8), torch.zeros(3, 16, 4, 8)
    cu, table = torch.tensor([0, 4, 9]), torch.zeros(2, 2, dtype=torch.int32)
    tensors = Tensors(q, cache, cache, cu_seqlens_q=cu, block_table=table, seqused_k=cu[1:])
    p = Problem.of(Op.FORWARD, tensors, params(5, 20, window_left=3, softcap=2.0))
    assert (p.layout_q, p.layout_k) == (Layout.PACKED, Layout.PAGED)
    assert (p.batch, p.tokens_q, p.page_size, p.num_pages) == (2, 9, 16, 3)
    assert p.features == {"window", "softcap", "seqused_k"}
    plain = json.loads(json.dumps(p.to_dict()))
    assert plain["dtype"] == "float32" and plain["mask"] == {"left": 3, "right": -1}
    assert plain["layout_k"] == "paged" and plain["op"] == "forward"
    assert "pages of 16" in p.describe()


def test_needs_copy_only_without_stride_1():
    x = torch.zeros(2, 3, 4, 5)
    assert not needs_copy(x) and not needs_copy(x.transpose(1, 2)) and not needs_copy(x[..., :1])
    assert needs_copy(x.transpose(-1, -2)) and needs_copy(x[..., ::2])
