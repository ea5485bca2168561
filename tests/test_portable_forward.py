"""The portable forward on a CPU, through Triton's interpreter, against the float64 oracle.

bfloat16 products are wrong in the interpreter of Triton 3.6: tests/gpu has those.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from onchip import reference  # noqa: E402
from onchip.kernels.portable import arguments, forward  # noqa: E402
from onchip.kernels.portable.config import Config, choose_forward, padded  # noqa: E402
from onchip.problem import Mask, Op, Params, Problem, Tensors  # noqa: E402
from tests.portable_cases import Case, build, check  # noqa: E402
from tests.tolerance import assert_close_to_oracle  # noqa: E402

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)
SMALL = Config(32, 16, 4, 2)
F32 = torch.float32

CASES = {
    "plain": Case((40, 40), (53, 53)),
    "causal": Case((50,), (50,), heads=2, kv_heads=2, causal=True),
    "causal_float32": Case((50,), (77,), dtype=F32, causal=True),
    "causal_more_queries": Case((77,), (40,), dtype=F32, causal=True),
    "window": Case((50,), (70,), dtype=F32, window=(20, 9)),
    "window_left": Case((50,), (70,), dtype=F32, window=(33, -1)),
    "window_right": Case((50,), (70,), dtype=F32, window=(-1, 3)),
    "window_diagonal": Case((50,), (70,), dtype=F32, window=(0, 0)),
    "window_beyond_keys": Case((70,), (20,), dtype=F32, window=(4, 3)),
    "window_huge": Case((20,), (20,), dtype=F32, window=(2**31 - 1, 2**31 - 1)),
    "no_keys": Case((33,), (0,), dtype=F32),
    "no_keys_sinks": Case((33,), (0,), dtype=F32, causal=True, sinks=True),
    "one_row": Case((1, 1), (40, 40), dtype=F32, causal=True),
    "dims_1_and_3": Case((20,), (30,), dim=1, dim_v=3, dtype=F32, causal=True),
    "dims_40_and_72": Case((20,), (30,), dim=40, dim_v=72),
    "dim_256": Case((17,), (30,), heads=1, dim=256, dim_v=256),
    "softcap": Case((40,), (40,), dtype=F32, softcap=3.0),
    "softcap_overflow": Case((40,), (40,), dtype=F32, softcap=0.5, scale=300.0),
    "alibi": Case((40, 40), (60, 60), dtype=F32, alibi=1),
    "alibi_batch": Case((40, 40), (60, 60), dtype=F32, alibi=2, causal=True),
    "all_terms": Case((50,), (60,), dtype=F32, alibi=1, softcap=4.0, sinks=True, window=(25, 4)),
    "sinks": Case((40,), (60,), sinks=True),
    "negative_scale": Case((40,), (60,), scale=-0.3),
    "packed": Case((33, 0, 5, 17), (20, 9, 0, 44), packed=True),
    "packed_causal": Case((33, 1, 40), (50, 7, 20), packed=True, causal=True, sinks=True),
    "packed_alibi_batch": Case((20, 9), (31, 15), dtype=F32, packed=True, alibi=2),
    "packed_used": Case((33, 8), (20, 41), packed=True, used=True, causal=True),
    "dense_used": Case((20, 20), (30, 17), used=True, window=(9, 2)),
    "leftpad": Case((20, 20), (40, 23), used=True, first=(19, 3), causal=True),
    "pages_of_1": Case((20, 20), (33, 7), page=1),
    "pages_of_7": Case((20, 20), (33, 0), page=7, causal=True),
    "pages_of_16_packed": Case((20, 3), (33, 17), page=16, packed=True, window=(12, 0)),
    "pages_leftpad": Case((20, 20), (40, 23), page=16, first=(19, 3), causal=True),
    "strided": Case((20, 20), (33, 33), dim=16, strided=True, causal=True),
    "strided_packed": Case((20, 9), (33, 11), dim=24, dim_v=16, strided=True, packed=True),
    "strided_pages": Case((20, 9), (33, 11), page=4, strided=True, packed=True),
}


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Fills memory that torch.empty hands out with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@interpreted
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:overflow")
def test_forward_matches_the_oracle(name):
    call = build(CASES[name], seed=len(name))
    check(call, *forward.launch_with(SMALL, call.problem, call.tensors))


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case((40, 40), (53, 53), dim=40, causal=True),
        Case((33, 0, 17), (20, 9, 44), packed=True, sinks=True),
        Case((20, 20), (40, 23), used=True, first=(19, 3), window=(9, 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_descriptors_read_the_same(case):
    call = build(case)
    config = replace(SMALL, descriptors=True)
    problem = replace(call.problem, arch="sm_90")
    assert arguments.spec_of(config, problem, call.tensors).described
    check(call, *forward.launch_with(config, problem, call.tensors))


@interpreted
@pytest.mark.parametrize(
    ("features", "poison", "descriptors"),
    [
        ({}, math.nan, False),
        ({"causal": True}, math.nan, True),
        ({"causal": True}, math.inf, False),
        ({"causal": True}, None, False),
        ({"window": (9, 4)}, math.inf, False),
        ({"window": (9, 4)}, None, True),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(features, poison, descriptors):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 45, 2, 16, generator=g).half() for _ in range(3))
    if poison is None:
        v[0, 20, 0, 3], v[0, 25, 0, 3], v[0, 30, 1, 5] = math.inf, -math.inf, math.nan
        k[0, 33, 1, 0] = math.nan
    else:
        v[0, 20, 0, 3] = v[0, 41, 1] = poison
    mask = Mask.of(features.get("causal", False), features.get("window", (-1, -1)))
    tensors = Tensors(q, k, v)
    params = Params(45, 45, mask.left, mask.right, 0.25, 0.0, False, 0, "")
    problem = replace(Problem.of(Op.FORWARD, tensors, params), arch="sm_90")
    out, lse = forward.launch_with(Config(16, 32, 4, 2, descriptors), problem, tensors)
    oracle, oracle_lse = reference.attention(q, k, v, **features)
    eager, eager_lse = reference.eager(q, k, v, **features)
    assert_close_to_oracle(out, oracle, eager, "out")
    assert_close_to_oracle(lse, oracle_lse, eager_lse, "lse")


@interpreted
@pytest.mark.parametrize("group_heads", [False, True])
def test_every_order_of_programs_covers_the_work(group_heads):
    call = build(Case((40, 40), (40, 40), heads=6, kv_heads=3, dim=16, dim_v=16, causal=True))
    config = Config(16, 32, 4, 1, group_heads=group_heads)
    check(call, *forward.launch_with(config, call.problem, call.tensors))


@interpreted
@pytest.mark.parametrize("features", [{}, {"softcap": 3.0, "sinks": True, "alibi": 1}], ids=str)
def test_float8_pages(features):
    case = Case(
        (40, 40), (90, 21), heads=4, kv_heads=2, page=16, causal=True, dtype=F32, **features
    )
    call = build(case)
    pages = [x.to(torch.float8_e4m3fn) for x in (call.tensors.k, call.tensors.v)]  # NaN stays
    scales = torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])
    plain, quantised = replace(call.tensors), replace(call.tensors)
    plain.k, plain.v = (x.float() * s[:, None] for x, s in zip(pages, scales, strict=True))
    quantised.k, quantised.v = pages
    quantised.k_scale, quantised.v_scale = scales
    problem = replace(call.problem, kv_dtype=pages[0].dtype, kv_scales=True)
    out, lse = forward.launch_with(SMALL, problem, quantised)
    want, want_lse = forward.launch_with(SMALL, call.problem, plain)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_groups_of_heads_fit_the_cache():
    problem = build(Case((40,), (40,), heads=4, kv_heads=2)).problem
    config = Config(32, 32, 4, 1, group_heads=True)
    heads = arguments.heads_per_group
    assert heads(config, replace(problem, seqlen_k=40)) == 4
    assert heads(config, replace(problem, seqlen_k=1 << 18)) == 2
    assert heads(config, replace(problem, seqlen_k=1 << 30)) == 2
    assert heads(replace(config, group_heads=False), problem) == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "gfx942", ""])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [1, 16, 64, 65, 128, 200, 256])
def test_every_problem_has_a_config(arch, dtype, dim):
    base = build(Case((40,), (40,))).problem
    problem = replace(base, arch=arch, dtype=dtype, kv_dtype=dtype, head_dim=dim, head_dim_v=dim)
    for mask in (Mask(), Mask(-1, 0), Mask(5, 5)):
        for length in (1, 4096):
            config = choose_forward(replace(problem, mask=mask, seqlen_q=length))
            assert isinstance(config, Config)
            # acc and S in float32 must leave registers for the rest: 256 of 4 bytes a thread.
            words = config.block_m * (padded(dim) + config.block_n) / (32 * config.num_warps)
            assert words <= 224


def test_padding_of_head_dimensions():
    assert [padded(n) for n in (1, 16, 17, 64, 65, 255, 256)] == [16, 16, 32, 64, 128, 256, 256]


@pytest.mark.parametrize(
    "change", [{"block_m": 48}, {"block_n": 8}, {"num_warps": 3}, {"num_stages": 0}]
)
def test_a_config_that_cannot_be_compiled_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(SMALL, **change)
