"""The decode of one query without a GPU: its programs in torch, in place of Gluon.

An append in the attention's own launch leaves the bits that two launches leave, and reads nothing
where memory holds no token yet: all of that is NaN here.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onchip.kernels.portable.decode_spec import appends_itself
from tests import portable_decode_compiles as compiles
from tests.model_runs import results_of
from tests.portable_cases import Case, build, check

HERE = Path(__file__).parent
GQA = {"heads": 8, "kv_heads": 2, "dim": 128, "dim_v": 128, "causal": True}
SMALL = {"heads": 3, "kv_heads": 1, "dim": 64, "dim_v": 64, "causal": True}
CASES = {
    "pages_of_16": Case((1,) * 6, (350, 64, 65, 1, 130, 16), page=16, **GQA),
    "pages_of_1": Case((1,) * 3, (70, 1, 65), page=1, **SMALL),
    "pages_of_3": Case((1,) * 3, (100, 64, 2), page=3, **SMALL),
    "pages_of_256": Case((1,) * 3, (300, 257, 65), page=256, **SMALL),
    "dense": Case((1,) * 3, (350, 170, 1), used=True, **GQA),
    "leftpad": Case((1,) * 3, (350, 170, 90), used=True, first=(190, 3, 80), **GQA),
    "window": Case((1,) * 4, (310, 65, 1, 90), page=16, **SMALL, window=(70, 0)),
    "window_of_one": Case((1,) * 3, (130, 65, 1), page=3, **SMALL, window=(0, 0)),
    "sinks": Case((1,) * 3, (90, 1, 64), page=16, sinks=True, **GQA),
    "one": Case((1,), (500,), page=16, **GQA),
}
CUTS = {
    "whole": {"splits": 1, "balanced": False},
    "five": {"splits": 5, "balanced": False, "min_tiles": 1},
    "balanced": {"splits": 2, "balanced": True, "min_tiles": 1},
}
NEW = {"pairs": 0, "interleaved": False, "spoilt": False}
TURNED = NEW | {"pairs": 32}
MORE = {
    "some_features": ("pages_of_16", "five", NEW | {"pairs": 20}),
    "interleaved": ("pages_of_16", "five", NEW | {"pairs": 64, "interleaved": True}),
    "all_features": ("one", "five", NEW | {"pairs": 64}),
}
#: Batches whose last sequence is padding: its page, or its row of a dense cache, is -1.
PADDED = {
    "padded_pages": Case((1,) * 3, (100, 64, 1), page=3, **SMALL),
    "padded_page": Case((1,) * 2, (50, 1), page=64, **SMALL),
    "padded_rows": Case((1,) * 3, (350, 170, 1), used=True, **GQA),
}


def _entries() -> dict[str, dict]:
    found = {}
    for name, case in CASES.items():
        for cut, config in CUTS.items():
            entry = {"case": case, "config": config, "dtype": "bfloat16"}
            found[f"{name}-{cut}"] = entry
            found[f"{name}-{cut}-append"] = entry | {"new": NEW if cut == "whole" else TURNED}
    for name, (case, cut, new) in MORE.items():
        found[name] = {"case": CASES[case], "config": CUTS[cut], "dtype": "float16", "new": new}
    for name, case in PADDED.items():
        new = TURNED | {"spoilt": True}
        found[name] = {"case": case, "config": CUTS["whole"], "dtype": "float16", "new": new}
    return found


ENTRIES = _entries()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """What the model's programs left, one process for all of them."""
    entries = [{**e, "case": asdict(e["case"]) | {"dtype": None}} for e in ENTRIES.values()]
    script, folder = HERE / "decode_direct_model.py", tmp_path_factory.mktemp("model")
    return dict(zip(ENTRIES, results_of(script, entries, folder, seconds=600), strict=True))


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if "new" not in entry])
def test_walk(results, name):
    entry, found = ENTRIES[name], results[name]
    assert isinstance(found, dict), found
    check(build(replace(entry["case"], dtype=getattr(torch, entry["dtype"]))), *found["got"])


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if "new" in entry])
def test_one_launch_leaves_the_bits_of_two(results, name):
    found, spoilt = results[name], ENTRIES[name]["new"]["spoilt"]
    assert isinstance(found, dict), found
    for got, wanted in zip(found["got"], found["wanted"], strict=True):
        assert not got.isnan().any()
        # A token that is not stored is attended to all the same.
        assert torch.equal(got[:-1], wanted[:-1]) if spoilt else torch.equal(got, wanted)
    for got, wanted in zip(found["caches"], found["wanted_caches"], strict=True):
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


def _posed(**changes):
    """A call with one new token, some of it changed, as if on an H200."""
    features = {"dim": 128, "batch": 2, **changes.pop("pose", {})}
    problem, tensors = compiles.pose("sm_90", **features)
    new = compiles.appended(tensors, pairs=64)
    return problem, tensors, replace(new, **changes)


def test_what_appends_itself():
    new = _posed()[2]
    wide = torch.empty(2, 1, 24, 128, dtype=torch.bfloat16, device="meta")
    other = wide.new_empty(new.v_cache.numel() + 8)[8:].view(new.v_cache.shape)
    # On the meta device nothing has an address; caches in one place are told from others.
    assert not appends_itself(*_posed())
    for given in (
        {"v_cache": other},
        {"v_cache": other, "k": wide[:, :, :8], "v": wide[:, :, 8:16]},
        {"v_cache": other, "rotary_cos": None, "rotary_sin": None},
        {"v_cache": other, "pose": {"dim": 64}},
        {"v_cache": other, "pose": {"window": (100, 0), "batch": 64}},
    ):
        assert appends_itself(*_posed(**given)), given
    float8 = {"kv_dtype": torch.float8_e4m3fn}
    two = wide.new_empty(2, 2, 8, 128)
    for given in (
        {"pose": {"seqlen_q": 2}},
        {"pose": float8},
        {"pose": {"dim": 80}},
        {"pose": {"heads": 64, "kv_heads": 4}},
        {"pose": {"softcap": 3.0}},
        {"k": two, "v": two},
        {"slot_mapping": wide.new_empty(2, dtype=torch.int32)},
        {"k": wide.new_empty(2, 1, 8, 129)[..., :128]},
        {"k": wide.new_empty(2, 1, 8, 256)[..., ::2]},
        {"rotary_cos": wide.new_empty(64, 4096).T},
        {"k": wide.new_empty(2, 1, 8, 128, dtype=torch.float16)},
    ):
        assert not appends_itself(*_posed(v_cache=other, **given)), given
