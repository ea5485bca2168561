"""The Hopper backward on a GPU, at real sizes, against the float64 oracle."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import onchip
from onchip import dispatch
from onchip.kernels import KERNELS
from onchip.kernels.hopper import backward
from onchip.problem import Op, Saved
from tests.portable_backward_cases import check_gradients, saved_of
from tests.portable_cases import Case, build
from tests.tolerance import check_gradients as check_public

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs sm_90")]

HAS_FORWARD = any(k.name == "hopper" and k.op is Op.FORWARD for k in KERNELS)

F16, BF16 = torch.float16, torch.bfloat16
CASES = {
    "full": Case((256, 256), (384, 384), heads=2, kv_heads=2),
    "tails": Case((300, 300), (411, 411), heads=4, kv_heads=2),
    "causal": Case((512,), (512,), heads=2, kv_heads=2, causal=True),
    "causal_tails": Case((513, 513), (513, 513), heads=4, kv_heads=1, causal=True),
    "causal_more_keys": Case((200,), (777,), heads=4, kv_heads=2, causal=True),
    "causal_more_queries": Case((777,), (200,), heads=4, kv_heads=2, causal=True),
    "window": Case((600, 600), (700, 700), heads=4, kv_heads=2, window=(130, 70)),
    "window_left": Case((600,), (700,), window=(33, -1)),
    "window_causal": Case((700,), (700,), heads=2, kv_heads=2, window=(200, 0)),
    "window_beyond_keys": Case((700,), (20,), window=(4, 3)),
    "softcap": Case((300,), (300,), softcap=5.0, causal=True),
    "softcap_sinks": Case((300,), (400,), heads=4, kv_heads=2, softcap=4.0, sinks=True),
    "sinks": Case((300, 300), (257, 257), heads=4, kv_heads=2, sinks=True, causal=True),
    "low_lse": Case((200,), (201,), scale=-4.0),
    "one": Case((1,), (1,), heads=2, kv_heads=2, causal=True),
    "packed": Case((333, 0, 5, 170), (200, 90, 0, 440), packed=True),
    "packed_causal": Case(
        (333, 1, 400), (500, 7, 200), heads=4, kv_heads=2, packed=True, causal=True, sinks=True
    ),
    "packed_window": Case(
        (333, 1, 400), (500, 7, 200), heads=2, kv_heads=2, packed=True, window=(100, 20)
    ),
    "strided": Case((200, 200), (300, 300), strided=True, causal=True),
}
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (80, 72), (8, 24), (128, 64), (136, 256)]


def run(case: Case, seed: int = 0, config=None, **options) -> None:
    call = build(case, device="cuda", seed=seed)
    saved = saved_of(call, **options)
    problem = replace(call.problem, op=Op.BACKWARD)
    assert not dispatch.rejections(problem, "hopper")
    config = config or backward.choose_backward(problem)
    check_gradients(call, saved, backward.launch_with(config, problem, call.tensors, saved))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_feature(name, dims):
    for seed, dtype in ((0, BF16), (1, F16)):
        case = replace(CASES[name], dim=dims[0], dim_v=dims[1], dtype=dtype)
        run(case, seed, strided=seed == 1, with_dlse=seed == 0)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_other_sequences_may_hold_nan(dim):
    """Sequence 1 is NaN throughout; the others' gradients are as they should be."""
    case = Case((100, 60, 200), (100, 90, 150), dim=dim, dim_v=dim, packed=True, dtype=BF16)
    for causal in (False, True):
        call = build(replace(case, causal=causal), device="cuda")
        call.tensors.q[100:160] = math.nan
        call.tensors.k[100:190] = math.nan
        call.tensors.v[100:190] = math.nan
        call.sequences[1] = tuple(torch.full_like(x, math.nan) for x in call.sequences[1])
        saved = saved_of(call)
        saved.dout[100:160] = math.nan
        problem = replace(call.problem, op=Op.BACKWARD)
        check_gradients(call, saved, backward.launch(problem, call.tensors, saved))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_soak_of_launches_gives_one_dk_and_dv(dim):
    """dK and dV are summed in one order: any difference is a race. dQ's order is free."""
    case = Case((700, 700), (650, 650), heads=8, kv_heads=4, dim=dim, dim_v=dim, dtype=BF16)
    call = build(replace(case, causal=True), device="cuda")
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD)
    dq, dk, dv, _ = backward.launch(problem, call.tensors, saved)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    worst = torch.zeros((), device="cuda")
    for _ in range(500):
        again = backward.launch(problem, call.tensors, saved)
        wrong += (again[1] != dk).sum() + (again[2] != dv).sum()
        worst = torch.maximum(worst, (again[0] - dq).abs().max().float())
    assert int(wrong) == 0
    assert float(worst) <= 2**-7 * float(dq.abs().max())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "name", ["tails", "causal_tails", "window", "packed_causal", "window_left"]
)
def test_deterministic_gradients_are_bitwise_equal(name, dim):
    case = replace(CASES[name], dim=dim, dim_v=dim, dtype=BF16)
    call = build(case, device="cuda")
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD, deterministic=True)
    first = backward.launch(problem, call.tensors, saved)
    check_gradients(call, saved, first)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        again = backward.launch(problem, call.tensors, saved)
        wrong += sum((a != b).sum() for a, b in zip(again[:3], first[:3], strict=True))
    assert int(wrong) == 0


@pytest.mark.skipif(not HAS_FORWARD, reason="needs a forward of the same name")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_public_calls_train_through_it(dim):
    attention = functools.partial(onchip.attention, kernel="hopper")
    g = torch.Generator().manual_seed(0)
    shapes = (2, 200, 4, dim), (2, 333, 2, dim), (2, 333, 2, dim)
    q, k, v = (torch.randn(shape, generator=g).to("cuda", BF16) for shape in shapes)
    check_public(attention, q, k, v, causal=True, sinks=torch.randn(4, generator=g).cuda())
    check_public(attention, q, k, v, window=(100, 20), softcap=10.0)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_cuda_graph_replays_with_new_lengths(dim):
    case = replace(CASES["packed_causal"], dim=dim, dim_v=dim, dtype=BF16, sinks=False)
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


@pytest.mark.parametrize(("dim", "sums"), [(64, True), (128, True), (256, False)])
def test_extra_memory_is_what_the_docstring_says(dim, sums):
    case = Case((4096,), (4096,), heads=8, kv_heads=8, dim=dim, dim_v=dim, dtype=BF16)
    call = build(case, device="cuda")
    rows = torch.empty(1, 8, 4096, device="cuda")
    saved = Saved(call.tensors.q.clone(), None, call.tensors.q.clone(), rows.fill_(9.0))
    problem = replace(call.problem, op=Op.BACKWARD)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = backward.launch(problem, call.tensors, saved)[:3]
    peak = torch.cuda.max_memory_allocated() - before
    named = sum(x.numel() * x.element_size() for x in gradients)
    extra = 8 * rows.numel() + (4 * rows.numel() * dim if sums else 0)
    assert peak <= named + extra + (1 << 20)
