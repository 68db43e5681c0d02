"""How far from one process a strategy may end up, by what it sums and which optimizer uses the sum.

Bounds are relative to the largest value of a tensor and hold for 20 steps; longer runs get proportionally
more. Where the same sums are made in the same order (`via=arena`) there is no bound: every bit must be equal.
"""

from __future__ import annotations

from shoal.spec import Data
from shoal.verify.report import BITWISE

FLOAT64_BOUND = 1e-9
"""Double precision, whole batch against parts. Measured: at most 3e-12; any real error is far above."""

BOUND_STEPS = 20
"""Steps for which the bounds below hold."""

LINEAR_BOUND = 1e-3
"""Steps in proportion to the gradient, so a difference of the last bit stays one. Measured: 3e-7 (ring of 3),
2e-6 (synchronised BatchNorm); 3e-5 for the momentum of a bias before BatchNorm, which is nothing but noise."""
NORMALISING_BOUND = 2e-2
"""Steps of a size that does not depend on the gradient's: where that is near zero its last bits decide the
direction. Measured: 4e-5 (RMSprop, ring of 3); 6e-3 between parts and the whole of a batch (AdamW)."""
SIGN_BOUND = 2e-1
"""Only the gradient's sign counts: an element whose gradient is near zero may go the other way at full speed."""

SAME_SLOTS_BOUNDS = {
    "SGD": LINEAR_BOUND,
    "ASGD": LINEAR_BOUND,
    "SAG": LINEAR_BOUND,
    "Adam": NORMALISING_BOUND,
    "AdamW": NORMALISING_BOUND,
    "Adamax": NORMALISING_BOUND,
    "NAdam": NORMALISING_BOUND,
    "RAdam": NORMALISING_BOUND,
    "RMSprop": NORMALISING_BOUND,
    "Adagrad": NORMALISING_BOUND,
    "Adadelta": NORMALISING_BOUND,
    "Rprop": SIGN_BOUND,
}
"""By the optimizer's class; any other may amplify as the normalising ones do."""


def same_slots_bound(spec: Data, optimizer: str, steps: int, *, whole_batch: bool) -> float:
    """The bound against one process with the same slots; with the whole batch for synchronised BatchNorm."""
    if spec.via in ("auto", "arena") and not whole_batch:
        return BITWISE
    return SAME_SLOTS_BOUNDS.get(optimizer, NORMALISING_BOUND) * max(1.0, steps / BOUND_STEPS)
