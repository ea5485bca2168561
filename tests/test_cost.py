"""What a call costs, against worked numbers and brute force."""

from __future__ import annotations

import pytest
import torch

import onchip
from onchip.analysis import cost
from onchip.dispatch import human
from onchip.problem import Layout, Mask, Op, Problem

MIB = 1 << 20


def _problem(op=Op.FORWARD, seqlen=16384, heads=1, dtype=torch.float16, mask=None, batch=1):
    return Problem(
        op=op,
        device="cpu",
        dtype=dtype,
        kv_dtype=dtype,
        layout_q=Layout.DENSE,
        layout_k=Layout.DENSE,
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        tokens_q=batch * seqlen,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        head_dim_v=64,
        mask=mask or Mask(),
        scale=0.125,
    )


def test_slow_memory_bill_of_16k():
    assert 16384**2 * 2 == 536_870_912 == 512 * MIB
    assert cost.three_step_bytes(_problem()) == 4 * 536_870_912 == 2048 * MIB


@pytest.mark.parametrize(("seqlen", "traffic_mib"), [(4096, 128), (32768, 8192)])
def test_slow_memory_bill_of_other_lengths(seqlen, traffic_mib):
    assert cost.three_step_bytes(_problem(seqlen=seqlen)) == traffic_mib * MIB


def test_packing_offsets_and_their_cost():
    lengths_q, lengths_k = [5, 2, 1], [9, 7, 3]
    offsets_q = torch.tensor([0, *lengths_q]).cumsum(0).int()
    offsets_k = torch.tensor([0, *lengths_k]).cumsum(0).int()
    assert offsets_q.tolist() == [0, 5, 7, 8] and offsets_k.tolist() == [0, 9, 16, 19]
    q, k = torch.randn(8, 2, 4), torch.randn(19, 2, 4)
    explained = onchip.explain(
        q,
        k,
        k,
        cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k,
        max_seqlen_q=5,
        max_seqlen_k=9,
    )
    assert explained.upper_bound
    pairs = list(zip(lengths_q, lengths_k, strict=True))
    exact = cost.flops(explained.problem, pairs)
    assert exact == 2 * (5 * 9 + 2 * 7 + 1 * 3) * 2 * (4 + 4) <= explained.flops


def test_flops_and_bytes():
    causal = _problem(seqlen=7, heads=3, mask=Mask(-1, 0), batch=2)
    assert cost.flops(causal) == 4 * 64 * (7 * 8 // 2) * 3 * 2
    tensor = 2 * 7 * 3 * 64 * 2
    assert cost.traffic_bytes(causal) == 4 * tensor + 2 * 7 * 3 * 4
    backward = _problem(Op.BACKWARD, seqlen=7, heads=3, batch=2)
    assert cost.flops(backward) == 10 * 64 * 49 * 3 * 2
    assert cost.traffic_bytes(backward) == 8 * tensor + 2 * 7 * 3 * 4


def test_human_amounts():
    assert human(536_870_912) == "512.0 MiB"
    assert human(999, "FLOP", 1000) == "999 FLOP" and human(1.5e12, "FLOP", 1000) == "1.5 TFLOP"
