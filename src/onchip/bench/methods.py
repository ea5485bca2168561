"""Every row that a comparison has: onchip's kernels, three steps, peers.

Each method states the layout that suits it best and gets its inputs in that layout, so that no
row pays for a transposition that its users would not make.

Legend: B batch, N sequence length, H heads, H_kv key and value heads, G = H / H_kv, D head dim.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip import dispatch
from onchip.api import attention
from onchip.bench.cases import Case, Inputs

Attend = Callable[..., Tensor]
PARTS = ("forward", "both")


@dataclass(frozen=True)
class Method:
    """One row of a comparison.

    Args:
        name: of the row.
        attend: (q, k, v, case) -> out, all in this method's layout.
        heads_first: whether that layout is (B, H, N, D) rather than (B, N, H, D).
    """

    name: str
    attend: Attend
    heads_first: bool = False

    def posed(self, x: Tensor) -> Tensor:
        """(B, N, H, D) in this method's layout, contiguous."""
        return x.transpose(1, 2).contiguous() if self.heads_first else x

    def restored(self, x: Tensor) -> Tensor:
        """A result of this method as (B, N, H, D)."""
        return x.transpose(1, 2) if self.heads_first else x


@dataclass(frozen=True)
class Run:
    """A method with the inputs of a case, ready to be called again and again.

    Args:
        method: the method.
        part: "forward", or "both" for forward and backward.
        call: computes the results: (out,), or (out, dq, dk, dv), each as (B, N, H, D).
    """

    method: Method
    part: str
    call: Callable[[], tuple[Tensor, ...]]


def prepared(method: Method, case: Case, inputs: Inputs, part: str) -> Run:
    """A method with its inputs in place."""
    leaves = [method.posed(x).detach() for x in inputs[:3]]
    dout = method.posed(inputs.dout)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (method.restored(method.attend(*leaves, case)),)

    def both() -> tuple[Tensor, ...]:
        out = method.attend(*leaves, case)
        grads = torch.autograd.grad(out, leaves, dout)
        return tuple(method.restored(x) for x in (out.detach(), *grads))

    if part == "both":
        leaves = [x.requires_grad_() for x in leaves]
    return Run(method, part, forward if part == "forward" else both)


def attempted(run: Run) -> tuple[tuple[Tensor, ...] | None, str]:
    """What a run computes, or None and the reasons why it does not.

    torch says as warnings why a forced backend refuses a call.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return run.call(), ""
        except ModuleNotFoundError as error:
            return None, f"{error.name} is not installed"
        except torch.cuda.OutOfMemoryError as error:
            reasons, words = [], [_memory_wanted(str(error))]
        except Exception as error:  # a peer may fail in any way; its row says how
            words = f"{type(error).__name__}: {error}".splitlines()
            reasons = []
            if _refused(error):
                reasons = [*(_reason(str(w.message)) for w in said), "refuses this call"]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    told = list(dict.fromkeys(filter(None, reasons)))
    return None, "; ".join(told[:-1] or told) or words[0][:160]


def _memory_wanted(text: str) -> str:
    """An error about memory without how it was shared out."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    return "out of memory" + (f", asked for {asked[1]} more" if asked else "")


def _refused(error: Exception) -> bool:
    return "No available kernel" in str(error) or "No viable backend" in str(error)


def _reason(text: str) -> str:
    """A warning of torch's without where it was raised; empty for mere headings."""
    text = re.sub(r"\s*\(Triggered internally at.*", "", text, flags=re.S).strip()
    heading = re.search(r"kernel not used because:?$", text)
    return "" if heading else " ".join(text.split())


def _onchip(kernel: str, q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    return attention(q, k, v, causal=case.causal, kernel=kernel)  # type: ignore[return-value]


def _three_step(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """S = scale Q K^T, P = softmax(S), O = P V: a launch each, one more to hide keys.

    Query heads of a group lie below each other, so that no key or value is copied.
    """
    batch, heads, length, dim = q.shape
    groups = batch * case.kv_heads
    q = q.view(groups, -1, dim)  # (B H_kv, G N, D)
    k, v = k.view(groups, length, dim), v.view(groups, length, dim)
    s = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=case.scale)  # (B H_kv, G N, N)
    if case.causal:
        s.view(batch, heads, length, length).masked_fill_(_hidden(length, q.device), -torch.inf)
    return (s.softmax(-1) @ v).view(batch, heads, length, dim)


@functools.lru_cache(maxsize=2)
def _hidden(length: int, device: torch.device) -> Tensor:
    """(N, N) bool: keys after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(backends=[getattr(SDPBackend, backend)]):
        grouped = case.heads != case.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)


def _sees(b, h, i, j):
    return i >= j


@functools.lru_cache(maxsize=1)
def _flex_compiled():
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 200
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def _block_mask(length: int, device: str):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_sees, None, None, length, length, device=device)


def _flex(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    mask = _block_mask(case.length, case.device) if case.causal else None
    grouped = case.heads != case.kv_heads
    return _flex_compiled()(q, k, v, block_mask=mask, enable_gqa=grouped)


def _flash(module: str, q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """The function that FlashAttention's packages have under one name."""
    import importlib

    out = importlib.import_module(module).flash_attn_func(q, k, v, causal=case.causal)
    return out[0] if isinstance(out, tuple) else out


_PEERS = (
    Method("three-step", _three_step, heads_first=True),
    Method("torch flash", functools.partial(_sdpa, "FLASH_ATTENTION"), heads_first=True),
    Method("torch cudnn", functools.partial(_sdpa, "CUDNN_ATTENTION"), heads_first=True),
    Method("torch efficient", functools.partial(_sdpa, "EFFICIENT_ATTENTION"), heads_first=True),
    Method("torch math", functools.partial(_sdpa, "MATH"), heads_first=True),
    Method("flex", _flex, heads_first=True),
    Method("fa2", functools.partial(_flash, "flash_attn")),
    Method("fa3", functools.partial(_flash, "flash_attn_interface")),
    Method("fa4", functools.partial(_flash, "flash_attn.cute")),
)
PEER_NAMES = tuple(method.name for method in _PEERS)


def methods(case: Case, names: tuple[str, ...] | None = None) -> list[Method]:
    """Rows for a case: each of onchip's kernels that takes it, then the peers.

    Args:
        case: the call.
        names: only these, where "onchip" stands for all of onchip's kernels; all if None.

    Raises:
        ValueError: for a name that is none of those.
        NoKernelError: if onchip is asked for and no kernel takes the case.
    """
    allowed = ("onchip", *PEER_NAMES)
    for name in names or ():
        if name not in allowed:
            raise ValueError(f"methods: got {name!r}; allowed: {', '.join(allowed)}")
    wanted = names or allowed
    peers = [method for method in _PEERS if method.name in wanted]
    return ([*_own(case), *peers]) if "onchip" in wanted else peers


def _own(case: Case) -> list[Method]:
    problem = case.problem()
    dispatch.choose(problem)
    rejected = dispatch.rejections(problem)
    kernels = [k.name for k in dispatch.candidates(problem) if k.name not in rejected]
    return [Method(f"onchip {name}", functools.partial(_onchip, name)) for name in kernels]
