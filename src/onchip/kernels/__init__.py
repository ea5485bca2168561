"""What each kernel can do, as data. No kernel and no kernel language is imported here.

`KERNELS` is ordered: dispatch takes the first record that has no reason to reject a Problem.
Choice, error, `explain()`, support matrix and test matrix all come from these records.

Every kernel module named by a record has

* ``launch(problem, tensors) -> (out, lse)`` for a forward,
* ``launch(problem, tensors, saved) -> (dq, dk, dv, dsinks or None)`` for a backward,
* ``launch(problem, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)`` for a store, and
  ``append(problem, new) -> (q, lengths)`` for a store that finds its own slots.

A module may also have ``repeat_<entry>(problem, tensors)``: see `Kernel.load_repeat`, and
``append_<entry>(problem, tensors, new)``: see `Kernel.load_append`.

A file that holds several names them apart; `Kernel.entry` says which is meant.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onchip.kernels.rows import MANY_KEYS, NUM_SMS, reads_once, suits_tall
from onchip.problem import Layout, Op, Problem

ALL_FEATURES = frozenset(
    "causal window softcap alibi sinks gqa head_dim_v seqused_k leftpad kv_scales".split()
)


#: Most queries of a sequence that the decode takes, and most of a cache's that always go there
#: (one, and speculative ones). Others go there where keys are many. H200, 2026-11-30, causal, 1k
#: to 32k keys: 1.3 to 17 times the speed of a forward that does not cut the keys.
MAX_DECODE_QUERIES, FEW_QUERIES = 64, 16
#: Most pieces of all sequences: CUDA's limit on programs in a grid's second dimension. Pieces that
#: the decode chooses on its own are few where sequences are many.
MAX_PIECES = 65535
#: Most pieces that the decode cuts a sequence's keys into.
MAX_DECODE_SPLITS = 128
#: Features that only kernels in a kernel language can have: they compile the user's code.
USER_FUNCTIONS = frozenset({"score_mod", "mask_mod"})


def _no_further_reasons(problem: Problem) -> list[str]:
    return []


@dataclass(frozen=True)
class Kernel:
    """A kernel's capabilities.

    Args:
        name: what `kernel=` and `explain()` call it.
        op: forward, backward or store.
        module: dotted path, imported at first use.
        entry: function of that module that runs it.
        devices: torch device types.
        dtypes: of q; `kv_dtypes` defaults to the same as q.
        layouts: allowed (queries, keys) layouts.
        max_head_dim: largest D and D_v.
        head_dim_multiple: D and D_v must be a multiple of it.
        features: optional features it takes, of `Problem.features`.
        quantised_kv: dtypes of k and v that may differ from q's.
        max_splits: most parts that `num_splits` may ask for.
        reasons: further reasons why a Problem is not for it.
        by_name: why it runs only when `kernel=` names it; empty if it may be chosen.
        summary: one line for the support matrix.
    """

    name: str
    op: Op
    module: str
    entry: str
    devices: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    layouts: frozenset[tuple[Layout, Layout]]
    max_head_dim: int
    features: frozenset[str]
    summary: str
    head_dim_multiple: int = 1
    quantised_kv: tuple[torch.dtype, ...] = ()
    max_splits: int = 1
    reasons: Callable[[Problem], list[str]] = _no_further_reasons
    by_name: str = ""

    def load(self, entry: str = "") -> Callable:
        """The function that runs this kernel, or another of its module; imports the module."""
        return getattr(importlib.import_module(self.module), entry or self.entry)

    def load_repeat(self, entry: str = "") -> Callable | None:
        """The function that makes repeated launches of `entry`, if the module has one.

        It takes the arguments of a call that has run (a forward's also whether the LSE is
        wanted) and returns a callable, or None, for all calls whose tensors have the same
        shapes, strides, dtypes and alignment: from a tuple of their addresses (a forward's: q
        and the addresses) to outputs that it makes itself. `onchip.repeats` uses it.
        """
        return getattr(importlib.import_module(self.module), f"repeat_{entry or self.entry}", None)

    def load_append(self) -> tuple[Callable, Callable] | None:
        """The functions that append and attend in one launch, if a forward's module has them.

        The first takes a forward's arguments, as they are before the append, and `NewTokens`; it
        returns out and lse, or None where it does not take such a call, of which nothing has
        happened then. The second makes repeated launches, as `load_repeat` says; the addresses of
        new k, v, cosine and sine come behind the others.
        """
        module = importlib.import_module(self.module)
        once = getattr(module, f"append_{self.entry}", None)
        return once and (once, getattr(module, f"repeat_append_{self.entry}"))

    def rejections(self, problem: Problem) -> list[str]:
        """Why this kernel can't take the problem; empty when it can."""
        why = []
        if problem.device not in self.devices:
            why.append(f"runs on {_join(self.devices)}, not on {problem.device}")
        if problem.dtype not in self.dtypes:
            why.append(f"takes {_names(self.dtypes)}, not {_names([problem.dtype])}")
        if problem.kv_dtype != problem.dtype and problem.kv_dtype not in self.quantised_kv:
            allowed = _names(self.quantised_kv) or "the dtype of q"
            why.append(f"takes k and v in {allowed}, not {_names([problem.kv_dtype])}")
        if problem.kv_dtype in self.quantised_kv and _is_before_float8(problem.arch):
            why.append(f"reads and writes float8 from sm_89 on, not on {problem.arch}")
        if (problem.layout_q, problem.layout_k) not in self.layouts:
            pair = f"{problem.layout_q.value} queries with {problem.layout_k.value} keys"
            why.append(f"has no {pair}")
        for label, size in (("D", problem.head_dim), ("D_v", problem.head_dim_v)):
            if size > self.max_head_dim:
                why.append(f"takes {label} up to {self.max_head_dim}, not {size}")
            if size % self.head_dim_multiple:
                why.append(f"takes {label} in multiples of {self.head_dim_multiple}, not {size}")
        if problem.num_splits > self.max_splits:
            why.append(f"splits keys at most {self.max_splits} ways, not {problem.num_splits}")
        missing = problem.features - self.features
        why += [f"{name} needs a Triton kernel" for name in sorted(missing & USER_FUNCTIONS)]
        missing -= USER_FUNCTIONS
        if missing:
            why.append(f"has no {_join(missing)}")
        return why + self.reasons(problem)


def _is_before_float8(arch: str) -> bool:
    """Whether a GPU's architecture is one for which Triton has no float8_e4m3fn."""
    return arch[3:].isdecimal() and arch.startswith("sm_") and int(arch[3:]) < 89


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DENSE = (Layout.DENSE, Layout.DENSE)
_PACKED = (Layout.PACKED, Layout.PACKED)
_PAGES = frozenset({(Layout.PACKED, Layout.PAGED), (Layout.DENSE, Layout.PAGED)})


def _fused_reasons(problem: Problem) -> list[str]:
    """torch's operator is square: its causal mask is aligned to the top left corner."""
    if problem.mask.causal and problem.seqlen_q != problem.seqlen_k:
        return [f"causal needs S_q == S_k, not {problem.seqlen_q} and {problem.seqlen_k}"]
    if problem.mask.causal and problem.scale <= 0:
        return [f"causal needs a scale over 0, not {problem.scale:g}"]
    if problem.seqlen_k == 0 or problem.seqlen_q == 0:
        return ["needs at least one query and one key"]
    return []


def _backward_reasons(problem: Problem) -> list[str]:
    if problem.deterministic and problem.aux_grad:
        return ["adds up the gradients of score_mod's tensors by atomics: not deterministic"]
    return []


def _cpu_record(name: str, op: Op, entry: str, summary: str, **limits) -> Kernel:
    return Kernel(
        name=name,
        op=op,
        module="onchip.kernels.cpu",
        entry=entry,
        devices=frozenset({"cpu"}),
        summary=summary,
        max_head_dim=1024,
        **limits,
    )


_FUSED_LIMITS = {
    "dtypes": (torch.float32, torch.bfloat16, torch.float16),
    "layouts": frozenset({_DENSE}),
    "features": frozenset({"causal"}),
    "reasons": _fused_reasons,
}
_PORTABLE_LIMITS = {
    "devices": frozenset({"cuda"}),
    "dtypes": (torch.float16, torch.bfloat16, torch.float32),
    "max_head_dim": 256,
}


def _decode_reasons(problem: Problem) -> list[str]:
    """It cuts keys, not queries: few queries over the keys of a cache, or over many."""
    if problem.seqlen_q > MAX_DECODE_QUERIES:
        return [f"takes S_q up to {MAX_DECODE_QUERIES}, not {problem.seqlen_q}"]
    if not problem.seqused_k and problem.layout_k is Layout.PAGED:
        return ["needs the lengths of paged keys as one tensor (seqused_k or cache_seqlens)"]
    # H200, 2026-11-30, 64 queries, us: 64/8 heads, 32 sequences of 4k 437 by the forward and 582,
    # 8 of 16k 426 and 477.
    if not problem.num_splits and reads_once(problem) and not _hopper_reasons(problem):
        return ["is slower than hopper, whose tiles hold the heads of a group"]
    always = problem.seqused_k and problem.seqlen_q <= FEW_QUERIES
    if not always and problem.seqlen_k < MANY_KEYS:
        return [
            f"takes keys from {MANY_KEYS} on where there are more than {FEW_QUERIES} queries or "
            f"no tensor of key lengths, not {problem.seqlen_k}"
        ]
    blocks = -(-problem.seqlen_q * problem.group // 64)  # of rows: each reads the keys
    if suits_tall(problem):
        blocks = 1
    # With splits given, a sequence's bits must not depend on the number of its neighbours.
    always = always or problem.num_splits > 0
    if not always and blocks > 2 and problem.batch * problem.num_kv_heads * blocks > NUM_SMS:
        # H200, 2026-11-30, 8 sequences, 32/8 heads, S_q = 64: 4k keys 116 us against 106 of the
        # forward, 32k 866 against 764; S_q = 32 69 against 111 and 441 against 785.
        return [f"reads K and V {blocks} times for so many rows, and there are sequences enough"]
    pieces = problem.batch * max(1, problem.num_splits)
    if pieces > MAX_PIECES:
        return [f"takes up to {MAX_PIECES} pieces of sequences, not {pieces}"]
    return []


_GLUON_RELEASE = (3, 6)  # of Triton; before it Gluon lacks what the Hopper kernels use


@functools.lru_cache(1)
def _triton_release() -> tuple[int, ...] | None:
    """Major and minor release of the Triton that is installed, without importing it."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _gluon_reasons(problem: Problem) -> list[str]:
    """Why kernels written in Gluon for Hopper can't run."""
    why = []
    if problem.arch != "sm_90":
        why.append(f"needs sm_90, {f'not {problem.arch}' if problem.arch else 'a Hopper GPU'}")
    release = _triton_release()
    if release is not None and release < _GLUON_RELEASE:
        found, needed = (".".join(map(str, each)) for each in (release, _GLUON_RELEASE))
        why.append(f"needs Triton {needed} or later, not {found}")
    if problem.seqlen_q == 0 or problem.seqlen_k == 0:
        why.append("needs at least one query and one key")
    return why


def _hopper_reasons(problem: Problem) -> list[str]:
    why = _gluon_reasons(problem)
    if problem.scale <= 0:
        why.append(f"needs a scale over 0, not {problem.scale:g}")
    if problem.unaligned:
        why.append(
            f"reads by TMA, which {_join(problem.unaligned)} does not suit: rows must begin at "
            "multiples of 16 bytes, and no dimension may be expanded"
        )
    size = problem.page_size
    # A tile of 64 or 128 keys is part of a page, or some pages, or there is but one page.
    if size and size % 128 and size not in (8, 16, 32, 64) and size < problem.seqlen_k:
        why.append(f"takes pages of 8, 16, 32, 64 or multiples of 128, not {size}")
    return why


def _fp8_hopper_reasons(problem: Problem) -> list[str]:
    why = _hopper_reasons(problem)
    if problem.dtype == torch.float8_e4m3fn and problem.out_dtype not in ("float16", "bfloat16"):
        why.append(f"writes float16 or bfloat16, not {problem.out_dtype or 'float8'}")
    return why


_PORTABLE = "FlashAttention-2 in Triton, any GPU that Triton supports"
_FUSED = "torch's fused CPU operator; tiles for NaN and for gradients of the LSE"
_TILED = "fused rectangles or one pass over tiles, in torch: every feature"

KERNELS: tuple[Kernel, ...] = (
    _cpu_record("cpu_fused", Op.FORWARD, "launch_fused", _FUSED, **_FUSED_LIMITS),
    _cpu_record("cpu_fused", Op.BACKWARD, "launch_fused_backward", _FUSED, **_FUSED_LIMITS),
    _cpu_record(
        "cpu",
        Op.FORWARD,
        "launch",
        _TILED,
        dtypes=_FLOATS,
        layouts=frozenset({_DENSE, _PACKED}) | _PAGES,
        features=ALL_FEATURES,
        quantised_kv=(torch.float8_e4m3fn,),
    ),
    _cpu_record(
        "cpu",
        Op.BACKWARD,
        "launch_backward",
        _TILED,
        dtypes=_FLOATS,
        layouts=frozenset({_DENSE, _PACKED}),
        features=ALL_FEATURES - {"leftpad", "kv_scales"},
    ),
    Kernel(
        name="decode",
        op=Op.FORWARD,
        module="onchip.kernels.portable.decode",
        entry="launch",
        layouts=_PAGES | {_DENSE},
        features=ALL_FEATURES,
        quantised_kv=(torch.float8_e4m3fn,),
        max_splits=MAX_DECODE_SPLITS,
        reasons=_decode_reasons,
        summary="split-KV in Triton, one launch: up to 64 queries a sequence",
        # triton 3.6 does not compile the float32 variants with every feature (H200, 2026-11-29).
        **{**_PORTABLE_LIMITS, "dtypes": (torch.float16, torch.bfloat16)},
    ),
    Kernel(
        name="hopper",
        op=Op.FORWARD,
        module="onchip.kernels.hopper.forward",
        entry="launch",
        devices=frozenset({"cuda"}),
        dtypes=(torch.float16, torch.bfloat16),
        layouts=frozenset({_DENSE, _PACKED}) | _PAGES,
        max_head_dim=256,
        head_dim_multiple=8,
        features=ALL_FEATURES - {"leftpad", "kv_scales"},
        reasons=_hopper_reasons,
        summary="FlashAttention-3 in Gluon: TMA, wgmma and warp roles of sm_90a",
    ),
    Kernel(
        name="portable",
        op=Op.FORWARD,
        module="onchip.kernels.portable.forward",
        entry="launch",
        layouts=frozenset({_DENSE, _PACKED}) | _PAGES,
        features=ALL_FEATURES | USER_FUNCTIONS | {"dropout"},
        quantised_kv=(torch.float8_e4m3fn,),
        summary=_PORTABLE,
        **_PORTABLE_LIMITS,
    ),
    Kernel(
        name="hopper",
        op=Op.BACKWARD,
        module="onchip.kernels.hopper.backward",
        entry="launch",
        devices=frozenset({"cuda"}),
        dtypes=(torch.float16, torch.bfloat16),
        layouts=frozenset({_DENSE, _PACKED}),
        max_head_dim=256,
        head_dim_multiple=8,
        features=frozenset("causal window softcap sinks gqa head_dim_v".split()),
        reasons=_gluon_reasons,
        summary="FlashAttention-3's backward in Gluon: TMA, wgmma and warp roles of sm_90a",
    ),
    Kernel(
        name="portable",
        op=Op.BACKWARD,
        module="onchip.kernels.portable.backward",
        entry="launch",
        layouts=frozenset({_DENSE, _PACKED}),
        features=ALL_FEATURES - {"leftpad", "kv_scales"} | USER_FUNCTIONS | {"dropout"},
        reasons=_backward_reasons,
        summary=_PORTABLE,
        **_PORTABLE_LIMITS,
    ),
    Kernel(
        name="fp8_hopper",
        op=Op.FORWARD,
        module="onchip.kernels.hopper.fp8",
        entry="launch",
        devices=frozenset({"cuda"}),
        dtypes=(torch.float8_e4m3fn,),
        layouts=frozenset({_DENSE, _PACKED}),
        max_head_dim=256,
        head_dim_multiple=16,
        features=ALL_FEATURES - {"leftpad", "kv_scales"},
        reasons=_fp8_hopper_reasons,
        summary="float8 in Gluon: 8-bit wgmma, two-level accumulation",
    ),
    Kernel(
        name="fp8_emulated",
        op=Op.FORWARD,
        module="onchip.kernels.fp8_emulated",
        entry="launch",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=(torch.float8_e4m3fn,),
        layouts=frozenset({_DENSE, _PACKED}),
        max_head_dim=1024,
        features=ALL_FEATURES - {"leftpad", "kv_scales"},
        summary="float8's arithmetic in torch: slow, as exact as the fast kernels",
    ),
    Kernel(
        name="cpu",
        op=Op.STORE,
        module="onchip.kernels.cpu_cache",
        entry="launch",
        devices=frozenset({"cpu"}),
        dtypes=_FLOATS,
        layouts=_PAGES,
        max_head_dim=1024,
        features=ALL_FEATURES,
        quantised_kv=(torch.float8_e4m3fn,),
        summary="scatter by index, in torch",
    ),
    Kernel(
        name="portable",
        op=Op.STORE,
        module="onchip.kernels.portable.cache",
        entry="launch",
        devices=frozenset({"cuda"}),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        layouts=_PAGES,
        max_head_dim=1024,
        features=ALL_FEATURES,
        quantised_kv=(torch.float8_e4m3fn,),
        summary="one launch in Triton for keys and values",
    ),
)

NAMES: tuple[str, ...] = tuple(dict.fromkeys(k.name for k in KERNELS))


def _join(words) -> str:
    return ", ".join(sorted(words))


def _names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
