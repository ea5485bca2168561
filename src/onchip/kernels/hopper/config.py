"""Tiles of the Hopper kernels: a frozen Config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.problem import Problem

#: Query rows of a consumer warpgroup: what one wgmma instruction takes.
WARPGROUP_ROWS = 64
#: Bytes of K and V that CTAs working at the same time should share in the L2 cache.
L2_BUDGET_BYTES = 16 << 20


@dataclass(frozen=True)
class Config:
    """How the forward cuts its work.

    Args:
        warpgroups: consumer warpgroups, 64 query rows each: 2 or 3.
        block_n: keys of a tile, a power of two >= 64.
        stages: K/V tiles in flight.
        q_buffers: tiles of Q in shared memory: 3, where O leaves through its tile's own Q
            buffer, or 1, where it leaves through a half-width buffer of its own.
        turns: whether the warpgroups take turns at the tensor cores, so that the softmax of
            one runs under the products of another.
        late: whether O is waited for behind the exponentials rather than before them.
        registers: of a consumer thread.
        l2_bytes: K and V of a group of heads; tiles are handed out group by group.

    Raises:
        ValueError: if the sizes do not go together.
    """

    warpgroups: int
    block_n: int
    stages: int
    q_buffers: int
    turns: bool
    late: bool
    registers: int
    l2_bytes: int = L2_BUDGET_BYTES

    def __post_init__(self):
        if self.warpgroups not in (2, 3):
            raise ValueError(f"warpgroups: got {self.warpgroups}; allowed: 2 or 3")
        if self.block_n < 64 or self.block_n & (self.block_n - 1):
            raise ValueError(f"block_n: got {self.block_n}; allowed: powers of two from 64 on")
        if self.block_m - WARPGROUP_ROWS > self.block_n:
            raise ValueError(
                f"block_n: got {self.block_n} for {self.warpgroups} warpgroups; a warpgroup "
                f"skips one tile at most: {self.block_m - WARPGROUP_ROWS} keys or more"
            )
        if self.q_buffers not in (1, 3):
            raise ValueError(f"q_buffers: got {self.q_buffers}; allowed: 1 or 3")
        # Named barriers: two for each stage from 8 on, one turn for each warpgroup from 15 down.
        if 8 + 2 * self.stages > 16 - self.warpgroups * self.turns:
            raise ValueError(f"stages: got {self.stages}; there are 8 named barriers")

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return self.warpgroups * WARPGROUP_ROWS


def padded(head_dim: int) -> int:
    """The power of two >= 64 that holds a head dimension."""
    return max(64, 1 << (head_dim - 1).bit_length())


def choose_forward(problem: Problem) -> Config:
    """The forward's config for a problem: a pure function, no device is asked."""
    width, width_v = padded(problem.head_dim), padded(problem.head_dim_v)
    if width != width_v:  # O does not fit into Q's buffer
        return _WIDE
    laden = problem.softcap > 0 or problem.alibi > 0
    return _CONFIGS[width, problem.mask.right >= 0 or laden]


# H200, bf16, 16k tokens, medians of interleaved rounds: see docs/log.md.
_WIDE = Config(2, 64, 2, q_buffers=1, turns=False, late=True, registers=240)
_USUAL = Config(2, 128, 2, q_buffers=3, turns=True, late=False, registers=240)
_CONFIGS = {
    (64, False): Config(3, 128, 2, q_buffers=3, turns=True, late=False, registers=160),
    (64, True): Config(2, 128, 3, q_buffers=3, turns=False, late=False, registers=240),
    (128, False): _USUAL,
    (128, True): _USUAL,
    (256, False): _WIDE,
    (256, True): _WIDE,
}
