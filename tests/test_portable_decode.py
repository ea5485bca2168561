"""The portable decode on a CPU, through Triton's interpreter, against the float64 oracle.

bfloat16 products are wrong in the interpreter of Triton 3.6: tests/gpu has those.
"""

from __future__ import annotations

import json
import math
import os
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from onchip import dispatch  # noqa: E402
from onchip.kernels import MAX_DECODE_SPLITS  # noqa: E402
from onchip.kernels.portable import decode, decode_config, decode_spec  # noqa: E402
from onchip.kernels.portable.decode_config import choose_decode  # noqa: E402
from onchip.problem import Mask  # noqa: E402
from tests import compile_only  # noqa: E402
from tests.portable_cases import Call, Case, build, check  # noqa: E402

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)
F32 = torch.float32
GQA = {"heads": 4, "kv_heads": 2}

CASES = {
    "pages_of_16": Case((1, 1, 1), (153, 70, 0), page=16, **GQA),
    "pages_of_1": Case((1, 1), (93, 1), page=1, dtype=F32),
    "pages_of_3": Case((1, 1), (153, 1), page=3),
    "pages_of_64": Case((1, 1), (200, 64), page=64, dtype=F32),
    "one_page": Case((1, 1), (90, 200), page=200, dtype=F32),
    "all_empty": Case((1, 1), (0, 0), page=16, dtype=F32),
    "empty_with_sinks": Case((1, 1), (0, 70), page=16, sinks=True, dtype=F32),
    "dense": Case((1, 1), (90, 17), used=True, **GQA),
    "dense_whole": Case((3, 3), (90, 90), causal=True, sinks=True, **GQA),
    "dense_many": Case((40,), (170,), causal=True, dtype=F32, **GQA),
    "dense_several": Case((4, 4), (90, 17), used=True, causal=True, **GQA),
    "window": Case((1, 1), (190, 17), page=16, window=(70, 0), dtype=F32),
    "leftpad": Case((1, 1), (190, 80), page=16, first=(130, 3), dtype=F32),
    "several": Case((3, 3), (153, 2), page=16, causal=True, dtype=F32, **GQA),
    "several_window": Case((3, 3), (153, 40), page=3, causal=True, window=(20, -1), **GQA),
    "several_not_causal": Case((2, 2), (90, 40), page=16, dtype=F32),
    "wide": Case((5, 5), (150, 3), heads=8, kv_heads=2, page=16, causal=True),
    "wide_in_blocks": Case((16,), (140,), heads=6, kv_heads=1, page=5, causal=True, dtype=F32),
    "terms": Case((2, 2), (150, 3), page=16, causal=True, softcap=3.0, alibi=2, sinks=True, **GQA),
    "terms_wide": Case(
        (8, 8),
        (90, 60),
        heads=4,
        page=16,
        window=(30, 2),
        softcap=3.0,
        alibi=1,
        sinks=True,
        dtype=F32,
    ),
    "packed": Case((2, 0, 4), (150, 17, 5), heads=6, kv_heads=2, page=16, packed=True, causal=True),
    "packed_single": Case((1, 0, 1), (90, 17, 0), page=16, packed=True, causal=True, dtype=F32),
    "dims_40_and_72": Case((1, 1), (90, 17), dim=40, dim_v=72, page=16),
    "dims_1_and_3": Case((2, 2), (90, 17), dim=1, dim_v=3, page=16, causal=True, dtype=F32),
    "dim_256": Case((1,), (90,), heads=1, dim=256, dim_v=256, page=16),
    "strided": Case((2, 2), (90, 17), page=16, strided=True, causal=True),
    "negative_scale": Case((1, 1), (90, 17), page=16, scale=-0.3, dtype=F32),
}


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Fills memory that torch.empty hands out with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def configs(call: Call):
    """One piece, three pieces, and pieces cut on the device."""
    chosen = choose_decode(call.problem, 4)
    yield replace(chosen, splits=1, balanced=False)
    yield replace(chosen, splits=3, balanced=False, min_tiles=1)
    if call.problem.seqused_k:
        yield replace(chosen, splits=2, balanced=True, min_tiles=1)


def hopper(call: Call):
    """The wide walk as on sm_90, cut by shapes and on the device."""
    rows = call.problem.seqlen_q * call.problem.group
    tile = {"rows": 64, "row_blocks": -(-rows // 64), "groups": 0, "block_n": 32, "num_warps": 4}
    chosen = replace(choose_decode(call.problem, 4), **tile, min_tiles=1)
    yield replace(chosen, splits=3, balanced=False)
    yield replace(chosen, splits=2, balanced=True)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    call = build(CASES[name])
    for config in configs(call):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


WIDE = ("pages_of_16", "several_window", "wide", "wide_in_blocks", "terms", "terms_wide", "packed")


@interpreted
@pytest.mark.parametrize("name", [*WIDE, "one_page", "dense_several", "leftpad", "strided"])
def test_a_launch_of_its_own_merges_the_same(name, monkeypatch):
    monkeypatch.setattr(decode_spec, "_MERGED_AT_ONCE", 0)
    monkeypatch.setattr(decode_spec, "_MERGED_APART", 64)
    call = build(CASES[name])
    if call.problem.seqused_k:
        for config in (*configs(call), *hopper(call)):
            check(call, *decode.launch_with(config, call.problem, call.tensors))


@interpreted
def test_table_entries_past_the_end_are_never_read():
    call = build(CASES["pages_of_16"])
    table, lengths = call.tensors.block_table, call.case.lengths_k
    for b, length in enumerate(lengths):
        table[b, -(-length // 16) :] = (2**31 - 1, -(2**31), 10**6)[b]
    for config in configs(call):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


@interpreted
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("heads", [2, 16])  # the narrow and the wide walk
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(heads, poison):
    case = Case((3,), (150,), heads=heads, page=16, causal=True, dtype=F32)
    call = build(case)
    _, _, v = call.sequences[0]
    page = call.tensors.block_table[0, 149 // 16]
    for x in (call.tensors.v[page, 149 % 16], v[149]):
        x[0, 3] = poison
    for config in configs(call):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


@interpreted
def test_one_split_does_not_depend_on_neighbours():
    call = build(Case((2,) * 3, (150, 70, 20), page=16, causal=True, **GQA))
    problem = replace(call.problem, num_splits=1)
    out, lse = decode.launch(problem, call.tensors)
    for b in range(3):
        alone = replace(call.tensors, q=call.tensors.q[b : b + 1],
                        block_table=call.tensors.block_table[b : b + 1],
                        seqused_k=call.tensors.seqused_k[b : b + 1])  # fmt: skip
        own, own_lse = decode.launch(replace(problem, batch=1, tokens_q=2), alone)
        assert torch.equal(own[0], out[b]) and torch.equal(own_lse[0], lse[b])


@interpreted
def test_float8_cache_is_multiplied_exactly():
    case = Case((2, 2), (90, 40), page=16, causal=True, **GQA)
    call = build(case)
    k, v = (x.nan_to_num().to(torch.float8_e4m3fn) for x in (call.tensors.k, call.tensors.v))
    scales = torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])
    # The same numbers in float32, scaled: what the float8 cache means.
    want_k, want_v = (x.float() * s[:, None] for x, s in zip((k, v), scales, strict=True))
    plain = replace(call.tensors, q=call.tensors.q.float(), k=want_k, v=want_v)
    wide = replace(call.problem, dtype=F32, kv_dtype=F32)
    want, want_lse = decode.launch(wide, plain)
    quantised = replace(call.tensors, k=k, v=v, k_scale=scales[0], v_scale=scales[1])
    problem = replace(call.problem, kv_dtype=k.dtype, kv_scales=True)
    out, lse = decode.launch(problem, quantised)
    torch.testing.assert_close(out.float(), want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


def _on_gpu(call: Call, **changes):
    return replace(call.problem, device="cuda", **{"arch": "sm_90", **changes})


def test_the_record_takes_few_queries_and_comes_before_the_forward():
    call = build(replace(CASES["several"], dtype=torch.float16))
    assert dispatch.choose(_on_gpu(call)).name == "decode"
    assert dispatch.choose(_on_gpu(call, num_splits=5)).name == "decode"
    assert dispatch.choose(_on_gpu(call, seqlen_q=17, tokens_q=34)).name == "hopper"
    assert MAX_DECODE_SPLITS == decode_config.MAX_SPLITS
    assert dispatch.choose(_on_gpu(call, seqlen_q=17, seqlen_k=1024)).name == "decode"
    why = dispatch.rejections(_on_gpu(call, seqlen_q=17))["decode"]
    assert why == [
        "takes keys from 1024 on where there are more than 16 queries or no tensor of key "
        "lengths, not 153"
    ]
    assert dispatch.rejections(_on_gpu(call, seqlen_q=65))["decode"] == [
        "takes S_q up to 64, not 65"
    ]
    packed = {"num_heads": 32, "num_kv_heads": 8, "seqlen_k": 4096}
    for batch, queries, name in ((8, 64, "hopper"), (8, 32, "hopper"), (1, 8, "decode")):
        problem = _on_gpu(call, batch=batch, seqlen_q=queries, **packed)
        assert dispatch.choose(problem).name == name, (batch, queries)
        # Bits of a sequence must not depend on its neighbours where pieces are asked for.
        assert dispatch.choose(replace(problem, num_splits=1)).name == "decode", (batch, queries)
    whole = build(replace(CASES["dense_whole"], dtype=torch.float16))
    assert dispatch.choose(_on_gpu(whole)).name == "hopper"
    assert dispatch.choose(_on_gpu(whole, seqlen_k=1024)).name == "decode"
    assert dispatch.choose(_on_gpu(build(CASES["several"]))).name == "portable"  # float32


def test_configs_cover_the_rows_and_the_keys():
    call = build(CASES["pages_of_16"])
    for heads in (1, 2, 8, 64):
        for seqlen_q in (1, 4, 16):
            for dim in (64, 128, 256):
                problem = _on_gpu(call, num_heads=heads, num_kv_heads=1, seqlen_q=seqlen_q,
                                  head_dim=dim, head_dim_v=dim, seqlen_k=100_000)  # fmt: skip
                config = choose_decode(problem, 132)
                assert config.rows * config.row_blocks >= heads * seqlen_q
                assert 1 <= config.splits <= decode_config.MAX_SPLITS
    few = choose_decode(_on_gpu(call, batch=1, seqlen_k=1 << 17), 132)
    full = choose_decode(_on_gpu(call, batch=512, seqlen_k=1 << 17), 132)
    assert few.splits > 32 and full.splits == 1 and full.balanced
    for seqlen_q in (1, 64):  # a grid holds 65535 programs
        many = {"batch": 64_800, "num_kv_heads": 1, "seqlen_q": seqlen_q, "arch": "sm_90"}
        kind = {"dtype": torch.float16, "kv_dtype": torch.float16}
        problem = _on_gpu(call, **many, **kind, head_dim=128, head_dim_v=128)
        assert choose_decode(problem, 132).programs(problem, 132) <= 65535
    one = choose_decode(_on_gpu(call, batch=512, num_splits=1), 132)
    assert one.splits == 1 and not one.balanced


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_one_query_of_few_heads_is_walked_in_gluon(kv_dtype):
    call = build(CASES["pages_of_16"])
    plain = {"kv_dtype": kv_dtype, "head_dim": 128, "head_dim_v": 128,
             "dtype": torch.bfloat16, "arch": "sm_90", "seqlen_k": 8192}  # fmt: skip

    def chosen(is_aligned=True, **given):
        return choose_decode(_on_gpu(call, **{"batch": 200, **plain, **given}), 132, is_aligned)

    narrow = {"head_dim": 64, "head_dim_v": 64}
    for given in ({}, {"page_size": 1}, {"mask": Mask(100, 0)}, {"leftpad": True}, narrow):
        assert chosen(**given).direct and chosen(batch=1, **given).direct
    for given in ({"seqlen_q": 2}, {"head_dim": 64}, {"head_dim": 256, "head_dim_v": 256},
                  {"softcap": 1.0}, {"alibi": 1}, {"num_heads": 18}, {"dtype": F32},
                  {"arch": "sm_80"}):  # fmt: skip
        assert not chosen(**given).direct, given
    assert not chosen(is_aligned=False).direct
    # A sequence's bits do not depend on its neighbours.
    one, many = (chosen(batch=batch, num_splits=1) for batch in (1, 200))
    assert one == many


def test_programs_of_the_walk_in_gluon():
    """What was measured to be the fastest on an H200: warps of a program, pieces of a sequence."""
    call = build(CASES["pages_of_16"])
    bf16, float8 = torch.bfloat16, torch.float8_e4m3fn
    cases = {
        (1, 4096, bf16, 16): (4, 16),
        (1, 32768, bf16, 16): (4, 16),
        (1, 32768, bf16, 8): (4, 16),
        (1, 32768, bf16, 1): (4, 32),
        (16, 4096, bf16, 16): (4, 1),
        (32, 32768, bf16, 256): (4, 1),
        (64, 4096, bf16, 16): (4, 1),
        (1, 4096, float8, 16): (4, 16),
        (1, 32768, float8, 16): (4, 32),
        (16, 4096, float8, 16): (4, 2),
        (64, 8192, float8, 16): (4, 1),
    }
    for (batch, keys, kv_dtype, page), wanted in cases.items():
        given = {"batch": batch, "seqlen_k": keys, "kv_dtype": kv_dtype, "page_size": page}
        shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "head_dim_v": 128}
        config = choose_decode(_on_gpu(call, dtype=bf16, **given, **shape), 132)
        assert config.direct and (config.num_warps, config.splits) == wanted, given
        is_light = kv_dtype == float8 and config.balanced
        assert config.block_n == 16 * config.num_warps
        assert config.num_stages == (2 if is_light else 3)


def _dealt(tiles: list[int], programs: tuple[int, int], splits: int, num_pieces: int) -> list:
    """What `decode_cuts.dealt` gives each program of a head, computed by torch."""
    from onchip.kernels.portable import decode_cuts

    program = [0]
    language = types.SimpleNamespace(
        sum=lambda x, axis: int(x.sum()),
        max=lambda x, axis: int(x.max()),
        cdiv=lambda a, b: -(-a // b),
        where=lambda c, a, b: (a if c else b) if isinstance(c, bool) else torch.where(c, a, b),
        maximum=max,
        static_range=range,
        associative_scan=lambda x, axis, combine: x.cumsum(axis),
        program_id=lambda axis: program[0],
        num_programs=lambda axis: programs[axis],
        int32=torch.int32,
        constexpr=None,
    )
    names = {"gl": language, "_add": None, "_CLASS_BITS": decode_cuts._CLASS_BITS.value}
    names["_MOST_IN_CLASSES"] = decode_cuts._MOST_IN_CLASSES.value
    for name in ("_of_class", "dealt"):
        names[name] = types.FunctionType(getattr(decode_cuts, name).fn.__code__, names)
    dealt = names["dealt"]
    padded = torch.zeros(1 << len(tiles).bit_length(), dtype=torch.int32)
    padded[: len(tiles)] = torch.tensor(tiles)
    every = torch.arange(len(padded))
    spec = types.SimpleNamespace(min_tiles=2, batch_padded=len(padded))
    found = []
    for program[0] in range(programs[1]):
        found.append(dealt(every, padded, len(tiles), splits, num_pieces, spec))
    return found


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "name", ["equal", "log_uniform", "one_long", "with_empty", "all_empty", "many"]
)
def test_pieces_of_the_walk_in_gluon_cover_all_tiles_once(name, splits):
    generator = torch.Generator().manual_seed(1)
    lengths = {
        "equal": [64] * 40,
        "log_uniform": (512 ** torch.rand(64, generator=generator)).int().tolist(),
        "one_long": [16] * 63 + [2048],
        "with_empty": [0, 5, 1, 0, 2, 900, 0],
        "all_empty": [0, 0, 0],
        "many": torch.randint(0, 90, (300,), generator=generator).tolist() + [4000],
    }[name]
    heads, num_pieces = 8, 4 * 132
    num_programs = len(lengths) + max(len(lengths) * (splits - 1), -(-num_pieces // heads))
    found = _dealt(lengths, (heads, num_programs), splits, num_pieces)
    walked = {sequence: [] for sequence in range(len(lengths))}
    places = set()
    for sequence, index, count, first_program, size in found:
        if sequence >= len(lengths):
            continue
        tiles = range(index * size, min((index + 1) * size, lengths[sequence]))
        assert index < count and (len(tiles) > 0 or lengths[sequence] == 0)
        walked[sequence] += tiles
        places.add(first_program + index)
    assert all(sorted(walked[b]) == list(range(n)) for b, n in enumerate(lengths))
    real = [x for x in found if x[0] < len(lengths)]
    assert len(places) == len(real) and max(places) < num_programs
    tiles = [min(size, lengths[b] - index * size) for b, index, _, _, size in real]
    num_classes = 16 if len(lengths) <= 256 else 1
    classes = [num_classes * n // size for n, (*_, size) in zip(tiles, real, strict=True)]
    assert classes == sorted(classes, reverse=True)  # short pieces come last


SCRIPT = Path(__file__).with_name("portable_decode_compiles.py")
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
COMPILED = [
    {"arch": "sm_90", "dim": 128, "features": name}
    for name in ("page_16", "page_1", "float8", "balanced", "window", "wide")
] + [
    {"arch": "sm_90", "dim": 128, "features": "float8_many"},
    *({"arch": "sm_90", "dim": 64, "features": name} for name in ("page_8", "float8", "window")),
    {"arch": "sm_80", "dim": 128, "features": "speculative"},
    {"arch": "sm_90", "dim": 80, "features": "terms"},
    {"arch": "sm_90", "dim": 128, "features": "dense_cache"},
    {"arch": "gfx942", "dim": 128, "features": "page_16"},
    *(
        {"arch": "sm_90", "dim": 128, "features": name}
        for name in (
            "append",
            "append_turned",
            "append_pairs",
            "append_balanced",
            "append_dense_cache",
            "append_page_1",
            "append_window",
        )
    ),
    {"arch": "sm_90", "dim": 64, "features": "append_half"},
]


def test_it_compiles_for_gpus_that_are_not_there():
    found = compile_only.run_script(SCRIPT, json.dumps(COMPILED))
    assert len(found) == len(COMPILED) + 2  # speculative and wide take a launch more
    for used in found:
        print(used)
        assert used["shared_bytes"] <= SHARED_BYTES[used["arch"]], used
    direct = [used for used in found if used["kernel"] == "attn_decode_direct"]
    assert len(direct) == 18
    for used in direct:
        assert used["mma"] > 0 and used["spill_bytes"] == 0, used
        assert used["registers"] <= 128, used  # four programs on an SM
