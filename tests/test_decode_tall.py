"""The tall decode without a GPU: its roles in a model of Gluon, and compiled for sm_90a.

In the model shared memory begins as NaN and operands are read as late as the hardware may: a slot
that is handed back too early, an arrival too many or one that is missing shows.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onchip import dispatch
from onchip.kernels.portable.decode_config import choose_decode
from onchip.problem import Mask
from tests import compile_only
from tests.model_runs import results_of
from tests.portable_cases import Case, build, check

HERE = Path(__file__).parent
GQA = {"heads": 8, "kv_heads": 2, "dim": 128, "dim_v": 128, "dtype": torch.bfloat16}
CASES = {
    "pages_of_16": Case((5,) * 4, (350, 70, 0, 1), page=16, causal=True, **GQA),
    "pages_of_32": Case((40, 40), (350, 37), page=32, causal=True, **GQA),
    "pages_of_64": Case((20, 20), (550, 10), page=64, **GQA),
    "pages_of_256": Case((20, 20), (550, 10), page=256, causal=True, **GQA),
    "more_than_32_pages": Case((5, 5), (1230, 530), page=16, causal=True, **GQA),
    "sees_later_keys": Case((20, 20), (550, 10), page=64, window=(-1, 3), **GQA),
    "sinks": Case((20,) * 3, (350, 0, 64), page=16, causal=True, sinks=True, **GQA),
    "dense": Case((20, 20), (350, 150), used=True, causal=True, **GQA),
    "dense_whole": Case((20, 20), (350, 350), causal=True, **GQA),
    "unequal": Case((5,) * 5, (900, 10, 350, 0, 70), page=16, causal=True, **GQA),
    "unequal_rows": Case((20,) * 4, (30, 900, 10, 10), page=16, causal=True, **GQA),
    "unequal_blocks": Case((64, 64, 64), (10, 800, 10), page=16, causal=True, **GQA),
    "packed": Case((20, 0, 7), (350, 150, 80), page=16, packed=True, causal=True, **GQA),
    "two_blocks": Case((64, 64), (350, 20), page=16, causal=True, **GQA),
    "one_page": Case((20, 20), (77, 90), page=90, causal=True, **GQA),
    "one_query": Case((1, 1), (350, 70), page=16, **{**GQA, "heads": 32, "kv_heads": 1}),
}
SPOILT = Case((5, 5), (150, 70), page=16, causal=True, **GQA)
# A piece must not add what later ones hold: merged with a weight of 0 it would become NaN.
OUTWEIGHED = Case((5,), (129,), page=16, causal=True, **{**GQA, "heads": 4, "kv_heads": 1})
CUTS = (
    {"splits": 1, "balanced": False},
    {"splits": 3, "balanced": False, "min_tiles": 1},
    {"splits": 2, "balanced": True, "min_tiles": 1},
)
# More pieces than two.
MANY_PIECES = {6: Case((5,), (350,), page=16, causal=True, **GQA),
               17: Case((5, 5), (1088, 200), page=64, causal=True, sinks=True, **GQA)}  # fmt: skip
#: Of few rows, which neighbours join however many pieces there are.
FEW_ROWS = {
    "one_row": replace(Case((1,), (1088,), page=64, **GQA), heads=2, dim=256, dim_v=256),
    "four_rows": replace(Case((1, 1), (1088, 70), page=16, **GQA), dim=256, dim_v=256),
    "12_rows": replace(Case((3, 3), (1088, 70), page=64, causal=True, **GQA), dim=64, dim_v=64),
}
#: Pieces that share out rows, of one warpgroup and two, with a sequence of one piece, or none.
_BALANCED = {"balanced": True, "splits": 3, "shares": 8}
SHARED = {
    "of_20_rows": (CASES["pages_of_16"], {"splits": 6, "shares": 8}),
    "or_not": (CASES["unequal"], _BALANCED),
    "of_equal": (Case((5,) * 3, (350, 300, 320), page=16, causal=True, **GQA), _BALANCED),
    "of_80_rows": (Case((20, 20), (550, 10), page=64, causal=True, sinks=True, **GQA),
                   {"splits": 5, "shares": 8}),
    "packed": (CASES["packed"], {"splits": 3, "shares": 8}),
    "of_two_blocks": (CASES["two_blocks"], {"splits": 4, "shares": 8}),
    "of_17_tiles": (MANY_PIECES[17], {"splits": 16, "shares": 16}),
    "of_16_tiles": (Case((5,), (1024,), page=64, causal=True, **GQA),
                    {"splits": 16, "shares": 16}),
    "wide": (replace(MANY_PIECES[17], dim=256, dim_v=256), {"splits": 9, "shares": 16}),
    "narrow": (replace(MANY_PIECES[17], dim=64, dim_v=64), {"splits": 6, "shares": 8}),
}  # fmt: skip
#: Of 64 columns, and of 256, with Q in shared memory.
_NARROW = GQA | {"dim": 64, "dim_v": 64}
NARROW = {
    "pages_of_16": Case((5,) * 4, (350, 70, 0, 1), page=16, causal=True, **_NARROW),
    "pages_of_256": Case((9, 9), (550, 10), page=256, causal=True, sinks=True, **_NARROW),
    "unequal": Case((5,) * 5, (900, 10, 350, 0, 70), page=16, causal=True, **_NARROW),
    "packed": Case((12, 0, 7), (350, 150, 80), page=16, packed=True, causal=True, **_NARROW),
    "dense": Case((15, 15), (350, 150), used=True, causal=True, **_NARROW),
    "one_page": Case((15, 15), (77, 90), page=90, **_NARROW),
    "ends_in_a_tile": Case((5, 5), (350, 550), page=600, causal=True, **_NARROW),
    "not_finite": replace(SPOILT, dim=64, dim_v=64),
}
WIDE = {name: replace(case, dim=256, dim_v=256) for name, case in NARROW.items()}
WIDE["one_row"] = replace(
    Case((1,) * 3, (350, 70, 900), page=16, **GQA), heads=2, dim=256, dim_v=256
)


def _entries() -> dict[str, dict]:
    found = {}
    for name, case in CASES.items():
        for cut in CUTS[: 3 if case.page or case.used else 2]:
            kind = "balanced" if cut["balanced"] else cut["splits"]
            found[f"{name}-{kind}"] = {"case": case, "config": cut}
    for splits, case in MANY_PIECES.items():
        config = {"splits": splits, "balanced": False, "min_tiles": 1}
        found[f"pieces-{splits}"] = {"case": case, "config": config}
    for name, case in FEW_ROWS.items():
        for splits in (1, 17):
            config = {"splits": splits, "balanced": False, "min_tiles": 1}
            found[f"few-{name}-{splits}"] = {"case": case, "config": config}
    for poison in (math.nan, math.inf, -math.inf):
        found[f"{poison}"] = {"case": SPOILT, "config": CUTS[1], "poison": poison}
    for name in ("pages_of_16", "pages_of_64"):
        entry = {"case": CASES[name], "config": CUTS[1], "heads_first": True}
        found[f"heads_first-{name}"] = entry
    for name, (case, config) in SHARED.items():
        for order in ({}, {"abreast": True}):
            found[f"shared-{name}{'-abreast' * len(order)}"] = {
                "case": case, "config": {"balanced": False, "min_tiles": 1, **config}, **order
            }  # fmt: skip
    for width, cases in (("wide", WIDE), ("narrow", NARROW)):
        for name, case in cases.items():
            for cut in CUTS:
                kind = "balanced" if cut["balanced"] else cut["splits"]
                found[f"{width}-{name}-{kind}"] = {"case": case, "config": cut}
        for kind in (3, "balanced"):
            found[f"{width}-not_finite-{kind}"]["poison"] = math.inf
        entry = {"case": cases["pages_of_16"], "config": CUTS[1], "heads_first": True}
        found[f"{width}-heads_first"] = entry
    found["outweighed"] = {"case": OUTWEIGHED, "config": CUTS[1], "outweighs": True}
    return found


ENTRIES = _entries()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """What the model's programs left, one process for all of them."""
    entries = [{**e, "case": asdict(e["case"]) | {"dtype": None}} for e in ENTRIES.values()]
    script, folder = HERE / "decode_tall_model.py", tmp_path_factory.mktemp("model")
    return dict(zip(ENTRIES, results_of(script, entries, folder), strict=True))


def test_a_piece_adds_its_own_values_only(results):
    out, _ = results["outweighed"]
    assert out[0, -1, 0, 3] == math.inf


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "outweighed"])
def test_roles(results, name):
    entry = ENTRIES[name]
    assert not isinstance(results[name], str), results[name]
    call = build(entry["case"])
    if "poison" in entry:
        call.sequences[0][2][-1][0, 3] = entry["poison"]
    check(call, *results[name])


def _many_rows():
    call = build(CASES["pages_of_16"])
    return replace(call.problem, device="cuda", arch="sm_90", unaligned=())


def test_what_it_takes():
    problem = _many_rows()
    assert choose_decode(problem, 132).tall
    assert choose_decode(replace(problem, seqlen_q=64), 132).row_blocks == 2
    others = (
        {"seqlen_q": 2}, {"arch": "sm_80"}, {"head_dim": 96, "head_dim_v": 96}, {"page_size": 8},
        {"page_size": 48}, {"softcap": 1.0}, {"alibi": 1}, {"mask": Mask(100, 0)},
        {"leftpad": True}, {"kv_dtype": torch.float8_e4m3fn}, {"scale": -1.0},
        {"unaligned": ("v",)}, {"page_size": 20, "seqlen_k": 20}, {"page_size": 1, "seqlen_k": 1},
    )  # fmt: skip
    for other in others:
        assert not choose_decode(replace(problem, **other), 132).tall, other
    assert not choose_decode(problem, 132, is_aligned=False).tall
    assert choose_decode(replace(problem, page_size=90, seqlen_k=90), 132).tall
    assert choose_decode(replace(problem, num_splits=1), 132).tall
    # Rows of a head of K, by their columns.
    for dim, fewest, most in ((64, 9, 64), (128, 9, 256), (256, 1, 64)):
        for rows, is_tall in ((fewest - 1, False), (fewest, True), (most, True), (most + 1, False)):
            if 0 < rows <= 256:
                own = {"head_dim": dim, "head_dim_v": dim, "num_heads": 2, "seqlen_q": rows}
                found = choose_decode(replace(problem, **own), 132).tall
                assert found == is_tall, own
    assert not choose_decode(replace(problem, head_dim=256), 132).tall  # D_v is 128


#: The fastest of the cuts that were timed, see `decode_config._tall_costs`: D, heads of K, rows,
#: sequences, keys; pieces, K/V tiles in flight, programs on an SM for unequal lengths, shares.
CUT = {
    (128, 8, 64, 8, 8192): (2, 6, 1, 0),
    (128, 8, 64, 4, 4096): (4, 6, 1, 8),
    (128, 8, 64, 2, 8192): (8, 6, 1, 8),
    (128, 8, 64, 12, 4096): (1, 6, 1, 0),
    (128, 8, 64, 32, 4096): (1, 3, 2, 0),
    (128, 8, 64, 1, 32768): (16, 3, 1, 16),
    (128, 8, 128, 8, 8192): (2, 6, 1, 0),
    (128, 8, 128, 12, 4096): (1, 6, 1, 0),
    (128, 8, 128, 20, 4096): (2, 6, 1, 0),
    (128, 1, 64, 4, 32768): (32, 3, 1, 0),  # merged by a launch; 33 were timed
    (256, 8, 64, 1, 32768): (16, 3, 1, 16),
    (256, 8, 64, 4, 4096): (4, 3, 1, 8),
    (256, 8, 64, 12, 4096): (1, 3, 1, 0),
    (256, 8, 4, 8, 8192): (2, 3, 1, 0),
    (64, 8, 64, 1, 32768): (16, 6, 1, 16),
    (64, 8, 64, 4, 4096): (8, 6, 2, 8),
    (64, 8, 64, 32, 4096): (1, 6, 2, 0),
}


@pytest.mark.parametrize("call", CUT, ids=str)
def test_how_it_cuts(call):
    dim, kv_heads, rows, batch, seqlen_k = call
    problem = replace(_many_rows(), head_dim=dim, head_dim_v=dim, num_kv_heads=kv_heads,
                      num_heads=4 * kv_heads, seqlen_q=rows // 4, batch=batch, seqlen_k=seqlen_k,
                      tokens_q=batch * rows // 4)  # fmt: skip
    config = choose_decode(problem, 132)
    assert config.tall
    found = config.splits, config.num_stages, config.sm_pieces, config.shares
    assert found == CUT[call]
    assert config.balanced == (batch > 1 and config.splits <= 16)


@pytest.mark.parametrize("name", ["pages_of_16", "pages_of_256", "one_page", "dense"])
def test_rows_are_copied_whole_where_their_halves_lie_side_by_side(name):
    from onchip.kernels.portable import decode_tall
    from onchip.kernels.portable.decode_spec import decode_spec

    call = build(CASES[name])
    k = call.tensors.k
    apart = k.transpose(1, 2).contiguous().transpose(1, 2)  # head after head
    problem = replace(call.problem, device="cuda", arch="sm_90", unaligned=())
    spec = decode_spec(choose_decode(problem, 132), problem, call.tensors)
    joined = [decode_tall.tall_of(spec, keys).whole_rows for keys in ((k, k), (k, apart))]
    assert joined == [name.startswith("pages"), False]


def test_calls_of_more_rows_than_a_tile_go_to_the_forward():
    problem = replace(_many_rows(), seqlen_k=4096, seqlen_q=64, batch=32)
    chosen = (
        (32, 64, "hopper"), (2, 64, "hopper"), (1, 64, "decode"),  # 8 tiles, and 4
        (64, 32, "decode"), (128, 32, "hopper"), (128, 16, "decode"),  # 128 rows, and 64
    )  # fmt: skip
    for batch, seqlen_q, name in chosen:
        assert dispatch.choose(replace(problem, batch=batch, seqlen_q=seqlen_q)).name == name
    # What it does not put side by side, and what must be cut as it is told.
    assert dispatch.choose(replace(problem, num_heads=6)).name == "decode"
    assert dispatch.choose(replace(problem, num_splits=1)).name == "decode"


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_with_splits_given_neighbours_do_not_change_the_kernel(kv_dtype):
    problem = replace(_many_rows(), kv_dtype=kv_dtype, seqlen_q=40, seqlen_k=3008, num_splits=1)
    for batch in (1, 37, 500):
        assert dispatch.choose(replace(problem, batch=batch)).name == "decode"


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_how_it_cuts_does_not_change_how_a_sequence_is_added_up(batch):
    """With one split a sequence's bits do not depend on its neighbours."""
    problem = replace(_many_rows(), num_splits=1, seqlen_k=4096)
    alone, among = (choose_decode(replace(problem, batch=b), 132) for b in (1, batch))
    assert alone == among


COMPILED = [
    {"arch": "sm_90", "dim": 128, "features": name}
    for name in (
        "tall_64", "tall_128", "tall_pages_of_256", "tall_float16", "tall_balanced", "tall_blocks",
        "tall_two_pieces", "tall_two_pieces_64", "tall_shared", "tall_shared_128", "tall_shared_16",
    )
]  # fmt: skip
COMPILED += [
    {"arch": "sm_90", "dim": 256, "features": name}
    for name in (
        "tall_64",
        "tall_shared",
        "tall_shared_16",
        "tall_two_pieces_64",
        "tall_of_dense",
        "page_16",
    )
]
COMPILED += [
    {"arch": "sm_90", "dim": 64, "features": name}
    for name in ("tall_64", "tall_shared", "tall_balanced_64", "tall_of_dense")
]


def test_what_is_compiled_is_what_its_name_says():
    from tests.portable_decode_compiles import FEATURES, pose

    for case in COMPILED:
        name = case["features"]
        config = choose_decode(pose("sm_90", case["dim"], **FEATURES[name])[0], 132)
        assert config.tall, name
        assert config.shares > 0 or "shared" not in name, name
        assert config.splits == 2 or "two_pieces" not in name, name
        assert config.balanced or "balanced" not in name, name


def test_loads_beside_tma_are_found():
    sass = """
.L_x_1:
        /*0010*/ LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/ {} ;
        /*0030*/ @P0 BRA `(.L_x_1) ;
        /*0040*/ LDG.E R4, desc[UR4][R4.64] ;
    """
    assert compile_only.loads_beside_tma(sass.format("UTMALDG.5D [UR8], [UR4]")) == 1
    assert compile_only.loads_beside_tma(sass.format("NOP")) == -1


def test_it_compiles_and_no_products_wait_for_each_other():
    script = HERE / "portable_decode_compiles.py"
    found = compile_only.run_script(script, json.dumps(COMPILED))
    walks = [used for used in found if used["wgmma"]]
    assert len(walks) == len(COMPILED)
    for used in walks:
        print(used)
        assert used["warnings"] == [], used  # C7510 to C7514: wgmma is serialised
        assert used["scratch_on_barriers"] == [], used
        assert used["spill_bytes"] <= 160, used
        main = [walk for walk in used["walks"] if walk["instructions"] < 500]
        assert main and all(walk["spills"] == 0 for walk in main), used
        if used["features"] != "tall_blocks":  # without uniform registers they are 345
            most = 420 if used["dim"] == 256 else 320
            assert all(walk["instructions"] < most for walk in main), used
        # A producer that waits for page ids in its step waits before it asks for the tile.
        assert used["loads_beside_tma"] == 0, used
        assert used["shared_bytes"] <= 227 << 10 and used["tma_loads"] > 0, used
    small = walks[0]  # two on an SM
    assert small["registers"] <= 128 and small["shared_bytes"] + 1024 <= 114 << 10
