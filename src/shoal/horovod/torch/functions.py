"""One rank's model, optimizer or object, for all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.horovod.runtime import ProcessSet, current, global_process_set
from shoal.horovod.torch.mpi_ops import allgather, broadcast_, broadcast_async_, synchronize


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the root's values: of `model.state_dict()`, or of `model.named_parameters()`."""
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2):
            raise ValueError(
                f"broadcast_parameters takes a dictionary or pairs of name and tensor, found {item!r}."
            )
    handles = [
        broadcast_async_(value.data, root_rank, f"parameter.{name}", process_set)
        for name, value in named
        if isinstance(value, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the root's optimizer state and options. What the others have need not look like it: they may
    not have taken a step yet."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = current().rank == root_rank
    state = optimizer.state_dict()
    tensors: list[Tensor] = []
    shape = _taken_apart(state, tensors) if is_root else None
    shape, looks = broadcast_object(
        (shape, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]), root_rank, "optimizer", process_set
    )
    if not is_root:
        tensors = [torch.empty(size, dtype=dtype) for dtype, size in looks]
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer.{number}", process_set)
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        # Not its own `load_state_dict`: wrapped optimizers do more there than take values.
        torch.optim.Optimizer.load_state_dict(optimizer, _put_together(shape, tensors))


class _TensorNumber(int):
    """Stands for a tensor that is sent by itself."""


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _TensorNumber(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _taken_apart(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_taken_apart(one, tensors) for one in value)
    return value


def _put_together(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _TensorNumber):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _put_together(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_together(one, tensors) for one in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, for all; anything that can be pickled."""
    label, is_root = name or type(obj).__name__, current().rank == root_rank
    if name is None:
        label = "object"  # others may have something else there
    content = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([len(content)]), root_rank, f"{label}.sz", process_set)
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{label}.t", process_set)
    return obj if is_root else _unpickled(content)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` from this root."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Everybody's objects, by rank."""
    content = _pickled(obj)
    label = name or "object"
    lengths = allgather(torch.tensor([len(content)]), f"{label}.sz", process_set).tolist()
    rows = allgather(content, f"{label}.t", process_set)
    return [_unpickled(part) for part in rows.split(lengths)]


def _pickled(obj: Any) -> Tensor:
    room = io.BytesIO()
    pickle.dump(obj, room)
    return torch.frombuffer(bytearray(room.getvalue()), dtype=torch.uint8)


def _unpickled(content: Tensor) -> Any:
    # From another process of this run, which this user started: it could do as it likes anyway.
    return pickle.loads(content.numpy().tobytes())
