"""The Attention layer over a paged cache against the float64 oracle on plain tensors.

The oracle never sees a page: each sequence's keys and values are also kept as plain tensors.
Unused pages and page tails hold NaN; table tails hold -1, stale and out-of-range ids.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import attention, reference, values
from onchip.nn import Attention, StepContext
from onchip.paging import PagedKVCache

H, H_KV, D = 4, 2, 8
LAYERS = 2
PAGE_SIZES = [1, 3, 16, 256]
TAIL = [-1, 10**6, -7, 0, 1]  # what lies beyond a sequence's last page


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def cumulative(lengths):
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


class Rig:
    """A cache with its layers, and every sequence's keys and values as plain tensors."""

    def __init__(
        self,
        page_size,
        num_pages=None,
        dtype=torch.float64,
        head_dim_v=D,
        slot_dtype=torch.int64,
        seed=0,
        sinks=None,
        **options,
    ):
        num_pages = num_pages or 2 + 96 // page_size + 6
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.head_dim_v, self.slot_dtype = dtype, head_dim_v, slot_dtype
        self.options, self.sinks = options, sinks
        self.cache = PagedKVCache(
            LAYERS, num_pages, page_size, H_KV, D, dtype, head_dim_v=head_dim_v
        )
        self.cache.k.fill_(float("nan"))
        self.cache.v.fill_(float("nan"))
        self.layers = [
            Attention(H, D, num_kv_heads=H_KV, head_dim_v=head_dim_v, **options)
            for _ in range(LAYERS)
        ]
        for index, layer in enumerate(self.layers):
            layer.bind(self.cache.k[index], self.cache.v[index])
        self.history: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def add(self):
        seq_id = self.cache.add_sequence()
        empty = self.random(0, H_KV, D), self.random(0, H_KV, self.head_dim_v)
        self.history[seq_id] = [empty] * LAYERS
        return seq_id

    def fork(self, seq_id):
        child = self.cache.fork(seq_id)
        self.history[child] = list(self.history[seq_id])
        return child

    def free(self, seq_id):
        self.cache.free_sequence(seq_id)
        del self.history[seq_id]
        for page in range(self.cache.num_pages):
            if self.cache.pool.ref_count(page) == 0:
                self.cache.k[:, page] = float("nan")
                self.cache.v[:, page] = float("nan")

    def table(self, seq_ids):
        """The block table, with a different kind of rubbish after each sequence's last page."""
        table = self.cache.block_table(seq_ids)
        table = torch.nn.functional.pad(table, (0, 2), value=-1)
        for row, seq_id in enumerate(seq_ids):
            table[row, len(self.cache.pages(seq_id)) :] = TAIL[(row + seq_id) % len(TAIL)]
        return table

    def prefill_context(self, seq_ids, counts, paged):
        starts = [self.cache.append(s, n).start for s, n in zip(seq_ids, counts, strict=True)]
        ends = [self.cache.length(seq_id) for seq_id in seq_ids]
        return StepContext(
            is_prefill=True,
            cu_seqlens_q=cumulative(counts),
            cu_seqlens_k=cumulative(ends),
            max_seqlen_q=max(counts),
            max_seqlen_k=max(ends),
            slot_mapping=self.cache.slot_mapping(seq_ids, starts, ends).to(self.slot_dtype),
            block_table=self.table(seq_ids) if paged else None,
        )

    def decode_context(self, seq_ids):
        starts = [self.cache.append(seq_id, 1).start for seq_id in seq_ids]
        ends = [self.cache.length(seq_id) for seq_id in seq_ids]
        return StepContext(
            is_prefill=False,
            slot_mapping=self.cache.slot_mapping(seq_ids, starts, ends).to(self.slot_dtype),
            context_lens=int32(ends),
            block_table=self.table(seq_ids),
        )

    def step(self, seq_ids, counts, ctx):
        """Runs every layer on random rows; returns [(layer output, oracle)]."""
        results = []
        for index, layer in enumerate(self.layers):
            tokens = sum(counts)
            q, k = self.random(tokens, H, D), self.random(tokens, H_KV, D)
            v = self.random(tokens, H_KV, self.head_dim_v)
            out = layer(q, k, v, ctx, sinks=self.sinks)
            assert out.shape == (tokens, H, self.head_dim_v) and out.dtype == self.dtype
            results.append((out, self.expected(index, seq_ids, counts, q, k, v)))
        self.cache.check_integrity()
        return results

    def expected(self, index, seq_ids, counts, q, k, v):
        outs = [torch.zeros(0, H, self.head_dim_v, dtype=torch.float64)]
        splits = (x.split(list(counts)) for x in (q, k, v))
        for seq_id, q_new, k_new, v_new in zip(seq_ids, *splits, strict=True):
            old_k, old_v = self.history[seq_id][index]
            keys, values = torch.cat([old_k, k_new]), torch.cat([old_v, v_new])
            layers = list(self.history[seq_id])
            layers[index] = (keys, values)
            self.history[seq_id] = layers
            outs.append(oracle(q_new, keys, values, sinks=self.sinks, **self.options))
        return torch.cat(outs)

    def prefill(self, seq_ids, counts, paged=False):
        return self.step(seq_ids, counts, self.prefill_context(seq_ids, counts, paged))

    def decode(self, seq_ids):
        return self.step(seq_ids, [1] * len(seq_ids), self.decode_context(seq_ids))


def oracle(q, k, v, **options):
    """Float64 attention of one sequence, causal to its bottom right corner."""
    q, k, v = (x.double()[None] for x in (q, k, v))
    return reference.attention(q, k, v, causal=True, **options)[0][0]


def check(results, atol=1e-12):
    for out, expected in results:
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


OPTIONS = [
    {},
    {"scale": 0.7},
    {"window": (4, -1)},
    {"softcap": 1.5},
    {"sinks": torch.linspace(-1, 2, H, dtype=torch.float64)},
    {"window": (2, 0), "softcap": 3.0, "sinks": torch.zeros(H, dtype=torch.float64)},
]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefill_then_decode(page_size):
    rig = Rig(page_size)
    ids = [rig.add() for _ in range(3)]
    check(rig.prefill(ids, [5, 1, 17]))
    for _ in range(4):
        check(rig.decode(ids))
    check(rig.decode([ids[2], ids[0]]))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefill_over_the_pages_when_any_sequence_has_a_prefix(page_size):
    rig = Rig(page_size)
    cached, fresh, idle = rig.add(), rig.add(), rig.add()
    check(rig.prefill([cached, idle], [7, 3]))
    check(rig.prefill([fresh, cached, idle], [4, 5, 0], paged=True))
    check(rig.prefill([cached], [16], paged=True))
    check(rig.decode([cached, fresh, idle]))


def test_prefill_over_the_pages_equals_prefill_over_fresh_keys():
    results = []
    for paged in (False, True):
        rig = Rig(3)
        results.append(rig.prefill([rig.add(), rig.add()], [5, 8], paged=paged))
    check(results[0])
    check(results[1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_mean_what_the_contract_says(options):
    rig = Rig(3, **options)
    ids = [rig.add(), rig.add()]
    check(rig.prefill(ids, [9, 2]))
    check(rig.prefill(ids, [1, 6], paged=True))
    check(rig.decode(ids))


def test_another_value_dimension_and_int32_slots():
    rig = Rig(3, head_dim_v=5, slot_dtype=torch.int32)
    ids = [rig.add(), rig.add()]
    check(rig.prefill(ids, [4, 6]))
    check(rig.prefill(ids, [2, 1], paged=True))
    check(rig.decode(ids))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [6, 7])
def test_sequences_that_share_pages_attend_as_separate_copies(page_size, length):
    shared, separate = Rig(page_size, seed=1), Rig(page_size, seed=1)
    parent = shared.add()
    shared.prefill([parent], [length])
    children = [parent, shared.fork(parent), shared.fork(parent)]
    copies = []
    for _ in children:  # the same rows again, in pages of their own
        separate.generator.manual_seed(1)
        copies.append(separate.add())
        separate.prefill(copies[-1:], [length])
    num_full = length // page_size
    assert shared.cache.pool.num_used == num_full + 3 * bool(length % page_size)
    for _ in range(page_size % 7 + 2):
        for ours, theirs in zip(shared.decode(children), separate.decode(copies), strict=True):
            assert torch.equal(ours[0], theirs[0])
            check([ours])
    shared.free(parent)
    check(shared.decode(children[1:]))


def test_padding_rows_give_zero_and_touch_nothing():
    rig = Rig(3, sinks=torch.ones(H, dtype=torch.float64))
    ids = [rig.add(), rig.add()]
    rig.prefill(ids, [4, 2])
    ctx = rig.decode_context(ids)
    assert ctx.slot_mapping is not None and ctx.context_lens is not None
    assert ctx.block_table is not None
    stale = torch.stack([ctx.block_table[0], torch.full_like(ctx.block_table[0], 10**6)])
    padded = StepContext(
        is_prefill=False,
        slot_mapping=torch.cat([ctx.slot_mapping, torch.tensor([-1, -1])]),
        context_lens=torch.cat([ctx.context_lens, int32([0, 0])]),
        block_table=torch.cat([ctx.block_table, stale]),
    )
    q, k, v = rig.random(4, H, D), rig.random(4, H_KV, D), rig.random(4, H_KV, D)
    plain = rig.layers[0](q[:2], k[:2], v[:2], ctx, sinks=rig.sinks)
    before = rig.cache.k.clone(), rig.cache.v.clone()
    k[2:], v[2:] = float("nan"), float("inf")
    out = rig.layers[0](q, k, v, padded, sinks=rig.sinks)
    assert torch.equal(out[:2], plain)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert same(rig.cache.k, before[0]) and same(rig.cache.v, before[1])


def test_a_step_of_padding_alone():
    rig = Rig(3)
    ctx = StepContext(
        is_prefill=False,
        slot_mapping=torch.tensor([-1]),
        context_lens=int32([0]),
        block_table=int32([[-1]]),
    )
    out = rig.layers[0](rig.random(1, H, D), rig.random(1, H_KV, D), rig.random(1, H_KV, D), ctx)
    assert torch.equal(out, torch.zeros(1, H, D, dtype=torch.float64))
    assert rig.cache.k.isnan().all()


def test_empty_steps():
    rig = Rig(3)
    no_slots, none = torch.zeros(0, dtype=torch.int64), cumulative([])
    check(rig.step([], [], StepContext(True, none, none, slot_mapping=no_slots)))
    check(rig.decode([]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_stay_within_a_few_ulps(dtype):
    rig = Rig(3, dtype=dtype)
    ids = [rig.add(), rig.add()]
    # Outputs are averages of values of about 1: a few ulps of that.
    atol = 4 * torch.finfo(dtype).eps
    check(rig.prefill(ids, [9, 20]), atol)
    check(rig.prefill(ids, [3, 4], paged=True), atol)
    check(rig.decode(ids), atol)


def test_flat_and_strided_queries_of_a_fused_projection():
    rig, twin = Rig(3), Rig(3)
    ctx = rig.prefill_context([rig.add()], [5], paged=False)
    twin.prefill_context([twin.add()], [5], paged=False)
    qkv = rig.random(5, (H + 2 * H_KV) * D)
    flat, k, v = qkv.split([H * D, H_KV * D, H_KV * D], dim=1)
    k, v = k.unflatten(1, (H_KV, D)), v.unflatten(1, (H_KV, D))
    out = rig.layers[0](flat, k, v, ctx)
    assert out.shape == flat.shape
    packed = flat.unflatten(1, (H, D)).contiguous()
    expected = twin.layers[0](packed, k.contiguous(), v.contiguous(), ctx)
    assert torch.equal(out, expected.flatten(1))
    check([(expected, oracle(packed, k, v))])
    assert same(rig.cache.k, twin.cache.k)


def test_without_a_cache_prefill_works_and_has_gradients():
    layer = Attention(H, D, num_kv_heads=H_KV)
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, H, D), (7, H_KV, D), (7, H_KV, D)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    cu = cumulative([4, 0, 3])
    out = layer(*ours, StepContext(True, cu, cu, 4, 4))
    expected = torch.cat([dense(*(x[:4] for x in theirs)), dense(*(x[4:] for x in theirs))])
    check([(out.detach(), expected.detach())])
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-11)


def dense(q, k, v):
    """Plain differentiable causal attention of one sequence."""
    k, v = (x.repeat_interleave(H // H_KV, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * D**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def test_a_gradient_through_the_pages_is_refused_and_nothing_is_stored():
    rig = Rig(3)
    seq_id = rig.add()
    rig.prefill([seq_id], [4])
    for ctx, tokens in (
        (rig.decode_context([seq_id]), 1),
        (rig.prefill_context([seq_id], [2], paged=True), 2),
    ):
        before = rig.cache.k.clone()
        q, k, v = (rig.random(tokens, h, D) for h in (H, H_KV, H_KV))
        with pytest.raises((ValueError, NotImplementedError), match="gradient|backward.*paged"):
            rig.layers[0](q.requires_grad_(), k, v, ctx)
        assert same(rig.cache.k, before)


def test_a_bound_cache_keeps_no_graph():
    rig = Rig(3)
    ctx = rig.prefill_context([rig.add()], [4], paged=False)
    q, k, v = (rig.random(4, h, D).requires_grad_() for h in (H, H_KV, H_KV))
    rig.layers[0](q, k, v, ctx).sum().backward()
    assert k.grad is not None and not k.grad.isnan().any()
    assert not rig.cache.k.requires_grad
    slots = ctx.slot_mapping
    assert torch.equal(rig.cache.k[0].flatten(0, 1)[slots], k.detach())


def test_the_layer_has_no_parameters_and_its_cache_is_no_buffer():
    rig = Rig(3)
    layer = rig.layers[0]
    assert not list(layer.parameters()) and not layer.state_dict()
    layer.to(torch.float16)
    assert layer.k_cache is not None and layer.k_cache.dtype == torch.float64
    assert layer.k_cache.data_ptr() == rig.cache.k[0].data_ptr()


@settings(max_examples=25, deadline=None, database=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 3, 16]), seed=st.integers(0, 99))
def test_any_schedule_of_prefills_decodes_forks_and_frees(data, page_size, seed):
    rig = Rig(page_size, seed=seed, num_pages=4 + 150 // page_size)
    live = [rig.add()]
    check(rig.prefill(live, [data.draw(st.integers(1, 6))]))
    for _ in range(6):
        kind = data.draw(st.sampled_from(["prefill", "decode", "fork", "free", "add"]))
        some = data.draw(st.permutations(live))[: data.draw(st.integers(1, 4))] if live else []
        if kind == "add" or not live:
            live.append(rig.add())
        elif kind == "prefill":
            counts = [data.draw(st.integers(0, 5)) for _ in some]
            check(rig.prefill(some, counts, paged=True))
        elif kind == "decode":
            check(rig.decode(some))
        elif kind == "fork" and len(live) < 6:
            live.append(rig.fork(some[0]))
        elif kind == "free":
            rig.free(some[0])
            live.remove(some[0])
        rig.cache.check_integrity()


def same(x, y):
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def with_(ctx, **changes):
    names = ("is_prefill", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    names += ("slot_mapping", "context_lens", "block_table")
    return StepContext(**{**{name: getattr(ctx, name) for name in names}, **changes})


# name -> (prefill?, change of (q, k, v, ctx), error, words of the message)
BAD_CALLS = {
    "q heads": (True, lambda q, k, v, c: (q[:, :3], k, v, c), ValueError, "q: .*(3, 3, 8)"),
    "q flat": (True, lambda q, k, v, c: (q.flatten(1)[:, 1:], k, v, c), ValueError, "q: "),
    "k heads": (True, lambda q, k, v, c: (q, k[:, :1], v, c), ValueError, "k: .*1, 8"),
    "v tokens": (True, lambda q, k, v, c: (q, k, v[:2], c), ValueError, "v: "),
    "v dtype": (True, lambda q, k, v, c: (q, k, v.half(), c), TypeError, "v: .*float16"),
    "all dtypes": (
        True,
        lambda q, k, v, c: (q.float(), k.float(), v.float(), c),
        TypeError,
        "q: .*float32.*float64",
    ),
    "slots missing": (
        True,
        lambda q, k, v, c: (q, k, v, with_(c, slot_mapping=None)),
        ValueError,
        "slot_mapping",
    ),
    "slots short": (
        True,
        lambda q, k, v, c: (q, k, v, with_(c, slot_mapping=c.slot_mapping[:2])),
        ValueError,
        "slot_mapping",
    ),
    "slot out of range": (
        True,
        lambda q, k, v, c: (q, k, v, with_(c, slot_mapping=torch.tensor([1, 2, 10**5]))),
        ValueError,
        "slot_mapping: .*100000",
    ),
    "offsets": (
        True,
        lambda q, k, v, c: (q, k, v, with_(c, cu_seqlens_q=int32([0, 2]))),
        ValueError,
        "cu_seqlens_q: .*2",
    ),
    "max_seqlen_k": (
        True,
        lambda q, k, v, c: (q, k, v, with_(c, max_seqlen_k=1)),
        ValueError,
        "max_seqlen_k",
    ),
    "prefix without table": (
        True,
        lambda q, k, v, c: (q, k, v, with_(c, cu_seqlens_k=int32([0, 9]), max_seqlen_k=9)),
        ValueError,
        "cu_seqlens_k: .*9",
    ),
    "decode page": (
        False,
        lambda q, k, v, c: (q, k, v, with_(c, block_table=int32([[99, 1, 1]]))),
        ValueError,
        "block_table: .*99",
    ),
    "decode length": (
        False,
        lambda q, k, v, c: (q, k, v, with_(c, context_lens=int32([1000]))),
        ValueError,
        "cache_seqlens: .*1000",
    ),
    "decode negative length": (
        False,
        lambda q, k, v, c: (q, k, v, with_(c, context_lens=int32([-1]))),
        ValueError,
        "cache_seqlens: .*-1",
    ),
    "decode two rows": (
        False,
        lambda q, k, v, c: (q.repeat(2, 1, 1), k.repeat(2, 1, 1), v.repeat(2, 1, 1), c),
        ValueError,
        "slot_mapping",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_names_the_argument_and_stores_nothing(name):
    is_prefill, change, error, words = BAD_CALLS[name]
    rig = Rig(3)
    seq_id = rig.add()
    if is_prefill:
        tokens, ctx = 3, rig.prefill_context([seq_id], [3], paged=False)
    else:
        rig.prefill([seq_id], [4])
        tokens, ctx = 1, rig.decode_context([seq_id])
    q, k, v = rig.random(tokens, H, D), rig.random(tokens, H_KV, D), rig.random(tokens, H_KV, D)
    before = rig.cache.k.clone(), rig.cache.v.clone()
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        rig.layers[0](*change(q, k, v, ctx))
    assert same(rig.cache.k, before[0]) and same(rig.cache.v, before[1])
    rig.layers[0](q, k, v, ctx)
    assert not same(rig.cache.k, before[0])


@pytest.mark.parametrize(
    ("sinks", "error"),
    [(torch.zeros(3, dtype=torch.float64), ValueError), (torch.zeros(H).long(), TypeError)],
)
def test_bad_sinks_store_nothing(sinks, error):
    rig = Rig(3)
    ctx = rig.prefill_context([rig.add()], [3], paged=False)
    rows = rig.random(3, H, D), rig.random(3, H_KV, D), rig.random(3, H_KV, D)
    with pytest.raises(error, match="sinks"):
        rig.layers[0](*rows, ctx, sinks=sinks)
    assert rig.cache.k.isnan().all()


def test_pages_need_a_cache():
    layer = Attention(H, D)
    cu, x = cumulative([2]), torch.zeros(2, H, D)
    for name, value in (("slot_mapping", torch.zeros(2).long()), ("block_table", int32([[0]]))):
        ctx = StepContext(True, cu, cu, 2, 2, **{name: value})
        with pytest.raises(ValueError, match=rf"{name}.*bind"):
            layer(x, x, x, ctx)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: .*prefill"),
        ({"context_lens": int32([3])}, ValueError, "context_lens: .*prefill"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, TypeError, "cu_seqlens_q: .*int64"),
        ({"cu_seqlens_k": int32([0, 1, 3])}, ValueError, "cu_seqlens_k"),
        ({"cu_seqlens_q": int32([])}, ValueError, "cu_seqlens_q"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q"),
        ({"block_table": torch.tensor([[0]])}, TypeError, "block_table: .*int64"),
        ({"block_table": int32([[0], [1]])}, ValueError, "block_table"),
        ({"slot_mapping": torch.zeros(3)}, TypeError, "slot_mapping: .*float32"),
        ({"slot_mapping": int32([[0]])}, ValueError, "slot_mapping"),
    ],
)
def test_a_prefill_context_checks_itself(changes, error, words):
    good = StepContext(True, int32([0, 3]), int32([0, 3]), 3, 3)
    with pytest.raises(error, match=words):
        with_(good, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"context_lens": None}, ValueError, "context_lens: .*decode"),
        ({"block_table": None}, ValueError, "block_table: .*decode"),
        ({"slot_mapping": None}, ValueError, "slot_mapping: .*decode"),
        ({"cu_seqlens_q": int32([0, 1])}, ValueError, "cu_seqlens_q: .*decode"),
        ({"max_seqlen_k": 5}, ValueError, "max_seqlen_k: .*decode"),
        ({"context_lens": torch.tensor([3])}, TypeError, "context_lens: .*int64"),
        ({"slot_mapping": int32([0, 1])}, ValueError, "slot_mapping"),
    ],
)
def test_a_decode_context_checks_itself(changes, error, words):
    good = StepContext(
        False, slot_mapping=int32([2]), context_lens=int32([3]), block_table=int32([[0]])
    )
    with pytest.raises(error, match=words):
        with_(good, **changes)


@pytest.mark.parametrize(
    ("k_change", "v_change", "error", "words"),
    [
        (lambda x: x[..., :4], lambda x: x, ValueError, "k_cache"),
        (lambda x: x, lambda x: x[..., :1, :], ValueError, "v_cache"),
        (lambda x: x, lambda x: x[:-1], ValueError, "v_cache"),
        (lambda x: x[0], lambda x: x, ValueError, "k_cache"),
        (lambda x: x, lambda x: x.float(), TypeError, "v_cache"),
        (lambda x: x.long(), lambda x: x.long(), TypeError, "k_cache"),
        (lambda x: None, lambda x: x, TypeError, "k_cache"),
    ],
)
def test_bind_refuses_pages_that_do_not_fit(k_change, v_change, error, words):
    rig = Rig(3)
    layer = Attention(H, D, num_kv_heads=H_KV)
    with pytest.raises(error, match=words):
        layer.bind(k_change(rig.cache.k[0]), v_change(rig.cache.v[0]))
    assert layer.k_cache is None and layer.v_cache is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_heads": 0}, ValueError, "num_heads"),
        ({"head_dim": 0}, ValueError, "head_dim"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads: .*3"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"window": (-2, 0)}, ValueError, "window"),
        ({"window": 5}, TypeError, "window"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v"),
    ],
)
def test_the_layer_checks_its_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        Attention(**{"num_heads": H, "head_dim": D, **arguments})


def test_pages_are_checked_once_a_step_and_again_after_a_change(monkeypatch):
    calls = []
    checks = values.cache_values
    monkeypatch.setattr(values, "cache_values", lambda *a: (calls.append(1), checks(*a)))
    layers = [Attention(2, 8) for _ in range(2)]
    for layer in layers:
        layer.bind(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8))
    table = torch.tensor([[1]], dtype=torch.int32)
    ctx = StepContext(
        is_prefill=False,
        slot_mapping=torch.tensor([4]),
        context_lens=torch.tensor([1], dtype=torch.int32),
        block_table=table,
    )
    row = torch.ones(1, 2, 8)
    for layer in layers:
        layer(row, row, row, ctx)
    assert len(calls) == 1
    table[0, 0] = 2
    with pytest.raises(ValueError, match="block_table: got page 2"):
        layers[0](row, row, row, ctx)
    with pytest.raises(ValueError, match="block_table: got page 2"):  # a failed check is none
        layers[0](row, row, row, ctx)


def test_float8_pages_are_stored_scaled_and_read_back():
    torch.manual_seed(0)
    cache = PagedKVCache(1, 8, 4, H_KV, D, torch.float8_e4m3fn)
    assert cache.k_scale is not None and cache.v_scale is not None
    cache.k_scale.uniform_(0.01, 0.1)
    cache.v_scale.uniform_(0.01, 0.1)
    layer = Attention(H, D, num_kv_heads=H_KV)
    scales = (cache.k_scale[0], cache.v_scale[0])
    layer.bind(cache.k[0], cache.v[0], *scales)
    seq_id, history = cache.add_sequence(), ([], [])
    for count in (7, 3, 1, 1):  # a prompt, a chunk of one over pages, two steps of decode
        span = cache.append(seq_id, count)
        q, k, v = (torch.randn(count, n, D) for n in (H, H_KV, H_KV))
        for kept, x, scale in zip(history, (k, v), scales, strict=True):
            stored = (x / scale[:, None]).to(torch.float8_e4m3fn)
            kept.append(stored.float() * scale[:, None])
        slots = cache.slot_mapping([seq_id], [span.start], [span.stop])
        if count > 1:
            offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (count, span.stop)]
            table = cache.block_table([seq_id])
            ctx = StepContext(True, *offsets, count, span.stop, slots, block_table=table)
        else:
            lens = torch.tensor([span.stop], dtype=torch.int32)
            table = cache.block_table([seq_id])
            ctx = StepContext(False, slot_mapping=slots, context_lens=lens, block_table=table)
        out = layer(q, k, v, ctx)
        want = attention(q[None], *(torch.cat(x)[None] for x in history), causal=True)
        torch.testing.assert_close(out, want[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="k_scale"):
        layer.bind(cache.k[0], cache.v[0], torch.ones(H_KV + 1))
