"""Script: compiles the Hopper backward for sm_90a without a GPU; prints JSON last."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

from onchip.kernels.hopper import backward, backward_kernels, backward_stats
from onchip.problem import Op, Problem, Saved, Tensors
from tests import compile_only
from tests.portable_forward_compiles import pose

KERNELS = {
    "rest": backward_stats.attn_bwd_rest_hopper,
    "pre": backward_stats.attn_bwd_pre_hopper,
    "keys": backward_kernels.attn_bwd_keys_hopper,
    "queries": backward_kernels.attn_bwd_queries_hopper,
    "post": backward_stats.attn_bwd_post_hopper,
}


def calls_of(problem: Problem, tensors: Tensors) -> dict[str, compile_only.Call]:
    """The launches that the problem would make, by what they make."""
    out = tensors.q.new_empty(*tensors.q.shape[:-1], problem.head_dim_v)
    rows = out.shape[:-2]
    lse = out.new_empty(*rows[:-1], problem.num_heads, rows[-1]).float()
    saved = Saved(out, None, out, lse)
    found = {}

    def run_without(names):
        if not names:
            backward.launch(problem, tensors, saved)
            return
        for call in compile_only.captured(KERNELS[names[0]], lambda: run_without(names[1:])):
            found[names[0]] = call

    run_without(list(KERNELS))
    return found


def unmasked_spills(sass: str) -> int:
    """Instructions that move spilled registers in the loops that hold products and no mask.

    A mask selects: 32 times and more in a loop.
    """
    labels, instructions = {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    spans = []
    for end, text in enumerate(instructions):
        jump = re.search(r"\bBRA\b.*?`\((\.L\w+)\)", text)
        start = labels.get(jump[1], end) if jump else end
        if start < end and any("MMA" in x for x in instructions[start:end]):
            spans.append(range(start, end + 1))
    # A wait that stands out of line jumps back into a loop: what lies between is no loop.
    spans = [s for s in spans if not any(t[0] < s[0] <= t[-1] < s[-1] for t in spans)]
    inner = [s for s in spans if not any(t != s and t[0] in s and t[-1] in s for t in spans)]
    loops = [[instructions[i] for i in span] for span in inner]
    unmasked = [x for x in loops if sum("SEL" in text for text in x) < 32]
    return sum(bool(re.search(r"\b(STL|LDL)\b", text)) for x in unmasked for text in x)


def resources(cases: list[dict]) -> list[dict]:
    """What each case's kernels use; a case names dim, and features of `pose`."""
    found = []
    for case in cases:
        given = dict(case)
        deterministic = given.pop("deterministic", False)
        if "window" in given:
            given["window"] = tuple(given["window"])
        features = [name for name in case if name != "dim"]
        problem, tensors = pose("sm_90", **given)
        problem = replace(problem, op=Op.BACKWARD, deterministic=deterministic)
        for name, call in calls_of(problem, tensors).items():
            binary = compile_only.compiled(call, "sm_90")
            used = compile_only.resources(binary)
            sass = compile_only.disassembly(binary)
            used["unmasked_spills"] = unmasked_spills(sass)
            used["narrow_stores"] = len(re.findall(r"\bSTS\.64\b", sass))
            found.append({"kernel": name, "dim": case["dim"], "features": features} | used)
    return found


if __name__ == "__main__":
    print(json.dumps(resources(json.loads(sys.argv[1]))))
