"""`DistributedOptimizer`: a torch optimizer whose steps use everybody's gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.horovod.reductions import ReduceOp
from shoal.horovod.runtime import ProcessSet, global_process_set
from shoal.horovod.torch.compression import Compression, Compressor
from shoal.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from shoal.model.optimizer.kinds import prefer_fused

_RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer."
    "synchronize(). This is prohibited as it can cause a race condition."
)


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """How gradients are reduced."""

    compression: type[Compressor]
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")

    @property
    def scales(self) -> tuple[ReduceOp, float, float]:
        """The operation, and by what gradients are multiplied before it and after it."""
        if self.op is Average and self.predivide != 1:
            size = self.process_set.size()
            return Sum, 1 / self.predivide, self.predivide / size
        return self.op, 1.0, 1.0


@dataclass(eq=False, kw_only=True)
class _Group:
    """Parameters whose gradients are reduced together."""

    name: str
    params: list[Parameter]
    ready: dict[Parameter, None] = field(default_factory=dict)


class GradientReducer:
    """Reduces each gradient as soon as the backward passes of a step have left it."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        groups: Sequence[Sequence[Parameter]],
        passes: int,
        options: ReduceOptions,
    ) -> None:
        self._options = options
        self._names = {param: name for name, param in named}
        self._group_of: dict[Parameter, _Group] = {}
        for number, members in enumerate(groups):
            group = _Group(name=f"group.{number}", params=[param for param in members if param in self._names])
            self._group_of.update(dict.fromkeys(group.params, group))
        self.passes = passes
        self._left: dict[Parameter, int] = {}
        self._open: dict[Parameter, tuple[int, Callable[[Any], None]]] = {}
        """Handles by parameter, or by the first of a group, and what is done with their results."""
        self._begun: set[Parameter] = set()
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._take) for _, param in named if param.requires_grad
        ]

    @property
    def is_open(self) -> bool:
        """Whether something was begun that nobody has waited for."""
        return bool(self._begun)

    def _take(self, param: Tensor) -> None:
        assert isinstance(param, Parameter)
        left = self._left.get(param, self.passes) - 1
        if left < 0 or param in self._begun:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step={self.passes} times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._left[param] = left
        if left == 0:
            self._begin(param)

    def _begin(self, param: Parameter) -> None:
        self._begun.add(param)
        group = self._group_of.get(param)
        if group is None:
            self._reduce_alone(param)
            return
        group.ready[param] = None
        if len(group.ready) == len(group.params):
            group.ready.clear()
            self._reduce_group(group)

    def _reduce_alone(self, param: Parameter) -> None:
        options, name = self._options, self._names[param]
        gradient = param.grad
        assert gradient is not None
        if gradient.is_sparse and not options.sparse_as_dense:
            handle = sparse_allreduce_async(gradient, name, options.op, options.process_set)
            self._open[param] = handle, lambda found: setattr(param, "grad", found)
            return
        if gradient.is_sparse:
            gradient = param.grad = gradient.to_dense()
        op, before, after = options.scales
        small, context = options.compression.compress(gradient)
        handle = allreduce_async_(small, None, name, op, before, after, options.process_set)
        self._open[param] = handle, lambda found: self._give(param, found, context)

    def _reduce_group(self, group: _Group) -> None:
        options = self._options
        op, before, after = options.scales
        gradients = [_dense_gradient(param) for param in group.params]
        small = [options.compression.compress(gradient) for gradient in gradients]
        handle = grouped_allreduce_async_(
            [one for one, _ in small], None, group.name, op, before, after, options.process_set
        )

        def give(found: list[Tensor]) -> None:
            for param, one, (_, context) in zip(group.params, found, small, strict=True):
                self._give(param, one, context)

        self._open[group.params[0]] = handle, give

    def _give(self, param: Parameter, found: Tensor, context: Any) -> None:
        gradient = self._options.compression.decompress(found, context)
        if param.grad is not gradient:
            param.grad = gradient

    def synchronize(self) -> None:
        """Wait until all gradients are everybody's. Those that this rank did not compute are zeros here: others
        may have computed them."""
        for param in self._names:
            if param.requires_grad and param not in self._begun:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                self._begin(param)
        for handle, give in self._open.values():
            give(synchronize(handle))
        self._open.clear()
        self.forget()

    def forget(self) -> None:
        """The next pass begins a step."""
        self._begun.clear()
        self._left.clear()

    def close(self) -> None:
        """Leave the parameters alone."""
        for hook in self._hooks:
            hook.remove()


def _dense_gradient(param: Parameter) -> Tensor:
    assert param.grad is not None
    if param.grad.is_sparse:
        param.grad = param.grad.to_dense()
    return param.grad


class ReducedSteps:
    """What a wrapped optimizer does besides its own: mixed in before its class."""

    _reducer: GradientReducer
    _synchronizes: bool = True
    _is_synchronized: bool = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """So many backward passes make a step from now on."""
        self._reducer.passes = passes
        self._reducer.forget()

    def synchronize(self) -> None:
        """Wait for everybody's gradients, as to clip them before `step`."""
        self._reducer.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block `step` does not wait for gradients: `synchronize` was called before."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step with everybody's gradients."""
        if self._synchronizes:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        self._use_plain_kernels_where_sparse()
        return super().step(closure)  # type: ignore[misc]

    def _use_plain_kernels_where_sparse(self) -> None:
        """Fused ones, which were chosen before any gradient was seen, take dense gradients only."""
        optimizer: Any = self
        for group in optimizer.param_groups:
            if group.get("fused") and any(
                param.grad is not None and param.grad.is_sparse for param in group["params"]
            ):
                group["fused"] = None

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As its own; refused while gradients are being reduced."""
        if self._reducer.is_open:
            raise AssertionError(_RACE)
        return super().zero_grad(*args, **kwargs)  # type: ignore[misc]


class AdasumSteps:
    """With Adasum, what is combined is not gradients but the steps that each rank's optimizer would take."""

    _options: ReduceOptions

    def synchronize(self) -> None:
        """Nothing has to be waited for before the step."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused: steps are combined in `step`."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Everybody's steps as one."""
        optimizer: Any = self
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        before = [param.detach().clone() for param in params]
        loss = super().step(closure)  # type: ignore[misc]
        options = self._options
        with torch.no_grad():
            moves = [options.compression.compress(param - old) for param, old in zip(params, before, strict=True)]
            handles = [
                allreduce_async_(move, None, f"adasum.{number}", Adasum, process_set=options.process_set)
                for number, (move, _) in enumerate(moves)
            ]
            for param, old, handle, (_, context) in zip(params, before, handles, moves, strict=True):
                param.copy_(old + options.compression.decompress(synchronize(handle), context))
        return loss


def DistributedOptimizer(  # as Horovod calls it
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, with everybody's gradients in its steps: an object of a class that is one of its own's."""
    op = ReduceOp(op)
    named = _checked_names(optimizer, named_parameters)
    options = ReduceOptions(
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    kind = type(optimizer)
    mixed = AdasumSteps if op is Adasum else ReducedSteps
    wrapped: Any = type(kind.__name__, (mixed, kind), {})
    # The same optimizer, with its groups, state and options; only its class is another.
    prefer_fused(optimizer)
    made = wrapped.__new__(wrapped)
    # A scheduler that was made before has put a `step` of its own there, which knows the other one.
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    if op is Adasum:
        made._options = options
    else:
        made._reducer = GradientReducer(
            named, _grouped(named, num_groups or groups), backward_passes_per_step, options
        )
    return made


def _checked_names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, Parameter]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [(f"allreduce.noname.{number}", param) for number, param in enumerate(params)]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) for item in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {id(param) for _, param in named}
    if unnamed := [id(param) for param in params if id(param) not in known]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(map(str, unnamed))}"
        )
    trained = {id(param) for param in params}
    return [(name, param) for name, param in named if id(param) in trained]


def _grouped(
    named: Sequence[tuple[str, Parameter]], groups: int | Sequence[Sequence[Parameter]] | None
) -> list[list[Parameter]]:
    if not groups:
        return []
    if not isinstance(groups, int):
        if not all(isinstance(members, list | tuple) for members in groups):
            raise ValueError("groups should be a non-negative integer or a list of lists of parameters.")
        return [list(members) for members in groups]
    if groups < 0:
        raise ValueError("groups should be a non-negative integer or a list of lists of parameters.")
    params = [param for _, param in named if param.requires_grad]
    bounds = [len(params) * number // groups for number in range(groups + 1)]
    return [params[start:stop] for start, stop in pairwise(bounds) if start < stop]
