"""The public calls on a GPU: values, gradients, torch's machinery, graphs."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd import gradcheck

import onchip
from onchip import ops, reference
from onchip.kernels import KERNELS
from onchip.problem import Op
from tests import problems
from tests.tolerance import check_forward, check_gradients

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# The kernel that a call gets on its own, which differs from GPU to GPU, and the one for all.
each_kernel = pytest.mark.parametrize("kernel", [None, "portable"], ids=str)


def _on_gpu(inputs):
    return [x.cuda() for x in inputs]


def _features(name: str) -> dict:
    given = problems.features(name, torch.Generator().manual_seed(3))
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in given.items()}


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", problems.DENSE_FEATURES)
def test_values_and_gradients(name, dtype, kernel):
    qkv = _on_gpu(problems.qkv(seqlen_q=200, seqlen_k=333, head_dim=64, dtype=dtype))
    call = functools.partial(onchip.attention, kernel=kernel)
    check_forward(call, *qkv, **_features(name))
    check_gradients(call, *qkv, **_features(name))


def test_float64_is_refused_with_every_reason():
    q, k, v = _on_gpu(problems.qkv(dtype=torch.float64))
    with pytest.raises(onchip.NoKernelError, match="portable: takes float16, bfloat16, float32"):
        onchip.attention(q, k, v)


def test_gradcheck_in_float32():
    inputs = [x.requires_grad_() for x in _on_gpu(problems.qkv(seqlen_q=6, seqlen_k=9))]
    call = lambda q, k, v: onchip.attention(q, k, v, causal=True, return_lse=True)  # noqa: E731
    assert gradcheck(call, inputs, eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0)


# The decode's problems have caches, which this matrix has not; tests/gpu/test_decode.py has.
RECORDS = [
    k
    for k in KERNELS
    if "cuda" in k.devices and k.op is not Op.STORE and torch.float8_e4m3fn not in k.dtypes
]
RECORDS = [k for k in RECORDS if k.name != "decode"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.name}-{r.op.value}")
def test_opcheck(record):
    q, k, v = _on_gpu(problems.qkv(head_dim=32, dtype=torch.float16))
    for name in ("plain", "causal", "window", "softcap", "alibi_batch", "sinks"):
        given = _features(name)
        alibi, sinks = given.pop("alibi_slopes", None), given.pop("sinks", None)
        right = 0 if given.get("causal") else given.get("window", (-1, -1))[1]
        left = given.get("window", (-1, -1))[0]
        params = (5, 7, left, right, 0.2, given.get("softcap", 0.0), False, 0, record.name)
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
            *([] for _ in range(4)),
        )
        if alibi is not None and "alibi" not in record.features:
            continue
        # A kernel may take the backward only.
        name = record.name if record.op is Op.FORWARD else ""
        out, lse = ops.forward_op(*tensors, *params[:-1], name)
        if record.op is Op.FORWARD:
            torch.library.opcheck(ops.forward_op, (*tensors, *params))
        else:
            arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse)
            torch.library.opcheck(ops.backward_op, (*arguments, *tensors, *params))


@each_kernel
def test_compiled_training_step_equals_eager(kernel):
    def loss(q, k, v):
        out, lse = onchip.attention(
            q, k, v, causal=True, return_lse=True, deterministic=True, kernel=kernel
        )
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (70, 129):
        inputs = _on_gpu(problems.qkv(seqlen_q=length, seqlen_k=length, dtype=torch.float16))
        grads = []
        for call in (loss, compiled):
            leaves = [x.detach().requires_grad_() for x in inputs]
            grads.append(torch.autograd.grad(call(*leaves), leaves))
        for eager, traced in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager, rtol=0, atol=0)


@each_kernel
def test_packed_gradients(kernel):
    lengths = ([130, 0, 5, 300], [130, 9, 77, 300])
    q, k, v, given = problems.packed(*lengths, head_dim=64, dtype=torch.bfloat16)
    inputs = [x.requires_grad_() for x in _on_gpu((q, k, v))]
    given = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    out = onchip.attention_varlen(*inputs, causal=True, kernel=kernel, **given)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    offsets = {n: given[n].cpu() for n in ("cu_seqlens_q", "cu_seqlens_k")}
    leaves = [x.detach().cpu() for x in inputs]
    want = reference.attention_varlen_backward(*leaves, dout.cpu(), causal=True, **offsets)
    for got, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        oracle = getattr(want, name)
        error = (got.cpu().double() - oracle).abs().max()
        assert error <= 2e-2 * oracle.abs().max(), (name, error)


def test_device_values_are_checked_on_request(monkeypatch):
    q, k, v, given = problems.packed([3, 2], [6, 5])
    given = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    given["cu_seqlens_q"] = torch.tensor([0, 4, 3], dtype=torch.int32, device="cuda")
    monkeypatch.setenv("ONCHIP_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q: got 4 then 3 at sequence 1"):
        onchip.attention_varlen(*_on_gpu((q, k, v)), **given)
