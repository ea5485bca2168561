"""How close is right: contract.md's rule, once for all tests."""

from __future__ import annotations

import torch

from onchip import reference


def assert_close_to_oracle(actual, oracle, eager, name: str, ulps: int = 4) -> None:
    """Holds max|x - oracle| <= 2 max|eager - oracle| + a few ulps of the output's scale."""
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}"
    x, want, plain = actual.detach().double(), oracle.double(), eager.detach().double()
    torch.testing.assert_close(x.isnan(), want.isnan(), msg=f"{name}: NaN elsewhere")
    special = ~want.isfinite()
    assert torch.equal(x[special & ~want.isnan()], want[special & ~want.isnan()]), f"{name}: inf"
    if bool(special.all()):
        return
    x, want, plain = x[~special], want[~special], plain[~special]
    plain = torch.where(plain.isfinite(), plain, want)
    error, allowed = (x - want).abs().max(), 2 * (plain - want).abs().max()
    allowed += ulps * torch.finfo(actual.dtype).eps * want.abs().max().clamp(min=1e-3)
    relative = (x - want).norm() / want.norm().clamp(min=1e-30)
    assert error <= allowed, f"{name}: error {error:.3e} > {allowed:.3e}, Frobenius {relative:.3e}"


def check_forward(call, q, k, v, **features) -> None:
    """Compares `call(q, k, v, return_lse=True, **features)` with the oracle."""
    with torch.no_grad():
        out, lse = call(q, k, v, return_lse=True, **features)
    oracle, oracle_lse = reference.attention(q, k, v, **features)
    eager, eager_lse = reference.eager(q, k, v, **features)
    assert out.dtype == q.dtype
    assert_close_to_oracle(out, oracle, eager, "out")
    assert_close_to_oracle(lse, oracle_lse, eager_lse, "lse")


def check_gradients(call, q, k, v, seed: int = 0, **features) -> None:
    """Compares dq, dk, dv (and dsinks) of a random gradient on out and LSE with the oracle."""
    g = torch.Generator().manual_seed(seed)
    sinks = features.pop("sinks", None)

    def run(function, **options):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]  # strides stay
        extra = {} if sinks is None else {"sinks": sinks.detach().clone().requires_grad_()}
        out, lse = function(*inputs, **features, **extra, **options)
        lse = lse.where(lse.isfinite(), 0.0)
        grads = (dout.to(out.dtype), dlse.to(lse.dtype))
        return torch.autograd.grad([out, lse], [*inputs, *extra.values()], grads)

    shape = (*q.shape[:-1], v.shape[-1])
    dout = torch.randn(shape, generator=g).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=g)
    extra = {} if sinks is None else {"sinks": sinks}
    oracle = reference.attention_backward(q, k, v, dout, dlse, **features, **extra)
    actual = run(call, return_lse=True)
    eager = run(reference.eager)
    for name, a, e in zip(oracle._fields, actual, eager, strict=False):
        assert_close_to_oracle(a, getattr(oracle, name), e, name)
