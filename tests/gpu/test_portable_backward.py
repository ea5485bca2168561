"""The portable backward on a GPU, at real sizes, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from onchip.api import attention
from onchip.kernels.portable import backward
from onchip.kernels.portable.backward_config import BackwardConfig, Tiles, choose_backward
from onchip.problem import Mask, Op, Params, Problem, Saved, Tensors
from tests.portable_backward_cases import check_gradients, saved_of
from tests.portable_cases import Case, build

pytestmark = pytest.mark.gpu

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASES = {
    "plain": Case((300, 300), (411, 411), heads=4, kv_heads=2, dim=128, dim_v=128),
    "causal": Case((513,), (513,), heads=4, kv_heads=4, dim=64, dim_v=64, causal=True),
    "causal_more_keys": Case((200,), (777,), dim=128, dim_v=128, causal=True),
    "causal_more_queries": Case((777,), (200,), dim=64, dim_v=64, causal=True),
    "window": Case((600,), (700,), dim=64, dim_v=64, window=(130, 70)),
    "window_left": Case((600,), (700,), dim=64, dim_v=64, window=(33, -1)),
    "window_beyond_keys": Case((700,), (20,), window=(4, 3)),
    "dims_1_and_3": Case((200,), (300,), dim=1, dim_v=3, causal=True),
    "dims_80_and_72": Case((200,), (300,), dim=80, dim_v=72, causal=True),
    "dim_256": Case((333,), (400,), heads=4, kv_heads=2, dim=256, dim_v=256, causal=True),
    "dim_256_full": Case((256,), (256,), dim=256, dim_v=256),
    "multi_query": Case((300,), (300,), heads=8, kv_heads=1, dim=64, dim_v=64, causal=True),
    "softcap": Case((300,), (300,), dim=64, dim_v=64, softcap=5.0, causal=True),
    "alibi": Case((300, 300), (400, 400), dim=64, dim_v=64, alibi=2),
    "terms": Case((300,), (400,), dim=128, dim_v=64, alibi=1, softcap=4.0, sinks=True),
    "low_lse": Case((200,), (201,), dim=64, dim_v=64, scale=-4.0),
    "packed": Case((333, 0, 5, 170), (200, 90, 0, 440), dim=64, dim_v=64, packed=True),
    "packed_causal": Case(
        (333, 1, 400),
        (500, 7, 200),
        heads=4,
        kv_heads=2,
        dim=128,
        dim_v=128,
        packed=True,
        causal=True,
        sinks=True,
    ),
    "packed_256": Case((333, 100), (500, 30), dim=256, dim_v=256, packed=True, causal=True),
    "packed_used": Case((330, 80), (200, 410), packed=True, used=True, causal=True),
    "dense_used": Case((200, 200), (300, 170), used=True, window=(90, 20), sinks=True),
    "strided": Case((200, 200), (300, 300), strided=True, causal=True),
}


def run(case: Case, seed: int = 0, config=None, **options) -> None:
    call = build(case, device="cuda", seed=seed)
    saved = saved_of(call, **options)
    problem = replace(call.problem, op=Op.BACKWARD)
    config = config or choose_backward(problem)
    check_gradients(call, saved, backward.launch_with(config, problem, call.tensors, saved))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_feature(name, dtype):
    for seed in (0, 1):
        run(replace(CASES[name], dtype=dtype), seed, strided=seed == 1, with_dlse=seed == 0)


@pytest.mark.parametrize("reduction", ["none", "atomics", "tma"])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "packed_causal", "dense_used", "terms"])
def test_every_config(name, descriptors, reduction):
    case = replace(CASES[name], dtype=BF16)
    config = choose_backward(build(case, device="cuda").problem)
    config = replace(config, descriptors=descriptors, reduction=reduction, group_heads=descriptors)
    run(case, config=config)


def dense(batch, seqlen, heads, dim, dtype=BF16, causal=True):
    """A problem with data and what its backward receives; out and LSE are torch's."""
    q, k, v, dout = (
        torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype) for _ in range(4)
    )
    params = Params(seqlen, seqlen, -1, 0 if causal else -1, dim**-0.5, 0.0, False, 0, "")
    tensors = Tensors(q, k, v)
    assert Mask.of(causal, (-1, -1)) == Mask(params.window_left, params.window_right)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal
    )[:2]
    saved = Saved(dout, None, out.transpose(1, 2).contiguous(), lse.contiguous())
    return Problem.of(Op.BACKWARD, tensors, params), tensors, saved


def test_gradients_are_bitwise_reproducible():
    problem, tensors, saved = dense(2, 1000, 4, 128)
    first = backward.launch(replace(problem, deterministic=True), tensors, saved)[:3]
    for _ in range(3):
        again = backward.launch(replace(problem, deterministic=True), tensors, saved)[:3]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dim", [64, 256])  # 256: launches abreast, on streams of their own
def test_a_cuda_graph_replays_with_new_lengths(dim):
    case = replace(CASES["packed_causal"], dtype=BF16, sinks=False, dim=dim, dim_v=dim)
    call = build(case, device="cuda")
    saved = saved_of(call)
    problem, tensors = replace(call.problem, op=Op.BACKWARD), call.tensors
    backward.launch(problem, tensors, saved)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward.launch(problem, tensors, saved)
    graph.replay()
    check_gradients(call, saved, captured)

    other = build(replace(case, lengths_q=(1, 400, 333), lengths_k=(7, 500, 200)), "cuda", seed=3)
    fresh = saved_of(other)
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        getattr(tensors, name).copy_(getattr(other.tensors, name))
    for name in ("dout", "dlse", "out", "lse"):
        getattr(saved, name).copy_(getattr(fresh, name))
    graph.replay()
    check_gradients(other, fresh, captured)


def test_launches_abreast_keep_the_order_of_the_callers_stream():
    """Inputs that arrive late on the caller's stream, and gradients that are used at once."""
    problem, tensors, saved = dense(2, 700, 4, 256)
    want = [x.clone() for x in backward.launch(problem, tensors, saved)[:3]]
    torch.cuda.synchronize()
    late = torch.cuda.Stream()
    given, delayed = saved.dout, torch.empty_like(saved.dout)
    with torch.cuda.stream(late):
        for _ in range(3):
            delayed.fill_(float("nan"))
            torch.cuda._sleep(5_000_000)
            delayed.copy_(given)
            again = backward.launch(problem, tensors, replace(saved, dout=delayed))[:3]
            used = [x + 0 for x in again]
            for x in again:
                x.fill_(float("nan"))
            del again
    late.synchronize()
    for x, y in zip(used, want, strict=True):
        assert torch.equal(x, y)


def test_more_than_two_to_the_31_elements():
    """Head 0 of the last sequence, past the 2^31st element, as in a call of its own."""
    problem, tensors, saved = dense(33, 16384, 32, 128)
    gradients = backward.launch(problem, tensors, saved)[:3]
    last = [x[-1:, :, :1].clone() for x in (tensors.q, tensors.k, tensors.v)]
    own = Saved(
        saved.dout[-1:, :, :1].clone(), None, saved.out[-1:, :, :1].clone(),
        saved.lse[-1:, :1].clone(),
    )  # fmt: skip
    assert tensors.q.numel() > 2**31
    single = replace(problem, batch=1, num_heads=1, num_kv_heads=1, tokens_q=16384)
    alone = backward.launch(single, Tensors(*last), own)[:3]
    for x, want in zip(gradients, alone, strict=True):
        assert torch.equal(x[-1:, :, :1], want)


def test_extra_memory_is_the_lse_and_d():
    problem, tensors, saved = dense(1, 16384, 16, 128)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = backward.launch(problem, tensors, saved)[:3]
    peak = torch.cuda.max_memory_allocated() - before
    named = sum(x.numel() * x.element_size() for x in gradients)
    assert peak <= named + 2 * saved.lse.numel() * 4 + (1 << 20)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["plain", "packed_causal", "dim_256", "packed_256", "dense_used"])
def test_dv_in_a_launch_of_its_own(name, dtype):
    case = replace(CASES[name], dtype=dtype)
    tiles = Tiles(32, 64, 4, 2)
    run(case, config=BackwardConfig(tiles, tiles, descriptors=True, dv=tiles))


def test_64k_tokens_need_little_more_than_inputs_and_results():
    shape = (1, 65536, 16, 128)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    q, k, v = (torch.randn(shape, device="cuda", dtype=BF16).requires_grad_() for _ in range(3))
    dout = torch.randn(shape, device="cuda", dtype=BF16)
    out = attention(q, k, v, causal=True)
    out.backward(dout)
    used_bytes = torch.cuda.max_memory_allocated() - before
    kept = (q, k, v, dout, out, q.grad, k.grad, v.grad)
    assert used_bytes <= 1.3 * sum(x.numel() * x.element_size() for x in kept)
    assert all(x.grad.isfinite().all() for x in (q, k, v))
