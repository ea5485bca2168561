"""What a call should take on a GPU: its bill, the roofline and its tiles joined.

A config is taken by its fields, so that nothing of a kernel is imported here: one with `dkdv`
and `dq` (and perhaps `dv`) or with `apart` is a backward's, one with `splits` a decode's, and
any other has block_m and block_n. Those with `apart` or `warpgroups` have roles (`roles`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from onchip.analysis import bill as bills
from onchip.analysis import cost, decode_tiles, roles, tiles
from onchip.analysis.bill import Bill
from onchip.analysis.hardware import Hardware
from onchip.analysis.roofline import Point, Roofline, cache_of, roofline
from onchip.analysis.tiles import Tiling, require_work
from onchip.analysis.words import human, human_us
from onchip.problem import Op, Problem

_SHAPE_FIELDS = ("block_m", "block_n", "num_warps", "num_stages")
#: (query rows, keys) of a tile where the config is not known.
_ASSUMED_TILE = (128, 64)


@dataclass(frozen=True)
class Prediction:
    """What a call should take on a GPU. `lines()` for people, `to_dict()` for JSON.

    Args:
        gpu: its name.
        flops: that the problem needs; the method may compute more.
        config: the kernel's config, None where it is not known.
        bill: what the kernel computes and moves.
        roofline: the kernel under the GPU's roof.
        three_step: the three-step method under it, None where there is none.
        tilings: stage -> how its tiles fill the GPU, where the config says so.
    """

    gpu: str
    flops: int
    config: Any
    bill: Bill
    roofline: Roofline
    three_step: Roofline | None
    tilings: dict[str, Tiling]

    @property
    def fastest_us(self) -> float:
        """Time with this config's losses if memory, products and exponentials all overlap."""
        return sum(max(self._loaded(p)) for p in self.roofline.stages)

    @property
    def slowest_us(self) -> float:
        """Time with this config's losses if nothing overlaps."""
        return sum(sum(self._loaded(p)) for p in self.roofline.stages)

    def _loaded(self, point: Point) -> tuple[float, float, float]:
        """A stage's three times, with what cut tiles and uneven programs cost."""
        tiling = self.tilings.get(point.name)
        loss = tiling.waste * tiling.imbalance if tiling else 1.0
        return point.memory_us, point.products_us * loss, point.exps_us * loss

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        total = self.roofline.total
        return {
            "gpu": self.gpu,
            "config": _plain_config(self.config),
            "flops": self.flops,
            "computed_flops": total.flops,
            "slow_bytes": self.bill.by_tensor(),
            "saved_by_l2_bytes": self.bill.saved_by_l2_bytes,
            "bound_us": total.bound_us,
            "limiter": total.limiter,
            "predicted_us": [self.fastest_us, self.slowest_us],
            "three_step_us": self.three_step.total.bound_us if self.three_step else None,
            "stages": [_plain_stage(p, self.tilings.get(p.name)) for p in self.roofline.stages],
        }

    def lines(self) -> list[str]:
        """Lines for people, each with its heading."""
        total = self.roofline.total
        store = self.bill.method == "store"
        found = [] if store else [f"config    {_config_text(self.config)}"]
        for name, tiling in self.tilings.items():
            found.append(f"tiles     {name}: {_tiling_text(tiling)}")
        rate = f", {self.flops / total.bound_us / 1e6:.3g} TFLOP/s" if self.flops else ""
        found.append(
            f"bound     {human_us(total.bound_us)} on {self.gpu}{rate}, limited by {total.limiter}"
        )
        found.append(
            f"predicted {human_us(self.fastest_us)} if all overlaps, "
            f"{human_us(self.slowest_us)} if nothing does, at the GPU's stated rates"
        )
        slow, saved = human(self.bill.slow_bytes), human(self.bill.saved_by_l2_bytes)
        found.append(f"moves     {slow} of slow memory; the L2 cache serves {saved} more")
        if self.three_step:
            steps = self.three_step.total
            found.append(
                f"3 steps   {human_us(steps.bound_us)} at best, limited by {steps.limiter}"
            )
        return found


def _plain_config(config: Any) -> Any:
    if config is None:
        return None
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else str(config)


def _plain_stage(point: Point, tiling: Tiling | None) -> dict:
    values = asdict(point) | {"limiter": point.limiter, "intensity": point.intensity}
    return values | {"tiling": asdict(tiling) if tiling else None}


def _config_text(config: Any) -> str:
    if config is None:
        return f"not known; tiles of {_ASSUMED_TILE[0]}x{_ASSUMED_TILE[1]} assumed"
    text = repr(config)
    return text[text.index("(") + 1 : -1] if "(" in text else text


def _tiling_text(t: Tiling) -> str:
    idle = f", {t.idle_sms} SMs idle" if t.idle_sms else ""
    return (
        f"{t.shape}; {t.shared_bytes / 1024:.4g} KiB shared, {t.blocks_per_sm} a SM "
        f"({t.blocks_limiter}); {t.num_programs} programs in {t.waves} waves{idle}, "
        f"busiest SM {t.imbalance:.2f} of the mean, computed / seen {t.waste:.2f}, "
        f"{t.re_reads:.4g} reads of each tile"
    )


#: Tiles are counted one by one, so that longer calls would take seconds to explain.
_MAX_LENGTH = 1 << 22


def predict(
    problem: Problem,
    hardware: Hardware,
    config: Any = None,
    lengths: Iterable[tuple[int, int]] | None = None,
) -> Prediction:
    """What a call should take on a GPU.

    Args:
        problem: the call.
        hardware: the GPU.
        config: the kernel's config; tiles of 128 x 64 are assumed without one.
        lengths: (S_q, S_k) of each sequence.

    Raises:
        ValueError: if the problem has no work, the GPU does not multiply its dtype, or the
            config does not fit the GPU.
    """
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > _MAX_LENGTH:
        raise ValueError(
            f"length: got {longest}; allowed for a predicted time: up to {_MAX_LENGTH}. "
            "FLOPs and bytes are told for any length."
        )
    lengths = None if lengths is None else list(lengths)
    if problem.op is Op.STORE:
        bill = bills.store(problem, lengths)
        roof = roofline(bill, hardware, problem.dtype)
        return Prediction(hardware.name, 0, config, bill, roof, None, {})
    require_work(problem, lengths)
    tilings = _tilings(problem, hardware, config, lengths)
    blocks = max((t.blocks_per_sm for t in tilings.values()), default=1)
    bill = _bill(problem, config, lengths, cache_of(hardware, max(1, blocks)))
    return Prediction(
        hardware.name,
        cost.flops(problem, lengths),
        config,
        bill,
        roofline(bill, hardware, problem.dtype),
        roofline(bills.three_step(problem, lengths), hardware, problem.dtype),
        tilings,
    )


def _bill(problem: Problem, config: Any, lengths, cache: bills.Cache) -> Bill:
    if hasattr(config, "apart"):
        keys = (config.block_m, config.block_n)
        if not config.apart:
            width = roles.padded(problem.head_dim)
            outside = roles.share_outside(problem, config)
            return bills.backward_summed(problem, keys, width, lengths, cache, outside)
        queries = (2 * config.block_m, config.block_n)
        return bills.backward(problem, keys, queries, lengths, cache, copies_lse=True)
    if problem.op is Op.BACKWARD:
        dkdv, dq = (_tile_of(_field(config, name)) for name in ("dkdv", "dq"))
        alone = _field(config, "dv")
        dv = _tile_of(alone) if alone else None
        return bills.backward(problem, dkdv, dq, lengths, cache, dv)
    if hasattr(config, "splits"):
        return bills.decode(problem, config.splits, lengths, config.block_n)
    return bills.flash(problem, *_tile_of(config), lengths, cache)


def _field(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _tile_of(config: Any) -> tuple[int, int]:
    return _ASSUMED_TILE if config is None else (config.block_m, config.block_n)


def _tilings(problem: Problem, hardware: Hardware, config: Any, lengths) -> dict[str, Tiling]:
    """Tilings by the names of the bill's stages."""
    if roles.has_roles(config):
        return {
            "flash" if part == "forward" else part: roles.tiling(
                problem, config, hardware, part, lengths
            )
            for part in roles.parts(config, problem)
        }
    if hasattr(config, "splits"):
        stage = "decode" if config.splits == 1 else "split"
        return {stage: decode_tiles.tiling(problem, config, hardware, lengths)}
    if problem.op is Op.BACKWARD:
        alone = _field(config, "dv")
        keys = {"dv": alone, "dk": config.dkdv} if alone else {"dkdv": _field(config, "dkdv")}
        parts = {name: (shape, name) for name, shape in keys.items()}
        parts["dq"] = (_field(config, "dq"), "dq")
    else:
        parts = {"flash": (config, "forward")}
    return {
        stage: tiles.tiling(problem, shape, hardware, part, lengths)
        for stage, (shape, part) in parts.items()
        if all(hasattr(shape, field) for field in _SHAPE_FIELDS)
    }
