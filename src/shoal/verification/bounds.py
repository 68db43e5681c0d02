"""How far from one process a strategy may end up.

Where the same sums are made in the same order (`via=arena`) every bit must be equal, after any number of steps.
Elsewhere sums are rounded differently, and float32 training does not stay where it was nudged: one process
whose initial parameters are changed in the last bit (1.5e-7) was measured to end, after 20 steps of a small
conv net, as far off as

| optimizer | parameters | optimizer state |
|-----------|------------|-----------------|
| SGD       | 3e-2       | 8e-2            |
| AdamW     | 4e-2       | 1e-1            |
| Adagrad   | 1e-1       | 2e-1            |
| RMSprop   | 2e-1       | 7e-1            |

because a ReLU or a maximum near a tie goes the other way and all that follows with it. A bound that holds
after 20 steps would thus let everything pass. So the bounds below judge the first step, before anything can
drift; later steps are judged in double precision, where nothing comes near a tie by rounding.
"""

from __future__ import annotations

FLOAT64_BOUND = 1e-9
"""All steps, whole batch against parts. Measured: at most 8e-13 (GPT with AdamW, 20 steps)."""

SUM_BOUND = 1e-3
"""First step, the same slots. Measured: 1e-6, and 2e-5 for the momentum of a bias before BatchNorm, whose
gradient is nothing but rounding noise."""

SYNCHRONISED_BOUND = 5e-2
"""First step, BatchNorm over the whole batch: the forward passes, too, differ in their last bits, so that a
ReLU may go the other way in one sample. Measured: 2e-6 without, 2e-2 with such an event."""

NORMALISED_BOUND = 1.0
"""First step, parameters of optimizers whose step does not shrink with the gradient: where the gradient is
noise, so is the direction, and a parameter that started at zero is then all noise. What these optimizers keep
of the gradient is judged by the bounds above."""

NARROWED_BOUND = 2e-1
"""First step in bf16, fp16 or adaptive precision where layers are cut by width: each part is rounded to 8 bits by
itself, where one process rounds the sum. That alone may lead as far as half precision leads from float32, which
was measured, for the optimizer's state in one process, as 1.7e-1. Measured between `tensor` and one process: 2e-2,
and 6e-2 for the momentum of a bias of BatchNorm. It finds gross mistakes alone, such as a gradient that counts
twice; finer ones are found in float64. Without such a cut the bounds above hold in half precision, too; measured:
2e-7, and 6e-3 with synchronised BatchNorm."""

PROPORTIONAL = ("SGD", "KerasSGD", "ASGD", "SAG")
"""Optimizers whose first step is proportional to the gradient."""


def first_step_bound(what: str, optimizer: str, *, synchronised: bool, narrowed: bool = False) -> float:
    """The bound for `parameters`, `buffers` or `optimizer state` after one step, where bits may differ.

    `narrowed`: layers are cut by width, and compute in half precision.
    """
    if what == "parameters" and optimizer not in PROPORTIONAL:
        return NORMALISED_BOUND
    if narrowed:
        return NARROWED_BOUND
    return SYNCHRONISED_BOUND if synchronised else SUM_BOUND
