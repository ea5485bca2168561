"""Named barriers of the Hopper kernels, beside the mbarriers that Gluon has.

An mbarrier's arrival by a warpgroup costs a barrier among its threads and an election; a named
barrier is one instruction a thread. Ids below 6 are Triton's (3.6 uses 0 to 3). From 6 on: "the
tile's slot is free", for K and then V; from 15 down: the warpgroups' turns at the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_names import meet_other_launches  # noqa: F401
from onchip.kernels.hopper.gluon_names import gl


@gluon.jit
def _named(id, NUM_WARPS: gl.constexpr):
    """A barrier's id as one integer a thread, which is what inline assembly takes."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    return gl.full([32 * NUM_WARPS], id, gl.int32, layout)


@gluon.constexpr_function
def _arrival(threads, v, pins):
    """Assembly of an arrival at a named barrier that so many threads take part in."""
    arrive = f"bar.arrive $1, {threads};"
    if "kv"[v] not in pins:
        return f"{arrive} mov.b32 $0, $1;"
    jump = "setp.eq.s32 p, $1, 0; @p bra again;"
    return f"{{ .reg .pred p; again: {arrive} {jump} mov.b32 $0, $1; }}"


@gluon.jit
def settle(x, NUM_WARPS: gl.constexpr):
    """`x` >= 0 is made before what follows: over a trap the assembler moves no wait up."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $1, 0; @p trap; mov.b32 $0, $1; }", "=r,r",
        [_named(x, NUM_WARPS)], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def release(count, V: gl.constexpr, C: gl.constexpr):
    """A consumer warpgroup has read the K (V = 0) or V (V = 1) tile number `count`.

    The assembler moves the arrival down over the arithmetic of a step, and the producer waits
    for it. It moves nothing over a jump back: a pinned arrival has one that is never taken.
    """
    ASM: gl.constexpr = _arrival(C.warpgroups * 128 + 32, V, C.pins)  # and the producer's warp
    x = _named(6 + V * C.stages + count % C.stages, 4)
    gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_if(wanted, count, V: gl.constexpr, C: gl.constexpr):
    """`release`, unless the producer has no further tile for the slot."""
    if wanted:
        release(count, V, C)


@gluon.jit
def wait_for_slot(count, V: gl.constexpr, C: gl.constexpr):
    """The producer waits until every consumer has released the slot of tile number `count`."""
    if count >= C.stages:
        x = _named(6 + V * C.stages + count % C.stages, 1)
        if C.warpgroups == 2:
            gl.inline_asm_elementwise("bar.sync $1, 288; mov.b32 $0, $1;", "=r,r", [x],
                                      dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
        else:
            gl.inline_asm_elementwise("bar.sync $1, 416; mov.b32 $0, $1;", "=r,r", [x],
                                      dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def wait_for_turn(W: gl.constexpr, C: gl.constexpr):
    """Warpgroup W waits until the one before it has issued its products."""
    if C.turns:
        gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [_named(15 - W, 4)],
                                  dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def pass_turn(W: gl.constexpr, C: gl.constexpr):
    """It is warpgroup W's turn."""
    if C.turns:
        x = _named(15 - W, 4)
        gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [x],
                                  dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def pass_turn_at_once(W: gl.constexpr, count, C: gl.constexpr):
    """`pass_turn` that stays where it is written, before what follows; `count` >= 0.

    The assembler mixes products that were issued with the arithmetic behind them, and passes the
    turn after both. It moves nothing over a jump back, which is never taken.
    """
    if C.turns:
        gl.inline_asm_elementwise(
            "{ .reg .pred p; again: bar.arrive $1, 256; setp.lt.s32 p, $2, 0; @p bra again; "
            "mov.b32 $0, $1; }", "=r,r,r", [_named(15 - W, 4), _named(count, 4)], dtype=gl.int32,
            is_pure=False, pack=1)  # fmt: skip
