"""The operators under everything torch does to operators."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import onchip
from onchip import cache_ops, ops
from onchip.analysis import cost
from onchip.kernels import KERNELS
from onchip.problem import Layout, Op, Problem
from tests import problems

FEATURES = list(problems.DENSE_FEATURES)


def _params(q, k, causal=False, window=(-1, -1), scale=None, softcap=0.0, kernel=""):
    right = 0 if causal else window[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (q.shape[1], k.shape[1], window[0], right, scale, softcap, False, 0, kernel)


def _op_arguments(dtype, name, kernel=""):
    g = torch.Generator().manual_seed(1)
    gqa = {} if kernel != "cpu_fused" else {"kv_heads": 4, "seqlen_q": 7}
    q, k, v = problems.qkv(dtype=dtype, **gqa)
    given = problems.features(name, g)
    alibi, sinks = given.pop("alibi_slopes", None), given.pop("sinks", None)
    tensors = (
        q,
        k,
        v,
        None,
        None,
        None,
        None,
        None,
        alibi,
        sinks,
        None,
        None,
        None,
        [],
        [],
        [],
        [],
    )
    return tensors, _params(q, k, kernel=kernel, **given)


CPU_RECORDS = [
    k
    for k in KERNELS
    if "cpu" in k.devices and k.op is not Op.STORE and torch.float8_e4m3fn not in k.dtypes
]


@pytest.mark.parametrize("record", CPU_RECORDS, ids=lambda r: f"{r.name}-{r.op.value}")
def test_opcheck_over_the_records(record):
    names = {"plain"} | {n for n in FEATURES if n.split("_")[0] in record.features}
    for dtype in record.dtypes:
        for name in sorted(names):
            if record.name == "cpu_fused" and name not in ("plain", "causal"):
                continue
            tensors, params = _op_arguments(dtype, name, record.name)
            out, lse = ops.forward_op(*tensors, *params)
            if record.op is Op.FORWARD:
                torch.library.opcheck(ops.forward_op, (*tensors, *params))
            else:
                dout, dlse = torch.randn_like(out), torch.randn_like(lse)
                arguments = (dout, dlse, out, lse, *tensors, *params)
                torch.library.opcheck(ops.backward_op, arguments)


def test_opcheck_packed_and_paged():
    q, k, v, lengths = problems.packed([3, 0, 4], [5, 2, 4])
    tail = (-1, 0, 0.5, 0.0, False, 0, "")
    cu_q, cu_k = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    tensors = (q, k, v, cu_q, cu_k, *[None] * 8, [], [], [], [])
    torch.library.opcheck(ops.forward_op, (*tensors, 4, 5, *tail))
    out, lse = ops.forward_op(*tensors, 4, 5, *tail)
    torch.library.opcheck(ops.backward_op, (out, None, out, lse, *tensors, 4, 5, *tail))
    k_cache, v_cache, table, used = problems.paged([5, 2, 4], 3)
    tensors = (q, k_cache, v_cache, cu_q, None, table, used, *[None] * 6, [], [], [], [])
    torch.library.opcheck(ops.forward_op, (*tensors, 4, 15, *tail))


def test_opcheck_store():
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    caches = torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 2, 8)
    slots = torch.tensor([5, -1, 0, 3])
    torch.library.opcheck(cache_ops.store_op, (k, v, *caches, slots, None, None))


@pytest.mark.parametrize("rotates", [False, True])
def test_opcheck_append(rotates):
    q, k, v = (torch.randn(2, 1, heads, 8) for heads in (4, 2, 2))
    caches = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    lengths = torch.tensor([1, 4], dtype=torch.int32)
    table = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)
    rotary = [torch.randn(9, 4) if rotates else None for _ in range(2)]
    where = (lengths, table, None, *rotary)
    torch.library.opcheck(cache_ops.append_op, (q, k, v, *caches, *where, None, None, True, True))


@pytest.mark.parametrize("name", FEATURES)
def test_gradcheck_through_output_and_lse(name):
    q, k, v = (x.requires_grad_() for x in problems.qkv(dtype=torch.float64))
    given = problems.features(name, torch.Generator().manual_seed(2))
    sinks = given.get("sinks")
    if sinks is not None:
        given["sinks"] = sinks = sinks.double().requires_grad_()
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    call = lambda q, k, v, *_: onchip.attention(q, k, v, return_lse=True, **given)  # noqa: E731
    if sinks is not None:
        del given["sinks"]
        call = lambda q, k, v, s: onchip.attention(  # noqa: E731
            q, k, v, sinks=s, return_lse=True, **given
        )
    assert gradcheck(call, inputs, atol=1e-7)


def test_gradcheck_with_rows_that_see_nothing():
    q, k, v = problems.qkv(seqlen_q=5, seqlen_k=2, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def call(q, k, v):
        out, lse = onchip.attention(q, k, v, causal=True, return_lse=True)
        return out, lse[:, :, 3:]

    assert gradcheck(call, inputs)


def test_gradcheck_packed():
    q, k, v, lengths = problems.packed([3, 0, 2], [4, 3, 1], dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    call = lambda q, k, v: onchip.attention_varlen(q, k, v, causal=True, **lengths)  # noqa: E731
    assert gradcheck(call, inputs)


def test_gradcheck_merge_states_with_an_empty_part():
    outs = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def call(o1, o2, l1, l2):
        hole = torch.zeros_like(l2)
        hole[..., 0] = -torch.inf
        return onchip.merge_states([o1, o2], [l1, l2 + hole])

    assert gradcheck(call, (*outs, *lses))


def test_nothing_is_saved_when_nothing_needs_a_gradient():
    q, k, v = problems.qkv()
    assert onchip.attention(q, k, v).grad_fn is None
    q.requires_grad_()
    assert onchip.attention(q, k, v).grad_fn is not None
    with torch.no_grad():
        assert onchip.attention(q, k, v).grad_fn is None


def test_second_derivatives_are_refused_not_wrong():
    q, k, v = (x.requires_grad_() for x in problems.qkv())
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(onchip.attention(q, k, v).sum(), q, create_graph=True)


def _loss(q, k, v):
    out, lse = onchip.attention(q, k, v, causal=True, softcap=3.0, return_lse=True)
    return (out * out).sum() + lse.sin().sum()


def _gradients(call, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(call(*inputs), inputs)


def test_compile_fullgraph_and_dynamic_shapes():
    torch._dynamo.reset()
    compiled = torch.compile(_loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (3, 6, 9):
        inputs = problems.qkv(seqlen_q=length, seqlen_k=length + 2)
        for got, want in zip(
            _gradients(compiled, *inputs), _gradients(_loss, *inputs), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_compile_varlen_and_kvcache():
    torch._dynamo.reset()
    q, k, v, lengths = problems.packed([3, 0, 4], [5, 2, 4])
    call = lambda q, k, v: onchip.attention_varlen(q, k, v, **lengths)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    k_cache, v_cache, table, used = problems.paged([5, 2], 4)

    def decode(q, new_k, new_v, k_cache, v_cache):
        return onchip.attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=used,
            block_table=table,
            k=new_k,
            v=new_v,
            causal=True,
        )

    new = problems.qkv(seqlen_q=1, seqlen_k=1)
    got_caches, want_caches = [(k_cache.clone(), v_cache.clone()) for _ in range(2)]
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*new, *got_caches), decode(*new, *want_caches))
    torch.testing.assert_close(got_caches, want_caches, equal_nan=True)


def test_compile_reports_bad_arguments():
    torch._dynamo.reset()
    call = lambda q, k, v: onchip.attention(q, k, v, softcap=-1.0)  # noqa: E731
    with pytest.raises(Exception, match="softcap"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(*problems.qkv())


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return onchip.attention(q, k, v, causal=True)

    inputs = problems.qkv()
    program = torch.export.export(Layer(), inputs)
    torch.testing.assert_close(program.module()(*inputs), Layer()(*inputs))


def test_checkpoint_and_selective_checkpoint():
    inputs = problems.qkv()
    want = _gradients(_loss, *inputs)
    plain = _gradients(lambda *x: checkpoint(_loss, *x, use_reentrant=False), *inputs)
    torch.testing.assert_close(plain, want)
    runs = []
    policy = torch.utils.checkpoint.create_selective_checkpoint_contexts

    def counted(*x):
        runs.append(1)
        return _loss(*x)

    with FlopCounterMode(display=False) as counter:
        saving = _gradients(
            lambda *x: checkpoint(
                counted, *x, use_reentrant=False, context_fn=lambda: policy(list(ops.SAVE_OPS))
            ),
            *inputs,
        )
    torch.testing.assert_close(saving, want)
    forward = torch.ops.onchip.attn_forward
    assert len(runs) == 2, "the region itself is run again"
    assert counter.get_flop_counts()["Global"][forward] == cost.flops(_problem(inputs, Op.FORWARD))


def _problem(inputs, op):
    q, k, v = inputs
    tensors = ops.Tensors(q, k, v)
    return Problem.of(op, tensors, ops.Params(*_params(q, k, causal=True, softcap=3.0)))


def test_flop_formulas():
    inputs = problems.qkv()
    with FlopCounterMode(display=False) as counter:
        _gradients(_loss, *inputs)
    counts = counter.get_flop_counts()["Global"]
    pairs = sum(min(7, i + 7 - 5 + 1) for i in range(5)) * 2 * 4  # causal, B = 2, H = 4
    assert counts[torch.ops.onchip.attn_forward] == pairs * 4 * 8
    assert counts[torch.ops.onchip.attn_backward] == pairs * 10 * 8


def test_flop_formula_reads_packed_lengths():
    q, k, v, lengths = problems.packed([3, 0, 4], [5, 2, 4])
    with FlopCounterMode(display=False) as counter:
        onchip.attention_varlen(q, k, v, **lengths)
    assert counter.get_total_flops() == (3 * 5 + 4 * 4) * 4 * 4 * 8


def test_autocast():
    q, k, v = problems.qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = onchip.attention(q, k.bfloat16(), v, return_lse=True)
        double = onchip.attention(q.double(), k.double(), v.double())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert double.dtype == torch.float64
    cast = [x.bfloat16() for x in (q, k, v)]
    torch.testing.assert_close(out, onchip.attention(*cast), rtol=0, atol=0)


def test_autocast_names_itself_where_a_cache_does_not_fit():
    q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 4, 2, 8)
    lengths = torch.tensor([4], dtype=torch.int32)
    match = "bfloat16, to which torch.autocast casts q"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=match):
        onchip.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    with pytest.raises(TypeError, match="allowed: q's dtype float32"):
        onchip.attention_with_kvcache(q, cache.half(), cache.half(), cache_seqlens=lengths)


def test_autocast_leaves_the_computation_alone():
    q, k, v = problems.qkv(head_dim=64, seqlen_q=64, seqlen_k=64, dtype=torch.float64)
    want = onchip.attention(q, k, v, softcap=5.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = onchip.attention(q, k, v, softcap=5.0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_layer_under_autocast_trains():
    q, k, v = (x.requires_grad_() for x in problems.qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        onchip.attention(q, k, v).float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32 and bool(q.grad.isfinite().all())


def test_the_plan_is_found_again():
    q, k, v = problems.qkv(batch=3, seqlen_q=11)
    onchip.attention(q, k, v)
    before = len(ops._plans)
    onchip.attention(q.clone(), k, v)
    assert len(ops._plans) == before
    onchip.attention(q, k, v, causal=True)
    assert len(ops._plans) == before + 1


def test_layouts_are_told_apart():
    q, k, v = problems.qkv()
    problem = Problem.of(Op.FORWARD, ops.Tensors(q, k, v), ops.Params(*_params(q, k)))
    assert (problem.layout_q, problem.layout_k) == (Layout.DENSE, Layout.DENSE)
    assert problem.tokens_q == 10 and problem.group == 2
