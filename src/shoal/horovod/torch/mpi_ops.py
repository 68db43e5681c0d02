"""Horovod's collectives for torch tensors: at once, or by a handle that is waited for later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from shoal.horovod.engine import Outstanding, SetEngine
from shoal.horovod.operations import RowsOfAll, look_of
from shoal.horovod.reductions import ReduceOp
from shoal.horovod.requests import Act, TensorRequest
from shoal.horovod.runtime import ProcessSet, current, global_process_set, submit
from shoal.horovod.torch.compression import Compression, Compressor

Average, Sum, Adasum, Min, Max, Product = (
    ReduceOp.AVERAGE,
    ReduceOp.SUM,
    ReduceOp.ADASUM,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PRODUCT,
)

Finish = Callable[[list[Any]], Any]
"""Makes what `synchronize` returns from what was found."""


class _Handles:
    """What was asked for and not yet waited for, by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._open: dict[int, tuple[SetEngine, Outstanding, Finish]] = {}

    def add(self, engine: SetEngine, asked: Outstanding, finish: Finish) -> int:
        with self._lock:
            number = next(self._numbers)
            self._open[number] = engine, asked, finish
        return number

    def asked(self, handle: int) -> Outstanding:
        return self._of(handle)[1]

    def finish(self, handle: int) -> Any:
        engine, asked, finish = self._of(handle)
        del self._open[handle]
        engine.wait(asked)
        return finish(list(asked.result))

    def _of(self, handle: int) -> tuple[SetEngine, Outstanding, Finish]:
        if handle not in self._open:
            raise ValueError(f"{handle!r} is no handle, or it was waited for before.")
        return self._open[handle]


_handles = _Handles()


def poll(handle: int) -> bool:
    """Whether it is done, so that `synchronize` will not wait."""
    return _handles.asked(handle).done.is_set()


def synchronize(handle: int) -> Any:
    """Wait until it is done; what it came to."""
    return _handles.finish(handle)


def _ask(
    act: Act,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Finish,
    **more: Any,
) -> int:
    prefix = f"{act}." if process_set is global_process_set else f"{act}.set{process_set.process_set_id}."
    name = f"{prefix}{name}" if name is not None else f"{prefix}noname.{current().count_unnamed(act, process_set)}"
    device = tensors[0].device.type if tensors else "cpu"
    request = TensorRequest(name=name, act=act, tensors=tuple(map(look_of, tensors)), device=device, **more)
    return _handles.add(*submit(request, [tensor.detach() for tensor in tensors], process_set), finish)


def _first(found: list[Any]) -> Any:
    return found[0]


def _rows_of_all(found: list[RowsOfAll]) -> Any:
    return found[0].tensor


def _check_dense(tensors: Sequence[Tensor], what: str) -> None:
    for tensor in tensors:
        if tensor.is_sparse:
            raise ValueError(f"{what} takes dense tensors, found a sparse one; use sparse_allreduce_async.")


def _operation(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average; please provide only one of them.")
    if op is not None:
        return ReduceOp(op)
    return Sum if average is False else Average


def _reduce_async(
    act: Act,
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    finish: Finish,
) -> int:
    _check_dense(tensors, act)
    if op is Average and any(tensor.dtype == torch.bool for tensor in tensors):
        raise ValueError("There is no average of booleans; use op=hvd.Sum, hvd.Min or hvd.Max.")
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return _ask(act, tensors, name, process_set, finish, op=str(op), **scales)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce in place."""
    found = _operation(op, average)
    scales = prescale_factor, postscale_factor
    return _reduce_async(Act.ALLREDUCE, [tensor], name, found, *scales, process_set, lambda _: tensor)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce; the tensor stays as it is."""
    copy = tensor.detach().clone()
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce in place, and return it."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return _tensor(synchronize(handle))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Everybody's tensors as one. Gradients go through it the same way."""
    op, scales = _operation(op, average), (prescale_factor, postscale_factor)
    small, context = compression.compress(tensor)
    (reduced,) = _Allreduce.apply(op, name, scales, process_set, small)
    return compression.decompress(reduced, context)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce several in place; none before all are there."""
    found, kept = _operation(op, average), list(tensors)
    scales = prescale_factor, postscale_factor
    return _reduce_async(Act.ALLREDUCE, kept, name, found, *scales, process_set, lambda _: kept)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce several; they stay as they are."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several in place, and return them."""
    scales = prescale_factor, postscale_factor
    return list(synchronize(grouped_allreduce_async_(tensors, average, name, op, *scales, process_set)))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Everybody's tensors as one, of several. Gradients go through it the same way."""
    op, scales = _operation(op, average), (prescale_factor, postscale_factor)
    small = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(op, name, scales, process_set, *[one for one, _ in small])
    return [compression.decompress(one, context) for one, (_, context) in zip(reduced, small, strict=True)]


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to add up sparse tensors, or to average them."""
    if ReduceOp(op) not in (Average, Sum):
        raise ValueError(f"Sparse tensors are averaged or added up, found op={op}.")
    whole = tensor.coalesce()
    size = current().engine_of(process_set).group.size

    def finish(found: list[RowsOfAll]) -> Tensor:
        indices, values = (one.tensor for one in found)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
        return total / size if ReduceOp(op) is Average else total

    parts = [whole.indices().t().contiguous(), whole.values()]
    return _ask(Act.ALLGATHER, parts, None if name is None else f"sparse.{name}", process_set, finish)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to put everybody's rows behind each other."""
    return _ask(Act.ALLGATHER, _with_rows([tensor], "allgather"), name, process_set, _rows_of_all)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Everybody's rows behind each other; how many each has may differ."""
    (found,) = _Allgather.apply(name, process_set, tensor)
    return _tensor(found)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`allgather_async` of several; none before all are there."""

    def finish(found: list[RowsOfAll]) -> list[Tensor]:
        return [one.tensor for one in found]

    return _ask(Act.ALLGATHER, _with_rows(tensors, "allgather"), name, process_set, finish)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several."""
    return list(_Allgather.apply(name, process_set, *tensors))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to take the values of one rank, in place."""
    _check_dense([tensor], "broadcast")
    return _ask(Act.BROADCAST, [tensor], name, process_set, lambda _: tensor, root=int(root_rank))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to take the values of one rank; the tensor stays as it is."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Take the values of one rank, in place."""
    return _tensor(synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The values of one rank."""
    return _tensor(_Broadcast.apply(root_rank, name, process_set, tensor))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send everybody its rows: `splits` of them to each, or equally many."""
    _with_rows([tensor], "alltoall")
    size = current().engine_of(process_set).group.size
    rows = [] if splits is None else [int(one) for one in splits]
    if splits is not None and (len(rows) != size or sum(rows) != len(tensor) or min(rows) < 0):
        raise ValueError(
            f"alltoall: splits say for each of {size} ranks how many of {len(tensor)} rows it gets, found {rows}."
        )
    if splits is None and len(tensor) % size:
        raise ValueError(f"alltoall: {len(tensor)} rows cannot be split equally among {size} ranks; give splits.")

    def finish(found: list[RowsOfAll]) -> Tensor | tuple[Tensor, Tensor]:
        received = found[0]
        return (
            received.tensor
            if splits is None
            else (received.tensor, torch.tensor(received.rows, dtype=torch.int32))
        )

    return _ask(Act.ALLTOALL, [tensor], name, process_set, finish, splits=tuple(rows))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that everybody has sent this process; with `splits` also how many each has."""
    found, received = _Alltoall.apply(splits, name, process_set, tensor)
    return found if splits is None else (found, received)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce, of which this process gets its rows."""
    given, scales = _with_rows([tensor], "reducescatter"), (prescale_factor, postscale_factor)
    return _reduce_async(Act.REDUCESCATTER, given, name, ReduceOp(op), *scales, process_set, _first)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This process's rows of everybody's tensors as one; where it does not come out, the first get one more."""
    scales = prescale_factor, postscale_factor
    small, context = compression.compress(tensor)
    (found,) = _Reducescatter.apply(ReduceOp(op), name, scales, process_set, small)
    return compression.decompress(found, context)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """`reducescatter_async` of several."""
    given, scales = _with_rows(tensors, "reducescatter"), (prescale_factor, postscale_factor)
    return _reduce_async(Act.REDUCESCATTER, given, name, ReduceOp(op), *scales, process_set, list)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several."""
    scales = prescale_factor, postscale_factor
    small = [compression.compress(tensor) for tensor in tensors]
    found = _Reducescatter.apply(ReduceOp(op), name, scales, process_set, *[one for one, _ in small])
    return [compression.decompress(one, context) for one, (_, context) in zip(found, small, strict=True)]


def join(device: int = -1) -> int:
    """This process has no more data: others go on without it, with zeros in its place, until all have joined.
    Returns the rank that was last."""
    engine = current().engines[0]
    return engine.group.ranks[engine.join()]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all have come here."""
    synchronize(_ask(Act.BARRIER, (), None, process_set, lambda _: None))


def _with_rows(tensors: Sequence[Tensor], what: str) -> list[Tensor]:
    _check_dense(tensors, what)
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(f"{what} takes tensors with at least one dimension, found a scalar; use reshape(1).")
    return list(tensors)


def _tensor(found: object) -> Tensor:
    assert isinstance(found, Tensor)
    return found


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOp,
        name: str | None,
        scales: tuple[float, float],
        process_set: ProcessSet,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, scales, process_set
        handle = grouped_allreduce_async(given, None, name, op, *scales, process_set)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, (prescale, postscale), process_set = ctx.how
        handle = grouped_allreduce_async(gradients, None, None, op, prescale, postscale, process_set)
        found = synchronize(handle)
        return None, None, None, None, *found


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.process_set = process_set

        def finish(found: list[RowsOfAll]) -> list[RowsOfAll]:
            return found

        handle = _ask(Act.ALLGATHER, _with_rows(given, "allgather"), name, process_set, finish)
        gathered: list[RowsOfAll] = synchronize(handle)
        ctx.rows = [one.rows for one in gathered]
        return tuple(one.tensor for one in gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        index = current().engine_of(ctx.process_set).group.index
        found = synchronize(grouped_allreduce_async(gradients, None, None, Sum, process_set=ctx.process_set))
        own = [
            whole[start : start + rows[index]]
            for whole, rows in zip(found, ctx.rows, strict=True)
            for start in [list(accumulate(rows, initial=0))[index]]
        ]
        return None, None, *own


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root_rank: int, name: str | None, process_set: ProcessSet, given: Tensor) -> Tensor:
        ctx.how = root_rank, process_set
        return _tensor(synchronize(broadcast_async(given, root_rank, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        root_rank, process_set = ctx.how
        found = synchronize(allreduce_async(gradients[0], None, None, Sum, process_set=process_set))
        # What the others had was not used.
        return None, None, None, found if current().rank == root_rank else torch.zeros_like(found)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet, given: Tensor
    ) -> tuple[Tensor, Tensor]:
        _with_rows([given], "alltoall")
        size = current().engine_of(process_set).group.size
        if splits is None and len(given) % size == 0:
            splits = [len(given) // size] * size
            # Others may have another number of rows, and need not say how they split them either.
        found, received = _split_result(synchronize(alltoall_async(given, splits, name, process_set)))
        ctx.how = received, process_set
        ctx.mark_non_differentiable(received)
        return found, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        received, process_set = ctx.how
        found, _ = _split_result(synchronize(alltoall_async(gradients[0], received, None, process_set)))
        return None, None, None, found


def _split_result(found: Any) -> tuple[Tensor, Tensor]:
    tensor, received = found
    return tensor, received


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOp,
        name: str | None,
        scales: tuple[float, float],
        process_set: ProcessSet,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, scales, process_set
        handle = grouped_reducescatter_async(given, name, op, process_set, *scales)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, (prescale, postscale), process_set = ctx.how
        size = current().engine_of(process_set).group.size
        factor = prescale * postscale / (size if op is Average else 1)
        scaled = [gradient * factor for gradient in gradients]
        found = synchronize(grouped_allgather_async(scaled, None, process_set))
        return None, None, None, None, *found
