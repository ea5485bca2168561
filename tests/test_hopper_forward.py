"""The Hopper forward without a GPU: its roles in a model of Gluon, its repair in the interpreter.

The model reads operands and stores tiles as late as the hardware may, and shared memory begins as
NaN: a slot that is handed back too early, an arrival too many or one that is missing shows.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onchip import dispatch
from onchip.kernels.hopper import arguments, repair, repeated, workspace
from onchip.kernels.hopper.config import Config, choose_forward, most_pieces
from onchip.problem import Layout, Mask
from tests.model_runs import results_of
from tests.portable_cases import Case, build, check

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
HERE = Path(__file__).parent

CASES = {
    "full": Case((128, 128), (256, 256), heads=4, kv_heads=2),
    "tails": Case((100,), (211,), heads=2, kv_heads=2),
    "causal": Case((200,), (200,), causal=True),
    "causal_aligned": Case((192, 192), (256, 256), causal=True),
    "causal_square": Case((384, 384), (384, 384), heads=4, causal=True),
    "causal_one_row": Case((1, 1), (337, 337), heads=4, causal=True),
    "more_keys": Case((150,), (377,), causal=True),
    "more_queries": Case((377,), (150,), causal=True),
    "right": Case((300,), (333,), window=(-1, 90)),
    "window": Case((250,), (400,), window=(130, 70)),
    "window_square": Case((300,), (300,), window=(90, 0)),
    "window_beyond_tile": Case((240,), (240,), window=(60, 128)),
    "window_left": Case((250,), (300,), window=(33, -1)),
    "window_diagonal": Case((200,), (261,), window=(0, 0)),
    "window_beyond": Case((300,), (20,), window=(4, 3)),
    "softcap": Case((150,), (170,), softcap=5.0, causal=True),
    "terms": Case((200,), (270,), alibi=1, softcap=10.0, sinks=True, window=(150, 40)),
    "terms_square": Case((200,), (200,), alibi=1, softcap=10.0, sinks=True, causal=True),
    "alibi_batch": Case((100, 100), (170, 170), alibi=2, causal=True),
    "sinks_no_keys": Case((200,), (60,), sinks=True, causal=True),
    "packed": Case((133, 0, 5, 70), (100, 9, 0, 240), packed=True),
    "packed_causal": Case((133, 1, 250), (200, 7, 250), heads=4, packed=True, causal=True),
    "packed_window": Case((133, 1, 200), (200, 7, 100), packed=True, window=(50, 20), alibi=2),
    "packed_used": Case((70, 130), (100, 190), packed=True, used=True, causal=True),
    "dense_used": Case((70, 70), (150, 40), used=True, window=(90, 20)),
    "pages_of_16": Case((70, 3), (137, 70), page=16, packed=True, causal=True),
    "pages_of_64": Case((70, 70), (130, 20), page=64, window=(60, 0)),
    "pages_of_128": Case((70, 10), (140, 129), page=128, packed=True, causal=True),
    "pages_of_256": Case((20, 20), (300, 256), page=256, causal=True, sinks=True),
    "one_page": Case((30, 30), (77, 90), page=90, causal=True),
}
# Hidden keys of these are NaN: their repair takes the interpreter seconds, and more at wide heads.
LEAKY = ("packed_used", "dense_used", "one_page", *(n for n in CASES if n.startswith("pages")))
WIDE = tuple(n for n in CASES if n not in LEAKY)
SOME = ("causal_square", "window_square", "tails", "more_keys", "window", "packed_causal", "terms")
DIMS = {(64, 64): tuple(CASES), (128, 128): (*SOME, "full", "causal", "more_queries"),
        (256, 256): WIDE, (192, 128): SOME, (80, 40): SOME}  # fmt: skip
SUMMED = {
    # Row 64's last key is the last of a tile: the edge stands between tiles.
    "edge": Case((200,), (301,), window=(-1, 90)),
    "sinks_long": Case((70,), (400,), heads=1, sinks=True),
    "causal_long": Case((70, 70), (500, 500), heads=1, causal=True),
}
# Factors on the first keys: base 2 logits of up to 50, which bases follow, and of over 128.
MOVING, OVERFLOWING = 12.0, 60.0
GROUPS_OF_4 = {"heads": 8, "kv_heads": 2}
GROUPED = {
    "pages_of_16": Case((20,) * 4, (350, 37, 0, 1), page=16, causal=True, **GROUPS_OF_4),
    "pages_of_64": Case((70, 70), (150, 40), page=64, **GROUPS_OF_4),
    "window": Case((40, 40), (500, 300), page=128, window=(130, 3), **GROUPS_OF_4),
    "packed": Case((20, 0, 7, 64), (350, 9, 80, 90), packed=True, causal=True, **GROUPS_OF_4),
    "packed_pages": Case((7, 64, 1), (350, 40, 80), page=16, packed=True, causal=True, heads=16,
                         kv_heads=2),
    "dense": Case((100, 100), (200, 200), causal=True, heads=4, kv_heads=2),
    "sinks": Case((33, 33), (250, 40), used=True, causal=True, sinks=True, heads=16),
    "softcap": Case((9,), (250,), softcap=5.0, window=(100, -1), heads=64, kv_heads=1),
    # More sequences than a warp has lanes, out of order, some of one length; and all of about one.
    "order": Case((2,) * 37, (20, 0, 300, 7, 150, 150, 1, 64, 128, 129, 90) * 3 + (3, 200, 5, 260),
                  page=16, causal=True, heads=4, kv_heads=2),
    "order_alike": Case((5,) * 5, (90, 100, 95, 80, 99), used=True, **GROUPS_OF_4),
    "order_heads": Case((130, 130, 130), (40, 400, 150), used=True, causal=True, heads=2),
}  # fmt: skip
# CTAs among which tiles are so few that sequences are taken in the order of their keys.
ORDERED = {"order": 12, "order_alike": 3, "order_heads": 3}
# Few sequences, whose keys are cut into pieces: the case, and CTAs to be kept busy.
PIECES = {
    "two": (Case((20,), (1100,), page=16, causal=True, **GROUPS_OF_4), 4),
    "several": (Case((20, 20), (1250, 300), page=64, causal=True, **GROUPS_OF_4), 20),
    "empty": (Case((9,) * 3, (900, 0, 100), page=16, causal=True, sinks=True, heads=16), 30),
    "packed": (Case((20, 0, 7), (1300, 9, 600), packed=True, causal=True, **GROUPS_OF_4), 30),
    "full": (Case((40,), (1100,), used=True, heads=8, kv_heads=1), 30),
    "dense": (Case((100,), (1000,), causal=True, heads=4, kv_heads=2), 20),
    # Without a value that is not finite nothing is made again.
    "finite": (Case((20, 20), (900, 900), causal=True, heads=16), 20),
    "finite_pairs": (Case((20, 20), (900, 900), causal=True, heads=16), 12),
    "sixteen": (Case((16,), (4200,), page=16, causal=True, **GROUPS_OF_4), 40),
    # Heads of a group that do not fill a tile together, or more queries than one holds.
    "apart": (Case((130,), (700,), causal=True, heads=3, kv_heads=1), 20),
    "apart_full": (Case((40,), (900,), page=16, heads=2), 12),
    "chunk": (Case((128,), (900,), page=64, causal=True, heads=4, kv_heads=2), 16),
    "rising": (Case((20,), (1500,), causal=True, **GROUPS_OF_4), 20),
}
POISONED = Case((170,), (170,), heads=1, causal=True)


def _entries() -> list[dict]:
    found = []
    for (dim, dim_v), names in DIMS.items():
        for name in names:
            case = replace(CASES[name], dim=dim, dim_v=dim_v, dtype=torch.float16)
            found.append({"name": f"{name}-{dim}-{dim_v}", "case": case})
    groups = {64: ("packed_pages", "window"), 128: tuple(GROUPED), 256: ("packed",)}
    for dim, names in groups.items():
        for name in names:
            case = replace(GROUPED[name], dim=dim, dim_v=dim)
            entry = {"name": f"grouped-{name}-{dim}", "case": case}
            found.append(entry | {"programs": ORDERED[name]} if name in ORDERED else entry)
    for name, (case, programs) in PIECES.items():
        entry = {"case": replace(case, dim=128, dim_v=128), "programs": programs}
        found.append(entry | {"name": f"pieces-{name}"})
    config = asdict(choose_forward(build(found[-1]["case"]).problem))
    found[-1] |= {"config": config, "rise": OVERFLOWING}
    for name, delay in itertools.product(("two", "full", "apart_full"), (0.0, 0.3)):
        entry = next(x for x in found if x["name"] == f"pieces-{name}")
        found.append(entry | {"name": f"abreast-{name}-{delay}", "delay": delay})
    for poison in (float("nan"), float("inf"), float("-inf")):
        case = replace(POISONED, dim=64, dim_v=64, dtype=torch.float16)
        found.append({"name": f"{poison}", "case": case, "poison": poison})
    # Logits that rise so far that bases move, or that sums overflow.
    for dim, name, rise in (
        (64, "full", OVERFLOWING), (64, "causal", OVERFLOWING), (64, "causal_long", OVERFLOWING),
        (64, "sinks_long", OVERFLOWING), (64, "full", MOVING), (64, "causal_long", MOVING),
        (64, "sinks_long", MOVING), (128, "more_keys", MOVING), (256, "full", MOVING),
        (256, "window", MOVING), (64, "edge", 1.0),
    ):  # fmt: skip
        case = replace(SUMMED.get(name) or CASES[name], dim=dim, dim_v=dim, dtype=torch.float16)
        config = asdict(choose_forward(build(case).problem))
        entry = {"name": f"{name}-{dim}-{rise}", "case": case, "config": config, "rise": rise}
        found.append(entry)
    # Bases that lag, which bfloat16 has and float16 can test.
    for dim, name, rise in (
        (64, "full", OVERFLOWING), (64, "causal", OVERFLOWING), (64, "causal_long", OVERFLOWING),
        (64, "sinks_long", OVERFLOWING), (64, "more_keys", 1.0), (128, "full", 1.0),
        (128, "packed_causal", 1.0), (64, "edge", 1.0), (256, "window", 1.0),
    ):  # fmt: skip
        case = replace(SUMMED.get(name) or CASES[name], dim=dim, dim_v=dim, dtype=torch.float16)
        config = asdict(replace(choose_forward(build(case).problem), lags=True))
        entry = {"name": f"lags-{name}-{dim}", "case": case, "config": config, "rise": rise}
        found.append(entry)
    # Two blocks of rows that lie apart: one warpgroup passes over several K/V tiles.
    for dim, length in ((64, 64), (64, 200), (64, 1000), (128, 650)):
        case = Case((length,), (length,), heads=2, causal=True, dim=dim, dim_v=dim)
        chosen = choose_forward(build(case).problem)
        config = asdict(replace(chosen, grouped=False, folded=True, turns=False))
        name = f"folded-{length}-{dim}"
        found.append({"name": name, "case": case, "config": config, "rise": 1.0, "programs": 99})
    return found


ENTRIES = {entry["name"]: entry for entry in _entries()}


def _plain(case: Case) -> dict:
    fields = vars(case).copy()
    del fields["dtype"]  # float16 is the default
    return fields


@pytest.fixture(scope="module")
def modelled(tmp_path_factory) -> dict:
    """What the roles wrote, case by case: (out, lse, counters), or what went wrong."""
    entries = [entry | {"case": _plain(entry["case"])} for entry in ENTRIES.values()]
    script, folder = HERE / "hopper_forward_model.py", tmp_path_factory.mktemp("model")
    return dict(zip(ENTRIES, results_of(script, entries, folder), strict=True))


def _repair(call, config, out, lse, counters) -> None:
    """The launch behind a forward that may leak. Mutates: out, lse, counters."""
    problem = call.problem
    code = arguments.code_of(config, problem)
    if not code.may_leak:
        return
    stride = arguments.stride_of(call.tensors.block_table)
    numbers = (*arguments.factors_of(problem), stride, *arguments.sizes_of(code, problem))
    forward = arguments.Resolved(problem, None, [], numbers, code)
    t = call.tensors
    repair.resolve_repair(problem, forward, t)
    optional = (*arguments.lengths_of(t), t.alibi_slopes, t.sinks, None)
    _, (_, values) = forward.calls([], (t.q, t.k, t.v, out, lse, counters, *optional))
    repair.attn_repair_hopper[(2,)](*values)
    assert counters.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ENTRIES)
def test_roles_and_repair_give_the_oracles_result(modelled, name, monkeypatch):
    for control in ("gdc_launch_dependents", "gdc_wait"):
        monkeypatch.setattr(repair, control, lambda: None)
    found, entry = modelled[name], ENTRIES[name]
    assert not isinstance(found, str), found
    call = build(entry["case"])
    if "poison" in entry:
        for x in (call.tensors.v[0], call.sequences[0][2]):
            x[30, 0, 3] = x[155, 0] = entry["poison"]
    config = choose_forward(call.problem)
    if "config" in entry:
        config = Config(**entry["config"])
        raise_keys(call, entry["rise"])
    out, lse, counters = found
    if "rise" in entry:
        assert counters[1] == (entry["rise"] == OVERFLOWING)
    _repair(call, config, out, lse, counters)
    check(call, out, lse)


def raise_keys(call, rise: float) -> None:
    """As in the model. Mutates: call."""
    for x in (call.tensors.k[0], call.sequences[0][1]):
        x[:40] *= rise


class FakeLaunch:
    """A launch that is resolved and notes what it is asked for."""

    is_resolved = is_direct = has_direct_way = True
    stream = 0

    def __init__(self, *args, **options):
        self.replayed: list = []
        self.num_prepared = 0

    def prepared(self, *args):
        self.num_prepared += 1
        return lambda *values: self.replayed.append(list(values)), args


def _resolved(call, out):
    return arguments.resolved_of(None, None, call.problem, call.tensors, out)


def _addresses(start: int) -> tuple[int, ...]:
    """Of q, k, v, out, lse and counters; no lengths, no terms, no pieces."""
    return (*range(start, start + 6), *[0] * 7)


def test_a_call_is_prepared_anew_until_its_addresses_have_come_twice(monkeypatch):
    monkeypatch.setattr(arguments, "Launch", FakeLaunch)
    call = build(Case((70,), (70,), dim=64, dim_v=64, causal=True))
    tensors, out = call.tensors, torch.empty_like(call.tensors.q)
    found = _resolved(call, out)
    assert _resolved(call, out) is found
    found.described(tensors.q, tensors.k, tensors.v, out)
    assert found._first is None  # the first call's tensors are not kept alive
    assert not found.is_ready  # the repair was never launched
    found.repair, found.repair_numbers = FakeLaunch(), (7, 8)
    assert found.is_ready
    for start, prepared in ((16, 1), (32, 2), (16, 3), (16, 3), (32, 4), (32, 4)):
        assert found.launch_at(_addresses(start))
        assert found.launch.num_prepared == prepared
    described = found.launch.replayed[-1][:4]
    assert [x.base.data_ptr() for x in described] == [32, 33, 34, 35]
    assert found.launch.replayed[-1][4:13] == [35, 36, 37, 37, 37, 37, 37, 36, 36]
    assert found.repair.replayed[-1] == [*range(32, 38), 37, 37, 37, 37, 36, 36, 7, 8]
    for start in range(1000):  # memory stays bounded
        found.launch_at(_addresses(16 * start))
    assert len(found._seen) <= arguments._MAX_CALLS


def test_a_repeated_call_has_outputs_of_its_own(monkeypatch):
    monkeypatch.setattr(arguments, "Launch", FakeLaunch)
    call = build(Case((70, 70), (70, 70), dim=64, dim_v=64))
    found = _resolved(call, torch.empty_like(call.tensors.q))
    found.repair, found.repair_numbers = FakeLaunch(), (7, 8)
    again = repeated.Repeated(found, torch.empty_like(call.tensors.q), True)
    assert again.is_ready
    q = call.tensors.q
    out, lse = again(q, (16, 32, 48, *[None] * 8))
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert lse is not None and lse.shape == (2, q.shape[2], 70) and lse.dtype == torch.float32
    launched = found.launch.replayed[-1]
    assert [x.base.data_ptr() for x in launched[:4]] == [16, 32, 48, out.data_ptr()]
    assert launched[4:6] == [out.data_ptr(), lse.data_ptr()]
    assert repeated.Repeated(found, out, False)(q, (16, 32, 48, *[None] * 8))[1] is None


def test_calls_that_mean_something_else_share_no_launch(monkeypatch):
    monkeypatch.setattr(arguments, "Launch", FakeLaunch)
    monkeypatch.setattr(arguments, "_kept", {})
    case = Case((70, 20), (70, 30), dim=64, dim_v=64, packed=True, used=True, sinks=True)
    call = build(case)
    out = torch.empty_like(call.tensors.q)
    found = {_resolved(call, out)}
    wide = torch.empty(90, 3, 64, dtype=torch.float16)[:, :2]
    for name, other in (
        ("q", wide.copy_(call.tensors.q)),
        ("k", torch.empty(call.tensors.k.shape[0] + 5, *call.tensors.k.shape[1:]).half()),
        ("sinks", call.tensors.sinks.half()),
        ("seqused_k", call.tensors.seqused_k.long()),
    ):
        given = getattr(call.tensors, name)
        setattr(call.tensors, name, other)
        found.add(_resolved(call, out))
        setattr(call.tensors, name, given)
    found.add(_resolved(replace(call, problem=replace(call.problem, scale=0.5)), out))
    assert len(found) == 6


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        (Case((300,), (300,), causal=True), (64, 128)),
        (Case((300,), (556,), window=(90, 0)), (64, 128)),
        (Case((300,), (364,), causal=True), (128, 128)),
        (Case((300,), (300,), window=(90, 64)), (128, 128)),
        (Case((300,), (300,), window=(90, 128)), (128, 128)),
        (Case((300,), (300,)), (128, 128)),
        (Case((300,), (300,), packed=True, causal=True), (128, 128)),
    ],
    ids=str,
)
def test_the_first_warpgroup_multiplies_the_keys_of_the_last_tile_that_it_sees(case, keys):
    problem = build(replace(case, dim=128, dim_v=128)).problem
    assert arguments.code_for(choose_forward(problem), problem, 1).last_keys == keys


def _few_queries(**changes):
    case = Case((64,), (4096,), page=16, causal=True, heads=16, kv_heads=2, dim=128, dim_v=128)
    return replace(build(case).problem, **{"num_heads": 64, "num_kv_heads": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({"seqlen_k": 32768}, 4),
        ({"seqlen_k": 32768, "seqlen_q": 32}, 8),
        ({"seqlen_k": 16384, "seqlen_q": 16, "batch": 8}, 2),
        ({"seqlen_k": 32768, "seqlen_q": 8}, 16),
        ({"seqlen_k": 32768, "seqlen_q": 128}, 2),
        ({"batch": 32}, 1),
        ({"seqlen_k": 256}, 1),
        ({"seqlen_k": 32768, "mask": Mask(1000, 0)}, 1),
        ({"seqlen_k": 32768, "num_splits": 1}, 1),  # no matter how many neighbours
        ({"seqlen_k": 131072, "seqlen_q": 96, "batch": 64}, 1),  # 23 waves without
    ],
    ids=str,
)
def test_keys_of_few_tiles_are_cut(changes, pieces):
    problem = _few_queries(**changes)
    config = choose_forward(problem)
    assert config.grouped
    assert most_pieces(config, problem, 132) == pieces
    code = arguments.code_for(config, problem, 132)
    assert code.in_pieces == (pieces > 1) and bool(code.waits) == (pieces > 1)


@pytest.mark.parametrize(
    ("changes", "sorts"),
    [
        ({"seqlen_q": 16, "batch": 32}, True),
        ({"seqlen_q": 16, "batch": 128}, True),  # 7.8 tiles a CTA
        ({"seqlen_q": 16, "batch": 129}, False),
        ({"seqlen_q": 16, "batch": 128, "num_kv_heads": 16, "num_heads": 128}, False),
        ({"seqlen_q": 16, "batch": 16}, False),  # all at a time
        ({"seqlen_q": 17, "batch": 32}, True),  # two tiles a group
        ({"seqlen_q": 17, "batch": 64}, False),
        ({"seqlen_q": 16, "batch": 32, "seqused_k": False}, False),
        ({"seqlen_q": 16, "batch": 32, "mask": Mask(1000, 0)}, False),
        ({"seqlen_q": 16, "batch": 32, "layout_q": Layout.PACKED}, False),
    ],
    ids=str,
)
def test_which_calls_take_sequences_in_the_order_of_their_keys(changes, sorts):
    problem = _few_queries(**{"seqused_k": True, **changes})
    code = arguments.code_for(choose_forward(problem), problem, 132)
    assert (code.sorts > 0) == sorts and not code.in_pieces


@pytest.mark.parametrize("name", ORDERED)
def test_the_models_cases_have_an_order(name):
    """`hopper_forward_model` holds the order itself to a sorted list."""
    problem = build(replace(GROUPED[name], dim=128, dim_v=128)).problem
    assert arguments.code_for(choose_forward(problem), problem, ORDERED[name]).sorts > 0


def test_which_calls_have_the_heads_of_a_group_side_by_side():
    assert choose_forward(_few_queries()).grouped
    assert choose_forward(_few_queries(seqlen_q=256, num_heads=32)).grouped  # few tiles
    for other in ({"seqlen_q": 128, "batch": 2}, {"num_heads": 24}, {"num_heads": 8}, {"alibi": 1},
                  {"head_dim": 192}):  # fmt: skip
        assert not choose_forward(_few_queries(**other)).grouped, other


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"seqlen_k": 32768, "num_heads": 32}, "hopper"),  # 256 rows
        ({"batch": 4, "num_heads": 32}, "decode"),  # cut in two, and short
        ({"batch": 4, "num_heads": 32, "seqlen_k": 8192}, "hopper"),
        ({"batch": 5, "num_heads": 32, "seqlen_k": 8192}, "decode"),  # 80 CTAs
        ({"num_heads": 8, "num_kv_heads": 2, "seqlen_k": 32768}, "decode"),  # 64 CTAs
        ({"seqlen_q": 16, "seqlen_k": 32768}, "decode"),  # 128 rows
        ({"seqlen_q": 16, "batch": 32}, "hopper"),
        ({"seqlen_q": 16, "seqlen_k": 32768, "head_dim": 64, "head_dim_v": 64}, "hopper"),
        ({"seqlen_q": 8, "seqlen_k": 32768, "head_dim": 64, "head_dim_v": 64}, "decode"),
        ({"seqlen_q": 8, "seqlen_k": 32768, "head_dim": 256, "head_dim_v": 256}, "decode"),
        ({"seqlen_q": 16, "seqlen_k": 32768, "head_dim": 256, "head_dim_v": 256}, "hopper"),
        ({"seqlen_q": 2, "seqlen_k": 32768, "head_dim": 256, "head_dim_v": 256}, "decode"),
        ({"num_heads": 8, "head_dim": 256, "head_dim_v": 256}, "decode"),
        ({"num_heads": 8, "head_dim": 256, "head_dim_v": 256, "softcap": 9.0}, "hopper"),
        ({"num_heads": 8, "head_dim": 256, "head_dim_v": 256, "alibi": 1}, "decode"),
        ({"seqlen_q": 4, "num_kv_heads": 1, "head_dim": 256, "head_dim_v": 256}, "decode"),
        # The forward takes multiples of 8.
        ({"head_dim": 100, "head_dim_v": 100, "seqlen_q": 16, "seqlen_k": 32768}, "decode"),
        ({"head_dim": 64, "head_dim_v": 64, "num_heads": 32, "seqlen_k": 1024}, "decode"),
        ({"num_heads": 8}, "decode"),
        ({"seqlen_k": 32768, "num_heads": 32, "num_splits": 1}, "decode"),
        ({"seqlen_k": 32768, "num_heads": 32, "mask": Mask(1000, 0)}, "decode"),
    ],
    ids=str,
)
def test_which_calls_of_few_queries_it_takes(changes, kernel):
    problem = replace(_few_queries(**changes), device="cuda", arch="sm_90", seqused_k=True)
    assert dispatch.choose(problem).name == kernel


def test_a_stream_outgrows_less_memory_than_it_has(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch, "empty", lambda size, **_: empty(size, device="meta"))
    monkeypatch.setattr(workspace, "_floats", {})
    device = torch.device("cuda", 0)
    found = {id(x): x for x in (workspace.floats(device, 1000 * n) for n in range(1, 101))}
    sizes = sorted(len(x) for x in found.values())
    assert sizes[-1] >= 100_000 and sum(sizes[:-1]) < sizes[-1]
    assert workspace.floats(device, 5) is workspace.floats(device, 100_000)
