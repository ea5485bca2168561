"""The attention layer of a serving engine: store this step's keys and values, then attend.

    step = StepContext(is_prefill=True, cu_seqlens_q=..., slot_mapping=..., ...)
    for layer in layers:
        out = layer.attention(q, k, v, step)

The context is passed, never global: two engines, or two steps in flight, do not meet.

Legend: B sequences, T tokens of this step, H query heads, H_kv key and value heads, D / D_v head
dimensions, P pages, N page size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from onchip import ops, prepare, validate
from onchip.api import store_kvcache
from onchip.prepare import CacheArguments, Call, Options
from onchip.problem import Op, Tensors

_SLOT_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class StepContext:
    """What one engine step asks of every attention layer.

    A step is all prefill or all decode. Prefill packs the new tokens of B sequences into T rows;
    decode has one new token a sequence, T = B.

    Args:
        is_prefill: which of the two.
        cu_seqlens_q: prefill: (B + 1,) int32, running sum of the new tokens; ends at T.
        cu_seqlens_k: prefill: (B + 1,) int32, running sum of the keys: the new tokens and, with
            block_table, those already in the cache.
        max_seqlen_q: prefill: at least the most new tokens of a sequence.
        max_seqlen_k: prefill: at least the most keys of a sequence.
        slot_mapping: (T,) int64 or int32, where each new token's keys and values go:
            page * N + offset, -1 for nowhere. None only without a cache.
        context_lens: decode: (B,) int32, tokens of each sequence, the new one included
            (`cache_seqlens` to the call that attends); 0 for a padding row, whose output is 0.
        block_table: (B, max_pages) int32, page ids; entries past a sequence's last page are never
            read. Decode needs it; prefill needs it iff a sequence has tokens in the cache already.

    Raises:
        ValueError: if a field that the step needs is missing, or one that it does not use is
            given, or shapes or devices differ.
        TypeError: if a tensor has the wrong dtype.
    """

    is_prefill: bool
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: Tensor | None = None
    context_lens: Tensor | None = None
    block_table: Tensor | None = None
    _checked: set = field(default_factory=set, init=False, repr=False)

    def values_key(self, k_cache: Tensor) -> tuple:
        """What a check of lengths and pages holds for: later layers' caches of this shape.

        Writing to the tensors changes it (but in inference mode, where torch counts no writes).
        """
        given = (self.context_lens, self.block_table)
        versions = (None if x is None or x.is_inference() else x._version for x in given)
        return (k_cache.shape[:2], *versions)

    def __post_init__(self):
        prefill = ("cu_seqlens_q", "cu_seqlens_k")
        decode = ("context_lens", "block_table", "slot_mapping")
        step = "prefill" if self.is_prefill else "decode"
        for name in prefill if self.is_prefill else decode:
            if getattr(self, name) is None:
                validate.reject(name, None, f"a tensor in a {step} step", "Give it.")
        unused = decode[:1] if self.is_prefill else (*prefill, "max_seqlen_q", "max_seqlen_k")
        for name in unused:
            value = getattr(self, name)
            if isinstance(value, Tensor) or value:
                fix = f"A {step} step does not use it: leave it out."
                validate.reject(name, "a value", f"nothing in a {step} step", fix)
        self._check_tensors(self._anchor)

    def _check_tensors(self, anchor: Tensor) -> None:
        if self.is_prefill:
            validate.tensor("cu_seqlens_q", anchor)
            validate.index_tensor("cu_seqlens_q", anchor, anchor, (-1,), "(B + 1,)")
            offsets = anchor.shape[0]
            if offsets == 0:
                validate.reject("cu_seqlens_q", "no entries", "(B + 1,)", "An empty batch is [0].")
            validate.index_tensor("cu_seqlens_k", self.cu_seqlens_k, anchor, (offsets,), "(B + 1,)")
            validate.count("max_seqlen_q", self.max_seqlen_q, 0)
            validate.count("max_seqlen_k", self.max_seqlen_k, 0)
            batch, num_tokens = offsets - 1, -1
        else:
            validate.tensor("context_lens", anchor)
            validate.index_tensor("context_lens", anchor, anchor, (-1,), "(B,)")
            batch = num_tokens = anchor.shape[0]
        if self.block_table is not None:
            shape, legend = (batch, -1), "(B, max_pages)"
            validate.index_tensor("block_table", self.block_table, anchor, shape, legend)
        if self.slot_mapping is not None:
            shape, slots = (num_tokens,), self.slot_mapping
            validate.index_tensor("slot_mapping", slots, anchor, shape, "(T,)", _SLOT_DTYPES)

    @property
    def _anchor(self) -> Tensor:
        """The tensor that says how many sequences there are."""
        anchor = self.cu_seqlens_q if self.is_prefill else self.context_lens
        assert anchor is not None
        return anchor


class Attention(nn.Module):
    """Causal attention of one decoder layer over a paged cache. It has no parameters.

    Args:
        num_heads: H.
        head_dim: D.
        scale: factor on Q K^T; D ** -0.5 when None.
        num_kv_heads: H_kv, divides H; H when None.
        window: (left, right) as `onchip.attention`; causal makes right 0.
        softcap: as `onchip.attention`.
        head_dim_v: D_v; D when None.

    Attributes:
        k_cache: (P, N, H_kv, D) or None; see `bind`.
        v_cache: (P, N, H_kv, D_v) or None.
        k_scale: (H_kv,) float32 or None.
        v_scale: (H_kv,) float32 or None.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """

    k_cache: Tensor | None
    v_cache: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        head_dim_v: int | None = None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = head_dim
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        for name in ("num_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            validate.count(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            got, allowed = f"{self.num_kv_heads} with num_heads {num_heads}", "a divisor of it"
            validate.reject("num_kv_heads", got, allowed, "Heads share KV heads in equal groups.")
        if scale is not None:
            validate.real("scale", scale)
        validate.window(window)
        validate.real("softcap", softcap, 0.0)
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.window = (window[0], window[1])
        self.softcap = float(softcap)
        self.k_cache = self.v_cache = self.k_scale = self.v_scale = None

    def extra_repr(self) -> str:
        """The arguments, for print(model)."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v}, scale={self.scale:g}, "
            f"window={self.window}, softcap={self.softcap:g}"
        )

    def bind(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Attaches this layer's pages, e.g. `cache.k[l], cache.v[l]`.

        They are no buffers: `state_dict`, `.to()` and `.half()` leave them alone.

        Args:
            k_cache: (P, N, H_kv, D).
            v_cache: (P, N, H_kv, D_v), same dtype and device.
            k_scale: (H_kv,) float32, pages hold k / k_scale; e.g. `cache.k_scale[l]` of a
                float8_e4m3fn cache.
            v_scale: as k_scale.

        Raises:
            ValueError, TypeError: if they do not fit the layer or each other.

        Mutates: the layer's `k_cache`, `v_cache`, `k_scale` and `v_scale` attributes.
        """
        wanted = {"k_cache": (k_cache, self.head_dim), "v_cache": (v_cache, self.head_dim_v)}
        for name, (x, dim) in wanted.items():
            validate.tensor(name, x)
            validate.rank(name, x, 4, "(P, N, H_kv, D)")
            _require_shape(name, x, (-1, -1, self.num_kv_heads, dim), "(P, N, H_kv, D)")
            if x.dtype not in validate.CACHE_FLOATS:
                fix = "Make the cache in the model's dtype, or in float8_e4m3fn."
                validate.reject(name, f"dtype {x.dtype}", "a float dtype", fix, TypeError)
        if (v_cache.dtype, v_cache.device) != (k_cache.dtype, k_cache.device):
            got = f"{v_cache.dtype} on {v_cache.device}"
            allowed = f"k_cache's {k_cache.dtype} on {k_cache.device}"
            validate.reject("v_cache", got, allowed, "Make both alike.", TypeError)
        _require_shape("v_cache", v_cache, (*k_cache.shape[:2], -1, -1), "k_cache's (P, N)")
        for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
            if x is not None:
                validate.scale_tensor(name, x, k_cache, self.num_kv_heads)
                _require_shape(name, x, (self.num_kv_heads,), "(H_kv,)")
        self.k_cache, self.v_cache = k_cache, v_cache
        self.k_scale, self.v_scale = k_scale, v_scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: StepContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores k and v by slot_mapping, then attends as the step asks.

        Prefill attends over k and v themselves, or over the pages when ctx has a block_table;
        decode attends over the pages. Without a bound cache only the first works, and only the
        first has gradients.

        Args:
            q: (T, H, D) or (T, H * D).
            k: (T, H_kv, D), q's dtype.
            v: (T, H_kv, D_v), q's dtype.
            ctx: this step.
            sinks: (H,) float; exp(sink) joins each denominator.

        Returns:
            q's shape, with D_v for D where they differ.

        Raises:
            ValueError, TypeError: for an argument that does not fit, naming it; nothing was
                stored.
                That includes a gradient asked through decode.
            NoKernelError: if no kernel takes the step, as with a gradient asked through the pages
                in prefill; nothing was stored.

        Mutates: `k_cache` and `v_cache` in the slots named.
        """
        queries = self._heads(q)
        self._check(queries, k, v, ctx)
        if not ctx.is_prefill or ctx.block_table is not None:
            validate.no_gradient(q=q, k=k, v=v, sinks=sinks)  # the cache keeps no graph
        # Everything that can fail comes before the store, everything that computes after it.
        prepared = self._prefill if ctx.is_prefill else self._decode
        call = prepared(queries, k, v, ctx, sinks)
        if not torch.compiler.is_compiling():
            ops.plan(Op.FORWARD, call.tensors, call.params)
            if ops.needs_grad(call.tensors):
                ops.plan(Op.BACKWARD, call.tensors, call.params)
        if self.k_cache is not None and self.v_cache is not None:
            assert ctx.slot_mapping is not None
            # A cache outlives the step: it must not hold the step's graph.
            k, v = k.detach(), v.detach()
            caches, scales = (self.k_cache, self.v_cache), (self.k_scale, self.v_scale)
            store_kvcache(k, v, *caches, ctx.slot_mapping, *scales)
        out, _ = ops.attention(*call)
        return self._rows(out, q)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, ctx: StepContext, sinks) -> Call:
        k_scale = v_scale = None
        if ctx.block_table is not None:
            assert self.k_cache is not None and self.v_cache is not None
            k, v = self.k_cache, self.v_cache
            k_scale, v_scale = self.k_scale, self.v_scale
        tensors = Tensors(
            q,
            k,
            v,
            cu_seqlens_q=ctx.cu_seqlens_q,
            cu_seqlens_k=ctx.cu_seqlens_k,
            block_table=ctx.block_table,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return prepare.varlen(tensors, ctx.max_seqlen_q, ctx.max_seqlen_k, self._options)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, ctx: StepContext, sinks) -> Call:
        assert self.k_cache is not None and self.v_cache is not None
        assert ctx.context_lens is not None
        # By then the new token is in the cache, and context_lens counts it: k and v are not given.
        arguments = CacheArguments(
            q.unsqueeze(1),  # (B, 1, H, D)
            self.k_cache,
            self.v_cache,
            ctx.context_lens,
            block_table=ctx.block_table,
            sinks=sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        if torch.compiler.is_compiling():
            return prepare.kvcache(arguments, False, self._options)[0]
        key = ctx.values_key(self.k_cache)
        call, _ = prepare.kvcache(arguments, False, self._options, key not in ctx._checked)
        ctx._checked.add(key)
        return call

    @property
    def _options(self) -> Options:
        return Options(
            causal=True,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            return_lse=False,
            deterministic=False,
            num_splits=None,
            kernel=None,
        )

    def _heads(self, q: Tensor) -> Tensor:
        validate.tensor("q", q)
        if q.dim() == 2 and q.shape[1] == self.num_heads * self.head_dim:
            return q.unflatten(1, (self.num_heads, self.head_dim))
        if q.dim() != 3 or q.shape[1:] != (self.num_heads, self.head_dim):
            H, D = self.num_heads, self.head_dim
            allowed = f"(T, H, D) = (T, {H}, {D}) or (T, H * D) = (T, {H * D})"
            validate.reject("q", f"shape {tuple(q.shape)}", allowed, "Reshape the projection.")
        return q

    def _rows(self, out: Tensor, q: Tensor) -> Tensor:
        """out (T, H, D_v) or (B, 1, H, D_v) in the form that q came in."""
        shape = (self.num_heads * self.head_dim_v,)
        if q.dim() == 3:
            shape = (self.num_heads, self.head_dim_v)
        return out.reshape(q.shape[0], *shape)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, ctx: StepContext) -> None:
        """What the calls cannot know: the layer's own shapes and its cache."""
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.head_dim_v)):
            validate.tensor(name, x)
            _require_shape(name, x, (q.shape[0], self.num_kv_heads, dim), "(T, H_kv, D)")
            if x.dtype != q.dtype:
                got, fix = f"dtype {x.dtype}", f"Use {name}.to(q.dtype)."
                validate.reject(name, got, f"q's {q.dtype}", fix, TypeError)
        if self.k_cache is not None:
            self._check_cache(self.k_cache, q, ctx.slot_mapping)
            return
        fix = "Call layer.bind(k_cache, v_cache) first."
        for name in ("slot_mapping", "block_table"):
            if getattr(ctx, name) is not None:
                validate.reject(f"ctx.{name}", "a tensor", "None without a cache", fix)

    def _check_cache(self, k_cache: Tensor, q: Tensor, slots: Tensor | None) -> None:
        if k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
            got, allowed = f"dtype {q.dtype}", f"the bound cache's {k_cache.dtype}"
            validate.reject("q", got, allowed, "Make the cache in the model's dtype.", TypeError)
        if slots is None:
            fix = "Give a slot for each token; -1 stores nothing."
            validate.reject("ctx.slot_mapping", None, "(T,) with a bound cache", fix)
        _require_shape("ctx.slot_mapping", slots, (q.shape[0],), "(T,)")


def _require_shape(name: str, x: Tensor, shape: tuple[int, ...], legend: str) -> None:
    """Requires a shape; -1 allows any size."""
    fits = x.dim() == len(shape) and all(
        w in (-1, size) for size, w in zip(x.shape, shape, strict=True)
    )
    if not fits:
        allowed = f"{legend} = {shape}".replace("-1", "any")
        validate.reject(name, f"shape {tuple(x.shape)}", allowed, "Match the layer and the step.")
