"""`DistributedOptimizer`: a Keras optimizer whose updates use everybody's gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.horovod.reductions import ReduceOp
from shoal.horovod.runtime import ProcessSet, global_process_set
from shoal.horovod.torch.compression import Compression, Compressor
from shoal.horovod.torch.mpi_ops import Average, grouped_allreduce_
from shoal.horovod.torch.optimizer import ReduceOptions
from shoal.keras.installed import load_keras


class ReducedApply:
    """Takes the place of an optimizer's own `apply`, which it calls with everybody's gradients."""

    def __init__(self, optimizer: Any, options: ReduceOptions, passes: int, *, averages_passes: bool) -> None:
        self._own_apply = optimizer.apply
        self._options = options
        self._passes, self._done = passes, 0
        self._divisor = passes if averages_passes else 1
        self._kept: list[Tensor | None] = []

    def __call__(self, grads: Sequence[Tensor | None], trainable_variables: Any = None) -> None:
        """An update, or the last pass but some before one: those keep their gradients."""
        with torch.no_grad():
            gradients = self._of_all_passes(grads)
            self._done = (self._done + 1) % self._passes
            if self._done:
                self._kept = gradients
                return
            self._kept = []
            self._own_apply(self._of_all_ranks(gradients), trainable_variables)

    def forget(self) -> None:
        """Passes that have not made an update: another world begins with the first."""
        self._kept, self._done = [], 0

    def _of_all_passes(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        # Copies, for Keras empties its own before each pass and what is reduced is reduced in place.
        new = [None if gradient is None else gradient.detach().clone() for gradient in grads]
        if not self._kept:
            return new
        return [
            one if other is None else other if one is None else one.add_(other)
            for one, other in zip(new, self._kept, strict=True)
        ]

    def _of_all_ranks(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        options = self._options
        op, before, after = options.scales
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        small = [options.compression.compress(gradient) for gradient in gradients if gradient is not None]
        if not places:
            return gradients
        found = grouped_allreduce_(
            [one for one, _ in small],
            name="keras.gradients",
            op=op,
            prescale_factor=before,
            postscale_factor=after / self._divisor,
            process_set=options.process_set,
        )
        reduced = list(gradients)
        for place, one, (_, context) in zip(places, found, small, strict=True):
            reduced[place] = options.compression.decompress(one, context)
        return reduced


def DistributedOptimizer(  # as Horovod calls it
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The same optimizer, with everybody's gradients in its updates; it is saved as Keras's own.

    Gradients of Keras on torch are dense, and are reduced together: `device_dense`, `device_sparse`,
    `sparse_as_dense`, `num_groups` and `groups` are taken and change nothing.
    """
    if not isinstance(optimizer, load_keras().optimizers.Optimizer):
        raise ValueError(
            f"DistributedOptimizer takes an optimizer of Keras's, found {type(optimizer).__name__}; for one of "
            "torch's use shoal.horovod.torch."
        )
    if isinstance(optimizer.apply, ReducedApply):
        raise ValueError("This optimizer is distributed already; wrap it in DistributedOptimizer once.")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is 1 or more, found {backward_passes_per_step}.")
    options = ReduceOptions(
        compression=compression,
        op=ReduceOp(op),
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    # Not a class of its own: Keras would save that, and could not load it where there is no Horovod.
    optimizer.__dict__["apply"] = ReducedApply(
        optimizer, options, backward_passes_per_step, averages_passes=average_aggregated_gradients
    )
    return optimizer


def load_model(
    filepath: str | Path,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """A model that was saved, whose optimizer goes on where it was, with everybody's gradients."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = load_keras().saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
