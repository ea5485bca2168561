"""Script: compiles the portable backward for GPUs that are not there; prints JSON last."""

from __future__ import annotations

import json
import random
import sys

import torch

from onchip.kernels.portable import backward
from onchip.kernels.portable.backward_config import BackwardConfig, choose_backward
from onchip.problem import Problem, Saved, Tensors
from tests import compile_only
from tests.portable_forward_compiles import FEATURES, pose

KERNELS = (
    backward.attn_bwd_pre_portable,
    backward.attn_bwd_dkdv_portable,
    backward.attn_bwd_dq_portable,
)
PARTS = ("pre", "dkdv", "dv", "dk", "dq")


def calls_of(
    problem: Problem, tensors: Tensors, config: BackwardConfig | None = None
) -> dict[str, compile_only.Call]:
    """The launches that the problem would make, by what they make ("pre" for D)."""
    out = tensors.q.new_empty(*tensors.q.shape[:-1], problem.head_dim_v)
    rows = out.shape[:-2]
    lse = out.new_empty(*rows[:-1], problem.num_heads, rows[-1], dtype=torch.float32)
    saved = Saved(out, None, out, lse)
    config = config or choose_backward(problem)
    found = {}

    def run_without(kernels):
        if not kernels:
            backward.launch_with(config, problem, tensors, saved)
            return
        for call in compile_only.captured(kernels[0], lambda: run_without(kernels[1:])):
            found[call.args[-1].makes or "pre"] = call

    run_without(KERNELS)
    return found


def resources(cases: list[dict]) -> list[dict]:
    """What each case's kernels use; a case names arch, dim, features and perhaps a config."""
    found = []
    for case in cases:
        problem, tensors = pose(case["arch"], case["dim"], **FEATURES[case["features"]])
        for name, call in calls_of(problem, tensors).items():
            binary = compile_only.compiled(call, case["arch"])
            found.append(case | {"kernel": name} | compile_only.resources(binary))
    return found


def counts() -> list[dict]:
    """Different kernels and different configs among 50 random shapes of each layout."""
    draw = random.Random(0)
    found = []
    for layout in ({}, {"packed": True}, {"causal": True, "window": (64, 0)}):
        for dim in (64, 20):
            keys, configs = {name: set() for name in PARTS}, set()
            for _ in range(50):
                size = {"batch": draw.randint(1, 9), "seqlen": draw.randint(1, 5000)}
                size["seqlen_k"] = size["seqlen"] if "packed" in layout else draw.randint(1, 5000)
                if "window" in layout:
                    layout["window"] = (draw.randint(0, 900), 0)
                problem, tensors = pose("sm_90", dim, **size, **layout, heads=draw.choice((5, 6)))
                configs.add(choose_backward(problem))
                for name, call in calls_of(problem, tensors).items():
                    _, _, specialisation, options = compile_only.specialisation(call, "sm_90")
                    keys[name].add(str((specialisation, call.args[-1], options)))
            most = max(map(len, keys.values()))
            found.append({"layout": str(layout), "kernels": most, "configs": len(configs)})
    return found


if __name__ == "__main__":
    print(
        json.dumps(resources(json.loads(sys.argv[2])) if sys.argv[1] == "resources" else counts())
    )
