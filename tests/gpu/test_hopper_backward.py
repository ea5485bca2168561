"""The Hopper backward on a GPU, at real sizes, against the float64 oracle."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton.experimental.gluon")

import onchip
from onchip import dispatch
from onchip.kernels.hopper import backward
from onchip.kernels.hopper import forward as hopper_forward
from onchip.kernels.hopper.backward_config import BackwardConfig
from onchip.kernels.portable import backward as portable_backward
from onchip.kernels.portable import forward as portable_forward
from onchip.problem import Op, Problem, Saved
from tests.portable_backward_cases import check_gradients, saved_of
from tests.portable_cases import Case, build
from tests.tolerance import check_gradients as check_public

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs sm_90")]

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
DIMS = [(64, 64), (128, 128), (80, 72), (8, 24), (128, 64), (64, 128)]
WIDE_DIMS = [(256, 256), (192, 128), (136, 256)]


def run(case: Case, seed: int = 0, config=None, **options) -> None:
    call = build(case, device="cuda", seed=seed)
    saved = saved_of(call, **options)
    problem = replace(call.problem, op=Op.BACKWARD)
    assert not dispatch.rejections(problem, "hopper")
    config = config(problem) if callable(config) else config or backward.choose_backward(problem)
    check_gradients(call, saved, backward.launch_with(config, problem, call.tensors, saved))


def config_of(problem: Problem, long: bool) -> BackwardConfig:
    """The chosen config, or what it is where calls are long: a CTA has one tile of keys."""
    chosen = backward.choose_backward(problem)
    return replace(chosen, persistent=False) if long else chosen


@pytest.mark.parametrize("dims", DIMS + WIDE_DIMS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_feature(name, dims):
    for seed, dtype in ((0, BF16), (1, F16)):
        case = replace(CASES[name], dim=dims[0], dim_v=dims[1], dtype=dtype)
        run(case, seed, strided=seed == 1, with_dlse=seed == 0)


@pytest.mark.parametrize("name", CASES)
def test_every_feature_as_long_calls_have_it(name):
    case = replace(CASES[name], dim=64, dim_v=64, dtype=BF16)
    run(case, config=lambda problem: config_of(problem, True))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_heads_of_64_may_make_dp_late(name, lse):
    case = replace(CASES[name], dim=64, dim_v=64, dtype=BF16)
    run(case, config=BackwardConfig(late=True, stages=3, ds_buffers=3, starts_at_lse=lse))


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


@pytest.mark.parametrize(
    ("dims", "long"),
    [((64, 64), False), ((64, 64), True), ((40, 64), False), ((40, 64), True),
     ((128, 128), False), ((80, 72), False), ((64, 128), False)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_ctas_clear_and_round_dq_for_each_other(name, dims, long):
    """With the least lag, so that a few heads do: whatever is not written is NaN."""
    case = replace(CASES[name], dim=dims[0], dim_v=dims[1], dtype=BF16)
    call = build(case, device="cuda")
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD)
    config = replace(config_of(problem, long), lag=1)
    dq, dk, dv, _ = first = backward.launch_with(config, problem, call.tensors, saved)
    check_gradients(call, saved, first)
    wrong = torch.zeros((), dtype=torch.bool, device="cuda")
    worst = torch.zeros((), device="cuda")
    for _ in range(30):
        poison = [torch.full_like(x, math.nan) for x in (dq, dq.float(), dq.float())]
        del poison
        again = backward.launch_with(config, problem, call.tensors, saved)
        wrong |= (again[1] != dk).any() | (again[2] != dv).any() | again[0].isnan().any()
        worst = torch.maximum(worst, (again[0] - dq).abs().max().float())
    assert not wrong
    assert float(worst) <= 2**-7 * float(dq.abs().max())


@pytest.mark.parametrize("lag", [1, 60, 200])
@pytest.mark.parametrize(("dim", "long"), [(64, False), (64, True), (128, False)])
@pytest.mark.parametrize("causal", [False, True])
def test_many_ctas_clear_and_round_dq_as_launches_do(causal, dim, long, lag):
    """More CTAs than SMs."""
    case = Case((2048,) * 4, (2048,) * 4, heads=8, kv_heads=4, dim=dim, dim_v=dim, dtype=BF16)
    call = build(replace(case, causal=causal), device="cuda")
    out, lse = hopper_forward.launch(call.problem, call.tensors)
    saved = Saved(torch.randn_like(out), None, out, lse)
    problem = replace(call.problem, op=Op.BACKWARD)
    config = config_of(problem, long)
    by_launches = replace(config, lag=1 << 20)
    expected = backward.launch_with(by_launches, problem, call.tensors, saved)[0].float()
    far = torch.zeros((), device="cuda")
    for _ in range(100):
        config = replace(config, lag=lag)
        dq = backward.launch_with(config, problem, call.tensors, saved)[0].float()
        far = torch.maximum(far, (dq - expected).norm())
    assert float(far) <= 1e-3 * float(expected.norm())


@pytest.mark.parametrize("pieces", [2, 3, 8])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", [4, 5])
def test_shared_tiles_give_what_whole_ones_do(batch, dim, pieces):
    """Where the last wave of CTAs, or the only one, is not full; pieces are added in one order."""
    case = Case((1024,) * batch, (1024,) * batch, heads=8, kv_heads=4, dim=dim, dim_v=dim)
    call = build(replace(case, dtype=BF16), device="cuda")
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD)
    config = replace(backward.choose_backward(problem), persistent=False, pieces=pieces)
    _, dk, dv, _ = first = backward.launch_with(config, problem, call.tensors, saved)
    check_gradients(call, saved, first)
    wrong = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(100):
        again = backward.launch_with(config, problem, call.tensors, saved)
        wrong |= (again[1] != dk).any() | (again[2] != dv).any()
    assert not wrong


SOAKED = ("tails", "causal_tails", "window_causal", "packed_causal")
LAUNCHES = 834  # of each case and head dimension: 10,008 in all


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", SOAKED)
def test_a_soak_of_launches_gives_one_dk_and_dv(name, dim):
    """dK and dV are summed in one order: any difference is a race. dQ's order is free."""
    case = replace(CASES[name], dim=dim, dim_v=dim, dtype=BF16, sinks=False)
    call = build(case, device="cuda")
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD)
    dq, dk, dv, _ = first = backward.launch(problem, call.tensors, saved)
    check_gradients(call, saved, first)
    wrong = torch.zeros((), dtype=torch.bool, device="cuda")
    worst = torch.zeros((), device="cuda")
    for _ in range(LAUNCHES):
        again = backward.launch(problem, call.tensors, saved)
        wrong |= (again[1] != dk).any() | (again[2] != dv).any()
        worst = torch.maximum(worst, (again[0] - dq).abs().max().float())
    assert not wrong
    assert float(worst) <= 2**-7 * float(dq.abs().max())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["tails", "causal_more_queries", "window_left"])
def test_every_gradient_is_written(name, dim):
    call = build(replace(CASES[name], dim=dim, dim_v=dim, dtype=BF16), device="cuda")
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    try:
        gradients = backward.launch(problem, call.tensors, saved)
    finally:
        torch.use_deterministic_algorithms(False)
    check_gradients(call, saved, gradients)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_rows_of_no_sequence_are_0(causal, dim):
    """The memory held NaN before."""
    case = Case((333, 0, 5, 170), (200, 90, 0, 440), dim=dim, dim_v=dim, packed=True, causal=causal)
    call = build(case, device="cuda")
    saved = replace(saved_of(call), dlse=None)
    problem = replace(call.problem, op=Op.BACKWARD)
    want = backward.launch(problem, call.tensors, saved)
    more = (call.tensors.q, call.tensors.k, call.tensors.v, saved.dout, saved.out)
    q, k, v, dout, out = (torch.cat([x, torch.full_like(x[:77], math.nan)]) for x in more)
    lse = torch.cat([saved.lse, torch.full_like(saved.lse[:, :77], math.nan)], 1)
    longer = replace(problem, tokens_q=problem.tokens_q + 77)
    tensors = replace(call.tensors, q=q, k=k, v=v)
    for _ in range(2):
        poison = [torch.full_like(x, math.nan) for x in (q, k, v)]
        del poison
        found = backward.launch(longer, tensors, replace(saved, dout=dout, out=out, lse=lse))
        for x, wanted in zip(found[:3], want[:3], strict=True):
            assert not x[-77:].any()
            torch.testing.assert_close(x[:-77], wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["tails", "sinks", "packed_causal", "softcap_sinks"])
def test_any_forward_goes_with_any_backward(name, dim):
    """Both kernels mean the same by LSE, so one's output serves the other's backward."""
    call = build(replace(CASES[name], dim=dim, dim_v=dim, dtype=BF16), device="cuda")
    problem = replace(call.problem, op=Op.BACKWARD)
    for forward in (hopper_forward, portable_forward):
        out, lse = forward.launch(call.problem, call.tensors)
        saved = replace(saved_of(call), out=out, lse=lse)
        for each in (backward, portable_backward):
            check_gradients(call, saved, each.launch(problem, call.tensors, saved))


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


@pytest.mark.parametrize("lag", [1, 60, 200])
@pytest.mark.parametrize(("dim", "long"), [(64, False), (64, True), (128, False)])
@pytest.mark.parametrize("name", ["full", "tails", "causal", "packed"])
def test_deterministic_ctas_of_many_heads(name, dim, long, lag):
    """More CTAs than SMs, and tiles of several heads that begin side by side."""
    case = Case((1024,) * 8, (1024,) * 8)
    if name == "tails":
        case = Case((77,) * 8, (1000,) * 8)
    if name == "packed":
        case = Case((1024, 0, 1, 2000, 700), (900, 64, 1024, 2000, 1), packed=True)
    case = replace(case, heads=16, kv_heads=8, dim=dim, dim_v=dim, dtype=BF16)
    call = build(replace(case, causal=name == "causal"), device="cuda")
    out, lse = hopper_forward.launch(call.problem, call.tensors)
    saved = Saved(torch.randn_like(out), None, out, lse)
    problem = replace(call.problem, op=Op.BACKWARD, deterministic=True)
    config = replace(config_of(problem, long), lag=lag)
    first = backward.launch_with(config, problem, call.tensors, saved)
    free = replace(problem, deterministic=False)
    for x, y in zip(first[:3], backward.launch(free, call.tensors, saved)[:3], strict=True):
        assert float((x.float() - y.float()).norm()) <= 1e-3 * float(y.float().norm())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(30):
        again = backward.launch_with(config, problem, call.tensors, saved)
        wrong += sum((a != b).sum() for a, b in zip(again[:3], first[:3], strict=True))
    assert int(wrong) == 0


def _inputs(dim: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (2, 200, 4, dim), (2, 333, 2, dim), (2, 333, 2, dim)
    return [torch.randn(shape, generator=g).to("cuda", BF16) for shape in shapes]


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_public_calls_train_through_it(dim):
    q, k, v = _inputs(dim)
    for kernel in (None, "hopper"):
        attention = functools.partial(onchip.attention, kernel=kernel)
        check_public(attention, q, k, v, causal=True, sinks=torch.randn(4).cuda())
        check_public(attention, q, k, v, window=(100, 20), softcap=10.0)


def test_what_it_rejects_goes_to_the_portable_backward():
    q, k, v = _inputs(64)
    given = {"causal": True, "alibi_slopes": torch.rand(4, device="cuda")}
    explained = onchip.explain(*(x.detach().requires_grad_() for x in (q, k, v)), **given)
    assert explained.chosen == "hopper"
    assert explained.backward is not None and explained.backward.chosen == "portable"
    check_public(onchip.attention, q, k, v, **given)


def _loss(q, k, v):
    out, lse = onchip.attention(q, k, v, causal=True, deterministic=True, return_lse=True)
    return out.float().square().sum() + lse.sum()


def _gradients(loss, inputs) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_compiled_and_checkpointed_steps_equal_eager_ones(dim):
    checkpointed = functools.partial(checkpoint, _loss, use_reentrant=False)
    compiled = torch.compile(_loss, fullgraph=True, backend="aot_eager")
    inputs = _inputs(dim)
    want = _gradients(_loss, inputs)
    for loss in (checkpointed, compiled):
        for got, eager in zip(_gradients(loss, inputs), want, strict=True):
            torch.testing.assert_close(got, eager, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_cuda_graph_of_forward_and_backward_replays(dim):
    static = _inputs(dim)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _gradients(_loss, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(_loss, static)
    for seed in (1, 2):
        fresh = _inputs(dim, seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        for got, eager in zip(captured, _gradients(_loss, fresh), strict=True):
            torch.testing.assert_close(got, eager, rtol=0, atol=0)


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


def test_a_call_whose_first_run_is_captured():
    """No table can be copied then."""
    case = Case((320,) * 5, (320,) * 5, heads=6, kv_heads=3, dim=64, dim_v=64, dtype=BF16)
    call = build(replace(case, causal=True), device="cuda")
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD)
    config = replace(backward.choose_backward(problem), persistent=False)
    backward.launch_with(config, problem, call.tensors, saved)  # compiles and loads the code
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward.launch(problem, call.tensors, saved)
    graph.replay()
    check_gradients(call, saved, captured)


@pytest.mark.parametrize("dim", [64, 128])
def test_calls_in_two_streams_end(dim):
    """CTAs of a call wait for each other, also when another call takes multiprocessors."""
    case = Case((1024,) * 8, (1024,) * 8, heads=8, kv_heads=8, dim=dim, dim_v=dim, dtype=BF16)
    call = build(replace(case, causal=True), device="cuda")
    out, lse = hopper_forward.launch(call.problem, call.tensors)
    saved = Saved(torch.randn_like(out), None, out, lse)
    problem = replace(call.problem, op=Op.BACKWARD)
    _, dk, dv, _ = backward.launch(problem, call.tensors, saved)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = [torch.zeros((), dtype=torch.bool, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, found in zip(streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                again = backward.launch(problem, call.tensors, saved)
                found |= (again[1] != dk).any() | (again[2] != dv).any() | again[0].isnan().any()
    torch.cuda.synchronize()
    assert not any(wrong)


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
