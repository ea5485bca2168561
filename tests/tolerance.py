"""How close is right: contract.md's rule, once for all tests.

The callables under test have the signature of `onchip.attention`:
``call(q, k, v, *, return_lse=True, **features) -> (out, lse)``.
"""

from __future__ import annotations

import torch

from onchip import reference

NAMES = ("dq", "dk", "dv", "dsinks")


def assert_close_to_oracle(actual, oracle, eager, name: str, ulps: float = 4) -> None:
    """Holds max|x - oracle| <= 2 max|eager - oracle| + a few ulps of the output's scale.

    NaN and Inf must lie exactly where the oracle's lie.

    Args:
        actual: what a kernel returned.
        oracle: what `reference` computes in float64.
        eager: what plain PyTorch gives in the inputs' dtype; where it isn't finite it allows
            no error.
        name: of the tensor, for the message.
        ulps: of actual's dtype, at the scale of the oracle's largest entry.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, not {oracle.shape}"
    x, want, plain = (t.detach().double() for t in (actual, oracle, eager))
    assert torch.equal(x.isnan(), want.isnan()), f"{name}: {_counts(x, want, torch.isnan)} NaN"
    infinite = want.isinf()
    same = torch.equal(x.isinf(), infinite) and torch.equal(x[infinite], want[infinite])
    assert same, f"{name}: {_counts(x, want, torch.isinf)} Inf"
    finite = want.isfinite()
    if not bool(finite.any()):
        return
    x, want, plain = x[finite], want[finite], plain[finite]
    plain = plain.where(plain.isfinite(), want)
    error, eager_error = (x - want).abs().max(), (plain - want).abs().max()
    # Below 1e-3 cancellation, not the output's scale, sets the rounding error.
    scale = want.abs().max().clamp(min=1e-3)
    allowed = 2 * eager_error + ulps * torch.finfo(actual.dtype).eps * scale
    if actual.dtype == torch.float64:
        allowed = allowed.clamp(min=1e-12)  # contract.md's own bound; eager is the oracle here
    relative = (x - want).norm() / want.norm().clamp(min=1e-30)
    assert error <= allowed, (
        f"{name}: max error {error:.3e} > {allowed:.3e} (eager's own {eager_error:.3e}), "
        f"relative Frobenius error {relative:.3e}"
    )


def _counts(x, want, kind) -> str:
    return f"{int(kind(x).sum())} instead of {int(kind(want).sum())}, or elsewhere:"


def check_forward(call, q, k, v, **features) -> None:
    """Compares out and LSE of a call with the oracle's."""
    with torch.no_grad():
        out, lse = call(q, k, v, return_lse=True, **features)
        oracle, oracle_lse = reference.attention(q, k, v, **features)
        eager, eager_lse = reference.eager(q, k, v, **features)
    assert out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert_close_to_oracle(out, oracle, eager, "out")
    assert_close_to_oracle(lse, oracle_lse, eager_lse, "lse")


def check_gradients(call, q, k, v, seed: int = 0, **features) -> None:
    """Compares dq, dk, dv (and dsinks) for a random gradient on out and LSE with the oracle's."""
    g = torch.Generator().manual_seed(seed)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=g).to(q)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=g).to(q.device)
    oracle = reference.attention_backward(q, k, v, dout, dlse, **features)
    eager = _autograd(reference.eager, (q, k, v), dout, dlse, features)
    actual = _autograd(call, (q, k, v), dout, dlse, {"return_lse": True, **features})
    least = 0.0
    if q.dtype == torch.float32:
        # P = exp(S - LSE) inherits the rounding of S and of the LSE that was left as a float32;
        # it shows where scores are hundreds, on some CPUs (6.9e-5 in dV, on AMD EPYC).
        logits = reference.attention(q, k, v, **features)[1]
        least = 2 * logits[logits.isfinite()].abs().max().item() if logits.isfinite().any() else 0.0
    dtypes = [x.dtype for x in (q, k, v, features.get("sinks")) if x is not None]
    for name, x, plain, dtype in zip(NAMES, actual, eager, dtypes):  # noqa: B905 (sinks last)
        assert x.dtype == dtype, f"{name}: {x.dtype}"
        # dsinks is float32 but made of D, so of the output that was stored in q's dtype.
        ulps = 4 * torch.finfo(q.dtype).eps / torch.finfo(x.dtype).eps
        assert_close_to_oracle(x, getattr(oracle, name), plain, name, max(4, ulps, least))


def _autograd(call, qkv, dout, dlse, features):
    """Gradients of q, k, v and, if given, sinks by PyTorch's autograd."""
    inputs = [x.detach().requires_grad_() for x in qkv]  # detached views keep their strides
    if features.get("sinks") is not None:
        sinks = features["sinks"].detach().clone().requires_grad_()
        features = {**features, "sinks": sinks}
        inputs.append(sinks)
    out, lse = call(*inputs[:3], **features)
    # An LSE of -inf is constant, and -inf * 0 would be NaN.
    lse = lse.where(lse > -torch.inf, 0.0)
    return torch.autograd.grad([out, lse], inputs, [dout.to(out.dtype), dlse.to(lse.dtype)])
