"""Values of numpy's kind among all ranks, and one rank's variables for all."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shoal.horovod.reductions import ReduceOp
from shoal.horovod.runtime import ProcessSet, global_process_set
from shoal.horovod.torch import mpi_ops
from shoal.horovod.torch.compression import Compression, Compressor
from shoal.keras.installed import load_keras


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray:
    """Everybody's values as one: their mean where nothing else is said."""
    small, context = compression.compress(_tensor_of(value))
    found = mpi_ops.allreduce(
        small,
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return compression.decompress(found, context).numpy()


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> np.ndarray:
    """Everybody's rows, by rank."""
    return mpi_ops.allgather(_tensor_of(value), name, process_set).numpy()


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """The root's value."""
    return mpi_ops.broadcast(_tensor_of(value), root_rank, name, process_set).numpy()


def reducescatter(
    value: Any,
    name: str | None = None,
    op: ReduceOp = mpi_ops.Average,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray:
    """This rank's rows of everybody's values as one."""
    return mpi_ops.reducescatter(_tensor_of(value), name=name, op=op, process_set=process_set).numpy()


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give all ranks the root's values of Keras's variables: `model.weights`, `optimizer.variables`."""
    # By their places: names need not be different, and ranks that built more models before have others.
    handles = [
        mpi_ops.broadcast_async_(variable.value.data, root_rank, f"variable.{number}", process_set)
        for number, variable in enumerate(variables)
    ]
    for handle in handles:
        mpi_ops.synchronize(handle)


def broadcast_global_variables(root_rank: int) -> None:
    """Give all ranks the root's weights of every model that this process has, and what their optimizers keep.

    TensorFlow has a list of all variables; Keras on torch has none, so the models themselves are looked for. Ranks
    must have the same ones.
    """
    model_class = load_keras().Model
    gc.collect()  # models that nobody has any more are there for a while, in some ranks longer than in others
    found = [each for each in gc.get_objects() if isinstance(each, model_class)]
    for model in sorted(found, key=lambda each: each.name):
        broadcast_variables(variables_of_training(model), root_rank)


def variables_of_training(model: Any) -> list[Any]:
    """A model's weights, and what its optimizer keeps. States of random generators stay each rank's own."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(optimizer.variables if optimizer is not None and optimizer.built else ())]


def _tensor_of(value: Any) -> torch.Tensor:
    # A copy: what is reduced in place must not be the caller's.
    return torch.from_numpy(np.array(load_keras().ops.convert_to_numpy(value)))
