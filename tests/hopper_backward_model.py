"""Script: runs the Hopper backward's device code in `gluon_model`; prints JSON last."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

from tests import gluon_model

gluon_model.install()

import torch  # noqa: E402

from onchip.kernels.hopper import (  # noqa: E402
    backward_arguments,
    backward_kernels,
    backward_round,
    backward_sums,
    backward_table,
)
from onchip.kernels.hopper.backward_config import (  # noqa: E402
    BackwardConfig,
    choose_backward,
    padded,
)
from onchip.problem import Op  # noqa: E402
from tests.portable_backward_cases import check_gradients, saved_of  # noqa: E402
from tests.portable_cases import Case, build  # noqa: E402

backward_sums.tma_reduce_add = gluon_model.reduce_add
backward_sums.wait_turn = backward_round.wait_turn = gluon_model.wait_turn
SMS = 3


def _described(x, rows):
    return gluon_model.Descriptor(x, [1, 1, rows, 1, padded(x.shape[-1])])


def _statistics(problem, tensors, saved, unit):
    """-LSE in `unit` and -D, as the kernel before leaves them; NaN where nothing is written."""
    lines, width = backward_arguments.stats_shape(problem)
    stats, delta = torch.full((2, lines, width), math.nan)
    lse = saved.lse if tensors.cu_seqlens_q is None else saved.lse[None]
    d = (saved.dout.float() * saved.out.float()).sum(-1).transpose(-1, -2)
    if saved.dlse is not None:
        d = d - saved.dlse
    d = d if tensors.cu_seqlens_q is None else d[None]
    spans = [(0, problem.seqlen_q)] * problem.batch
    if tensors.cu_seqlens_q is not None:
        offsets = tensors.cu_seqlens_q.tolist()
        spans = list(zip(offsets, offsets[1:], strict=False))
    for b, (start, end) in enumerate(spans):
        for h in range(problem.num_heads):
            if tensors.cu_seqlens_q is None:
                line, first, own = b * problem.num_heads + h, 0, (lse[b, h], d[b, h])
            else:
                line, first = h, (start // 128 + b) * 128
                own = (lse[0, h, start:end], d[0, h, start:end])
            length = end - start
            last = first + -(-length // 128) * 128
            hidden = math.copysign(math.inf, -unit)
            stats[line, first:last], delta[line, first:last] = hidden, 0.0
            stats[line, first : first + length] = -own[0] * unit
            stats[line, first : first + length][own[0] == -math.inf] = hidden
            delta[line, first : first + length] = -own[1].where(own[0] > -math.inf, 0.0)
    return stats, delta


def _heads(problem, tensors):
    """Every head's unit, its line, first row and rows in the statistics, and where its dQ lies."""
    for b in range(problem.batch):
        for h in range(problem.num_heads):
            unit = b * problem.num_kv_heads + h // problem.group
            if tensors.cu_seqlens_q is None:
                line = b * problem.num_heads + h
                yield unit, (line, 0, problem.seqlen_q), (b, slice(None), h)
            else:
                start, end = tensors.cu_seqlens_q[b : b + 2].tolist()
                yield unit, (h, (start // 128 + b) * 128, end - start), (slice(start, end), h)


def gradients(config, problem, tensors, saved):
    """dq, dk, dv of the device code; CTAs run in turn, or at once where they wait for others."""
    lse_unit = backward_arguments.LOG2E
    if backward_arguments.starts_at_lse(config, problem):
        lse_unit = 1 / problem.scale
    stats, delta = _statistics(problem, tensors, saved, lse_unit)
    q, k, v, dout = tensors.q, tensors.k, tensors.v, saved.dout
    zeros = problem.layout_q.value == "packed"
    dq, dk, dv = (torch.full_like(x, 0 if zeros else math.nan) for x in (q, k, v))
    lengths = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    cu_seqlens = [None if x is None else gluon_model.Pointer(x) for x in lengths]
    spec = backward_arguments.spec_of(config, problem, "keys", SMS)
    if spec.fours:
        eights = [x.view(-1, 2, 4, 2).transpose(1, 2) for x in (stats, delta)]
        stats, delta = (x.reshape(stats.shape) for x in eights)
    units, lag = backward_arguments.units_of(config, problem)
    ctas = backward_arguments.num_key_tiles(config, problem)
    numbers = backward_arguments.numbers_of(config, problem, sms=SMS)
    programs = backward_arguments.num_programs(config, problem, SMS)
    run = gluon_model.launch
    shared = [None] * 4
    if spec.pieces > 1:
        tiles = units * ctas - backward_arguments.num_whole(config, problem, SMS)
        sums = torch.full((tiles * 2 * spec.pieces * 64 * (spec.dim + spec.dim_v),), math.nan)
        reached = torch.zeros(2 * tiles, dtype=torch.int64)
        shared = [gluon_model.Pointer(x) for x in (sums, reached, dk, dv)]
    if spec.ordered:
        run = gluon_model.launch_abreast
    if spec.persistent:
        table = backward_table.schedule(config, problem, spec, SMS)
        pointer = gluon_model.Pointer(torch.tensor(table).flatten())
        numbers = backward_arguments.numbers_of(config, problem, pointer, len(table[0]))
        programs, run = len(table), gluon_model.launch_abreast
    dq_sum = torch.full((*stats.shape, spec.dim), math.nan)
    heads = list(_heads(problem, tensors))
    for unit, (line, first, rows), _ in heads:
        if unit < lag:  # the launch before clears the sums of the first units
            dq_sum[line, first : first + -(-rows // 128) * 128] = 0.0
    dq_sum = dq_sum.flatten(0, 1)
    counters = torch.zeros(units + stats.numel() // 64, dtype=torch.int64)
    counters[:lag] = ctas
    sources = [_described(x, 64) for x in (q, k, v, dout)]
    lines = [gluon_model.Descriptor(x.view(-1), [64]) for x in (stats, delta)]
    summed = None if config.apart else gluon_model.Descriptor(dq_sum, [64, 64])
    out = None if config.apart else gluon_model.Pointer(dq)
    run(backward_kernels.attn_bwd_keys_hopper, programs, *sources, *lines, summed, out,
        _described(dk, 64), _described(dv, 64), gluon_model.Pointer(counters), *shared,
        *cu_seqlens, *numbers, spec)  # fmt: skip
    if config.apart:
        spec = backward_arguments.spec_of(config, problem, "queries")
        programs = -(-problem.seqlen_q // spec.block_m) * problem.batch * problem.num_heads
        pointers = [gluon_model.Pointer(x) for x in (stats, delta)]
        gluon_model.launch(backward_kernels.attn_bwd_queries_hopper, programs, *sources, *pointers,
            _described(dq, 64), *cu_seqlens, *numbers, spec)  # fmt: skip
        return dq, dk, dv
    total = dq_sum.view(*stats.shape, -1, 2, 4).transpose(-1, -2).flatten(-3)
    total = total[..., : problem.head_dim] * problem.scale
    for unit, (line, first, rows), place in heads:
        if unit >= units - lag:  # the launch behind rounds those of the last units
            dq[place] = total[line, first : first + rows]
    return dq, dk, dv


def check(case: Case, config: BackwardConfig | None, deterministic: bool, seed: int) -> str:
    """What is wrong with the case's gradients; empty if nothing is."""
    call = build(case, seed=seed)
    saved = saved_of(call, with_dlse=seed == 0)
    problem = replace(call.problem, op=Op.BACKWARD, deterministic=deterministic)
    call.tensors.sinks = None if not case.sinks else call.tensors.sinks
    try:
        found = gradients(config or choose_backward(problem), problem, call.tensors, saved)
        sinks, call.tensors.sinks = call.tensors.sinks, None
        if sinks is None:
            check_gradients(call, saved, (*found, None))
    except (AssertionError, gluon_model.Deadlock) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


if __name__ == "__main__":
    out = []
    for entry in json.loads(sys.argv[1]):
        fields = dict(entry)
        own = fields.pop("config", None)
        deterministic = fields.pop("deterministic", False)
        case = Case(**{n: tuple(x) if isinstance(x, list) else x for n, x in fields.items()})
        config = None if own is None else BackwardConfig(**own)
        out.append(entry | {"wrong": check(case, config, deterministic, len(out) % 2)})
    print(json.dumps(out))
