"""The update of a flat shard on a GPU, from gradients in bf16: `python -m benchmarks.update_kernel [elements]`.

Bytes are those that must be moved: 26 for each element (gradient 2; parameter, mean and square 4 each, read and
written). torch's fused AdamW takes gradients in float32 alone, so that it is measured with the cast before it,
and by itself on gradients that are float32 already (28 bytes). Beside them a copy of as many bytes. Medians of
30 in turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from shoal.step import update_kernel
from shoal.step.flat_rules import FlatShard

ROUNDS = 30
SHAPES = ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16))
"""Of the kernel: elements of a block, and its warps."""


def main(argv: Sequence[str]) -> None:
    """Print one line of JSON for each."""
    size = int(argv[0]) if argv else 1 << 28
    torch.manual_seed(0)
    values, wide = torch.randn(size, device="cuda"), torch.randn(size, device="cuda")
    param = nn.Parameter(values.clone())
    param.grad = wide
    fused = torch.optim.AdamW([param], lr=1e-4, fused=True)
    shard = FlatShard(
        values=values,
        gradients=wide.bfloat16(),
        state={key: torch.zeros(size, device="cuda") for key in ("exp_avg", "exp_avg_sq")},
        steps=torch.zeros(8, device="cuda"),
        factor=torch.ones(1, device="cuda"),
    )
    source, target = (torch.empty(13 * size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def cast_and_step() -> None:
        wide.copy_(shard.gradients)
        fused.step()

    def kernel(block: int, warps: int) -> Callable[[], None]:
        def run() -> None:
            update_kernel.BLOCK, update_kernel.WARPS = block, warps
            shard.update(fused, fused.param_groups[0])

        return run

    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: target.copy_(source), 26),
        "fused, float32": (fused.step, 28),
        "cast, then fused": (cast_and_step, 26),
    }
    ways |= {f"kernel {block} x {warps}": (kernel(block, warps), 26) for block, warps in SHAPES}
    for name, (act, _) in ways.items():
        for _ in range(3):
            act()
        torch.cuda.synchronize()
        print(name, "is warm", file=sys.stderr, flush=True)
    for name, (ms, bytes_each) in _measured(ways).items():
        told = {"way": name, "ms": round(ms, 4), "gb_per_s": round(bytes_each * size / ms / 1e6, 1)}
        print(json.dumps({"elements": size, **told}), flush=True)


def _measured(ways: Mapping[str, tuple[Callable[[], Any], int]]) -> dict[str, tuple[float, int]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (act, _) in ways.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            act()
            after.record()
            after.synchronize()
            times[name].append(before.elapsed_time(after))
    return {name: (median(found), ways[name][1]) for name, found in times.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
