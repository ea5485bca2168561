"""Turns and barriers of the Hopper backward, and maths of its tiles."""

from triton.experimental import gluon

from onchip.kernels.hopper.gluon_names import gl, wait_for_all

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def wait_turn(counter, turn):
    """Waits until `turn` others have gone before: each thread reads the counter itself, since a
    scalar atomic's result would go through shared memory."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; again: ld.acquire.gpu.global.b32 v, [$1]; "
        "setp.lt.s32 p, v, $2; @p bra again; mov.b32 $0, v; }", "=r,l,r",
        [counter.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    wait_for_all()


@gluon.jit
def fence_async():
    """Orders what other SMs wrote, and was waited for, before this warp's TMA reads of memory."""
    x = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
    wait_for_all()


@gluon.jit
def pass_turn(counter, NEWEST: gl.constexpr):
    """Lets the next one go when what this role's threads wrote or added by TMA, except for the
    NEWEST copies, is in memory; `tma.store_wait` waits until shared memory has been read."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    ASM: gl.constexpr = f"cp.async.bulk.wait_group {NEWEST}; mov.b32 $0, $1;"
    x = gl.full([LANES], 0, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
    wait_for_all()
    gl.atomic_add(counter, 1, sem="release")


@gluon.jit
def capped(s, factor):
    """tanh(s * factor) and its derivative; cannot overflow, since exp(2x) = inf gives 1."""
    bent = 1.0 - 2.0 / (gl.exp2(s * (factor * (2.0 * _LOG2E))) + 1.0)
    return bent, 1.0 - bent * bent


@gluon.jit
def widened(x):
    """x in float32, two numbers of a register at a time: with a conversion of each, ptxas takes
    registers apart where they are written and needs twice as many (triton 3.6)."""
    if x.dtype == gl.bfloat16:
        ASM: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(
            ASM, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def hide(
    x, right, left, tail, FILL: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr,
    SPEC: gl.constexpr,
):  # fmt: skip
    """A tile with FILL where the mask hides it: key j of the tile is seen by its query i iff
    i + left <= j <= i + right and j < tail.

    Args:
        x: a tile in layout L.
        ROWS: the dimension of the queries.
    """
    KEYS: gl.constexpr = 1 - ROWS
    keys = gl.expand_dims(gl.arange(0, x.shape[KEYS], gl.SliceLayout(ROWS, L)), ROWS)
    rows = gl.expand_dims(gl.arange(0, x.shape[ROWS], gl.SliceLayout(KEYS, L)), KEYS)
    if SPEC.has_right:
        x = gl.where(keys <= rows + right, x, FILL)
    if SPEC.has_left:
        x = gl.where(keys >= rows + left, x, FILL)
    if SPEC.has_tail:
        x = gl.where(keys < tail, x, FILL)
    return x
