"""The portable forward on a GPU, at real sizes and in 16 bit, under the contract's rule.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.problem import Op, Params, Problem, Tensors
from tests.portable_cases import Case, build, check

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "plain": Case((1024, 1024), (1024, 1024), heads=4, kv_heads=2),
    "causal": Case((1000,), (1000,), heads=4, kv_heads=4, causal=True),
    "causal_more_keys": Case((700,), (1500,), causal=True),
    "causal_more_queries": Case((1500,), (700,), causal=True),
    "window": Case((1000,), (1300,), window=(200, 90)),
    "window_left": Case((1000,), (1300,), window=(333, -1)),
    "window_diagonal": Case((1000,), (1300,), window=(0, 0)),
    "no_keys_sinks": Case((333,), (0,), sinks=True, causal=True),
    "one_row": Case((1, 1), (1400, 1400), heads=8, causal=True),
    "softcap": Case((600,), (600,), softcap=20.0, causal=True),
    "softcap_overflow": Case((600,), (600,), softcap=0.5, scale=300.0),
    "alibi": Case((600, 600), (700, 700), heads=4, alibi=1),
    "alibi_batch": Case((600, 600), (700, 700), heads=4, alibi=2, causal=True),
    "all_terms": Case((600,), (700,), alibi=1, softcap=10.0, sinks=True, window=(250, 40)),
    "negative_scale": Case((400,), (600,), scale=-0.1),
    "packed": Case((330, 0, 5, 170, 1000), (200, 9, 0, 440, 1000), heads=4, packed=True),
    "packed_causal": Case((330, 1, 1400), (500, 70, 1400), packed=True, causal=True, sinks=True),
    "packed_used": Case((330, 800), (200, 410), packed=True, used=True, causal=True),
    "dense_used": Case((500, 500), (700, 170), used=True, window=(90, 20)),
    "leftpad": Case((200, 200), (400, 230), used=True, first=(190, 3), causal=True),
    "pages_of_1": Case((200, 200), (330, 70), page=1),
    "pages_of_16": Case((500, 3), (1300, 170), page=16, packed=True, causal=True),
    "pages_of_48": Case((300, 300), (700, 0), page=48, window=(120, 0)),
    "pages_of_256": Case((300, 300), (700, 900), page=256, causal=True),
    "pages_leftpad": Case((200, 200), (400, 230), page=16, first=(190, 3), causal=True),
    "strided": Case((400, 400), (430, 430), strided=True, causal=True),
    "strided_packed": Case((200, 900), (330, 911), strided=True, packed=True),
    "strided_pages_diagonal": Case(
        (127, 24, 160, 127),
        (543, 189, 57, 49),
        heads=3,
        kv_heads=3,
        page=40,
        packed=True,
        causal=True,
        window=(0, 5),
        softcap=5.0,
        alibi=1,
        strided=True,
    ),
    "strided_pages": Case((200, 90), (330, 110), page=32, strided=True, packed=True),
}
DIMS = [(64, 64), (128, 128), (256, 256), (1, 3), (40, 72), (96, 96), (192, 128)]


@pytest.fixture(scope="module")
def forward():
    return pytest.importorskip("onchip.kernels.portable.forward")


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Fills memory that torch.empty hands out with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run(forward, case: Case, seed: int = 0) -> None:
    call = build(case, "cuda", seed)
    check(call, *forward.launch(call.problem, call.tensors))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_features(forward, name, dtype):
    for seed, (dim, dim_v) in enumerate(((64, 64), (128, 128))):
        run(forward, replace(CASES[name], dim=dim, dim_v=dim_v, dtype=dtype), seed)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "packed_causal", "pages_of_16", "all_terms"])
def test_head_dimensions(forward, name, dims):
    run(forward, replace(CASES[name], dim=dims[0], dim_v=dims[1], dtype=BF16))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (40, 72)], ids=str)
@pytest.mark.parametrize("name", ["plain", "all_terms", "packed_causal", "pages_of_16"])
def test_float32_in_full_precision(forward, name, dims):
    run(forward, replace(CASES[name], dim=dims[0], dim_v=dims[1], dtype=F32))


def test_float32_in_tf32_where_torch_allows_it(forward):
    call = build(Case((600,), (700,), dim=64, dim_v=64, dtype=F32, causal=True), "cuda")
    full, _ = forward.launch(call.problem, call.tensors)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        out, lse = forward.launch(call.problem, call.tensors)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert not torch.equal(out, full)
    torch.testing.assert_close(out, full, rtol=0, atol=5e-3)
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(forward, dim, poison):
    for case in (Case((700,), (700,), causal=True), Case((700,), (700,), window=(90, 30))):
        call = build(replace(case, dim=dim, dim_v=dim, dtype=BF16), "cuda")
        spoilt, (_, _, v) = call.tensors.v, call.sequences[0]
        for x in (spoilt[0], v):
            x[300, 0, 3] = x[555, 0] = poison
        check(call, *forward.launch(call.problem, call.tensors))


def test_the_forward_is_bitwise_reproducible(forward):
    call = build(replace(CASES["packed_causal"], dim=128, dim_v=128, dtype=BF16), "cuda")
    first, again = (forward.launch(call.problem, call.tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_tensor_of_more_than_2_31_elements(forward):
    heads, dim, length = 128, 128, (1 << 17) + 256
    shape = (1, length, heads, dim)  # 2^31 + 2^22 elements, 4.3 GB
    q = torch.randn(1, length, 1, dim, device="cuda", dtype=BF16).expand(shape)
    k = torch.empty(shape, device="cuda", dtype=BF16)
    v = torch.empty(shape, device="cuda", dtype=BF16)
    k.normal_()
    v.normal_()
    tensors = Tensors(q, k, v)
    params = Params(length, length, 511, 0, dim**-0.5, 0.0, False, 0, "")
    out, lse = forward.launch(Problem.of(Op.FORWARD, tensors, params), tensors)
    from onchip import reference

    for rows in (slice(0, 256), slice(length - 256, length)):
        keys = slice(max(0, rows.start - 511), rows.stop)
        inputs = (q[:, rows, -2:], k[:, keys, -2:], v[:, keys, -2:])
        want, want_lse = reference.attention(*inputs, causal=True, window=(511, -1))
        torch.testing.assert_close(out[:, rows, -2:].double(), want, rtol=0, atol=2e-2)
        torch.testing.assert_close(lse[:, -2:, rows].double(), want_lse, rtol=0, atol=1e-3)


def test_a_cuda_graph_follows_changed_lengths(forward):
    case = Case((300, 300), (900, 900), page=16, packed=True, causal=True, dim=64, dim_v=64)
    call = build(replace(case, dtype=BF16), "cuda")
    forward.launch(call.problem, call.tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = forward.launch(call.problem, call.tensors)
    for lengths in ((900, 900), (17, 640)):
        call.tensors.seqused_k.copy_(torch.tensor(lengths))
        graph.replay()
        changed = replace(call.case, lengths_k=lengths)
        cut = [(q, k[:n], v[:n]) for (q, k, v), n in zip(call.sequences, lengths, strict=True)]
        check(replace(call, case=changed, sequences=cut), out, lse)


def test_lengths_compile_nothing_anew(forward):
    kernel, device = forward.attn_fwd_portable, torch.cuda.current_device()
    case = Case((40,), (40,), packed=True, causal=True, dim=64, dim_v=64, dtype=BF16)

    def compiled() -> int:
        return len(kernel.device_caches[device][0])

    run(forward, replace(case, lengths_q=(100, 7), lengths_k=(64, 33)))
    before = compiled()
    for n in (50, 64, 65, 127, 128, 512, 513, 1000):
        run(forward, replace(case, lengths_q=(n, 3, n), lengths_k=(n, 1, n)))
    assert compiled() == before


# Found by the random problems: wrong results or illegal addresses when these heads were 16 wide.
UNALIGNED = [
    Case((183,), (34,), heads=1, kv_heads=1, dim=128, page=16, causal=True, window=(5, 130)),
    Case((51, 51), (536, 347), kv_heads=1, heads=4, dim=80, page=256, causal=True, window=(5, 130)),
    Case((546,) * 3, (201,) * 3, heads=4, kv_heads=1, dim=64, used=True, causal=True,
         window=(0, 5)),
    Case((618, 378, 141, 360), (458, 462, 79, 178), kv_heads=1, heads=2, dim=128, packed=True,
         page=16, window=(130, 5), alibi=2),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("case", UNALIGNED)
def test_unaligned_rows_of_narrow_values(forward, case, dtype):
    for seed in range(3):
        run(forward, replace(case, dim_v=16, strided=True, sinks=True, dtype=dtype), seed)


LENGTHS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=1, max_size=4)


@st.composite
def random_cases(draw) -> Case:
    lengths = draw(LENGTHS)
    packed = draw(st.booleans())
    page = draw(st.sampled_from([0, 0, 1, 16, 40, 256]))
    if not packed:
        lengths = [(max(1, lengths[0][0]), k if page else lengths[0][1]) for _, k in lengths]
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Case(
        tuple(q for q, _ in lengths),
        tuple(k for _, k in lengths),
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([16, 64, 80, 128])),
        dim_v=draw(st.sampled_from([16, 64, 80, 128])),
        dtype=draw(st.sampled_from([BF16, F16])),
        packed=packed,
        page=page,
        used=draw(st.booleans()) and not page,
        causal=draw(st.booleans()),
        window=(draw(st.sampled_from([-1, 0, 5, 130])), draw(st.sampled_from([-1, 0, 5, 130]))),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        alibi=draw(st.sampled_from([0, 0, 1, 2])),
        sinks=draw(st.booleans()),
        strided=draw(st.booleans()),
    )


# Sixteen parts, since most examples compile a variant of their own: they run in parallel. To
# shrink a failing one would compile hundreds.
@pytest.mark.parametrize("part", range(16))
def test_random_problems(forward, part):
    @hypothesis.seed(part)
    @settings(max_examples=64, deadline=None, phases=[hypothesis.Phase.generate])
    @given(random_cases(), st.integers(0, 1000))
    def check_one(case, data_seed):
        if sum(case.lengths_q) and max(case.lengths_q):
            run(forward, case, data_seed)

    check_one()
