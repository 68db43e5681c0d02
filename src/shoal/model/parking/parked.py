"""Parameters whose values are in a file: a process can build a model that it could not hold.

A parked parameter has a shape, a dtype and strides, and is a parameter to everybody who asks. An operation on it
brings its values in, works on them, and puts them back where it has changed them; so initialisation draws the same
random numbers, in the same order, as in a process that holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from shoal.checkpoint.stored import StoredTensor, ValuesFile
from shoal.model.parking.scratch_file import ScratchFile

_View = Callable[[Any], Any]
"""A step from values to a view of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Spot:
    """Where a parameter's values are."""

    file: ValuesFile
    """A scratch file, or one that somebody saved and that nobody changes."""
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def fetch(self) -> torch.Tensor:
        values = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return self.file.read_into(self.offset, values)

    @property
    def scratch(self) -> ScratchFile:
        """The file, to be written to."""
        if not isinstance(self.file, ScratchFile):
            raise TypeError("values that were read from a saved file cannot be changed in place; change a copy")
        return self.file


class Parked(torch.Tensor):
    """The whole of a parked parameter, or a view of it."""

    _spot: _Spot
    _views: tuple[_View, ...]
    _looks: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, spot: _Spot, looks: torch.Tensor, views: tuple[_View, ...] = ()) -> Parked:
        """`looks` is a tensor without values that has the shape and strides of this."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            looks.shape,
            strides=looks.stride(),
            storage_offset=looks.storage_offset(),
            dtype=looks.dtype,
            device=torch.device("cpu"),
        )
        assert isinstance(made, Parked)
        made._spot, made._looks, made._views = spot, looks, views
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parked(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copy = park(unpark(self), self._spot.scratch, requires_grad=self.requires_grad)
            memo[id(self)] = copy if isinstance(self, nn.Parameter) else copy.detach()
        found: torch.Tensor = memo[id(self)]
        return found

    @property
    def data(self) -> torch.Tensor:
        """The values without their history, as of any tensor."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if not isinstance(values, Parked):
            values = park(values, self._spot.scratch, requires_grad=False).detach()
        assert isinstance(values, Parked)
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]
        self._spot, self._looks, self._views = values._spot, values._looks, values._views

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            return NotImplemented  # another shape for the same values: torch says who asked for it
        if func.is_view:
            return _view(func, args, kwargs)
        return _operate(func, args, kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What looks at the same values: it is fetched when somebody asks for them."""
    origin, *rest = args

    def looked_at(whole: torch.Tensor) -> Any:
        return func(whole, *rest, **kwargs)

    looks = looked_at(origin._looks)
    if isinstance(looks, torch.Tensor):
        return Parked(origin._spot, looks, (*origin._views, looked_at))
    return [
        Parked(origin._spot, each, (*origin._views, looked_at, partial(_item, number)))
        for number, each in enumerate(looks)
    ]


def _item(number: int, several: Any) -> torch.Tensor:
    found: torch.Tensor = several[number]
    return found


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bring in what is parked, operate, and put back what has changed."""
    present: dict[_Spot, torch.Tensor] = {}
    origins: dict[int, Parked] = {}

    def bring(parked: Parked) -> torch.Tensor:
        values = present.get(parked._spot)
        if values is None:
            values = present[parked._spot] = parked._spot.fetch()
        for view in parked._views:
            values = view(values)
        origins[id(values)] = parked
        return values

    real_args, real_kwargs = tree_map_only(Parked, bring, (args, kwargs))
    found = func(*real_args, **real_kwargs)
    for spot in _written(func, args, kwargs):
        spot.scratch.write(spot.offset, present[spot])
    if func is torch.ops.aten._to_copy.default and isinstance(args[0]._spot.file, ScratchFile):
        # A model in another precision is as large as the one before.
        return park(found, args[0]._spot.file, requires_grad=False).detach()
    return tree_map(lambda each: origins.get(id(each), each), found)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[_Spot]:
    """Those whose values the operation changes."""
    spots: set[_Spot] = set()
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            tree_map_only(Parked, lambda parked: spots.add(parked._spot), given)
    return spots


def park(values: torch.Tensor, file: ScratchFile, *, requires_grad: bool) -> nn.Parameter:
    """A parameter of these values, which are in the file alone once the caller forgets them."""
    values = values.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense.default(values):
        values = values.contiguous()
    looks = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
    spot = _Spot(
        file=file, offset=file.append(values), shape=values.shape, stride=values.stride(), dtype=values.dtype
    )
    return nn.Parameter(Parked(spot, looks), requires_grad=requires_grad)


def parked_from(stored: StoredTensor) -> torch.Tensor:
    """A tensor that somebody saved; its values are read when an operation asks for them."""
    looks = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    spot = _Spot(
        file=stored.file, offset=stored.offset, shape=looks.shape, stride=looks.stride(), dtype=looks.dtype
    )
    return Parked(spot, looks)


def take_over(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> set[str]:
    """Let parked parameters have their values where those of this name were saved: nobody has to move them.
    Returns the names of those that do."""
    taken: set[str] = set()
    for name, param in module.named_parameters(remove_duplicate=False):
        values = saved.get(name)
        if not isinstance(param, Parked) or not isinstance(values, Parked):
            continue
        if (param.shape, param.dtype, param.stride()) == (values.shape, values.dtype, values.stride()):
            param.data = values
            taken.add(name)
    return taken


def unpark(tensor: torch.Tensor) -> torch.Tensor:
    """The values themselves, in memory of their own where the tensor is parked; else the tensor."""
    if not isinstance(tensor, Parked):
        return tensor
    values = tensor._spot.fetch()
    for view in tensor._views:
        values = view(values)
    return values


def unpark_module(module: nn.Module, but: Collection[str] = ()) -> None:
    """Bring a module's parameters into memory, but those named; those that were one stay one."""
    waiting = {id(param) for name, param in module.named_parameters(remove_duplicate=False) if name in but}
    _replace(module, lambda parked: parked if id(parked) in waiting else unpark(parked))


@contextmanager
def brought_in(module: nn.Module) -> Iterator[None]:
    """Have a module's parked parameters in memory for a while; changes of them are lost."""
    were = _replace(module, unpark)
    try:
        yield
    finally:
        _put_back(module, {id(now): was for was, now in were})


def _put_back(module: nn.Module, parked: Mapping[int, Parked]) -> None:
    for layer in module.modules():
        for name, param in layer._parameters.items():
            if id(param) in parked:
                layer._parameters[name] = parked[id(param)]  # type: ignore[assignment]


Values = Callable[[nn.Parameter], torch.Tensor]
"""Gives the values that a parameter has, or will have."""


def hollow_out(module: nn.Module) -> Values:
    """Put parameters that take no memory, and read as NaN, in the place of parked ones: somebody will set their
    `data`. Returns what gives the values of any parameter."""
    parked: dict[int, torch.Tensor] = {}

    def hollow(param: Parked) -> torch.Tensor:
        return torch.full((), torch.nan, dtype=param.dtype).expand(param.shape)

    for was, now in _replace(module, hollow):
        parked[id(now)] = was
    return lambda param: unpark(parked.get(id(param), param)).detach()


def _replace(module: nn.Module, make: Callable[[Parked], torch.Tensor]) -> list[tuple[Parked, nn.Parameter]]:
    """Make other parameters of parked ones; which became which."""
    made: dict[int, tuple[Parked, nn.Parameter]] = {}
    for layer in module.modules():
        for name, param in layer._parameters.items():
            if isinstance(param, Parked):
                if id(param) not in made:
                    values = make(param)
                    same = values is param
                    made[id(param)] = param, param if same else nn.Parameter(values, param.requires_grad)
                layer._parameters[name] = made[id(param)][1]
    return list(made.values())
