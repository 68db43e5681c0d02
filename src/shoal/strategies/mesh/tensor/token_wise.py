"""Functions that treat every token by itself, so that they can work on a part of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from shoal.comm.group import Group
from shoal.strategies.mesh.tensor.sequence_collectives import cut_rows, rows_of, use_in_rows


class RowsTensor(torch.Tensor):
    """Looks like a whole tensor, of which it holds some rows; what the functions here must know of it."""

    local: torch.Tensor
    workers: Group

    @property
    def length(self) -> int:
        """Rows of the whole."""
        return self.shape[-2]

    @property
    def is_part(self) -> bool:
        """Whether `local` may be used."""
        raise NotImplementedError

    def alike(self, local: torch.Tensor) -> RowsTensor:
        """Another tensor, of which this worker has the same rows."""
        raise NotImplementedError

    def replace_local(self, local: torch.Tensor) -> bool:
        """Take other values in place; False where that cannot be."""
        raise NotImplementedError


def on_parts(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives of parts; None where it needs the whole."""
    handler = _HANDLERS.get(func)
    return None if handler is None else handler(func, args, kwargs)


class _Apart(Exception):
    """An operand cannot be cut as the part is."""


def _elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowsTensor | None:
    if kwargs.get("inplace") or "out" in kwargs:
        return None
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RowsTensor))
    try:
        own_args, own_kwargs = tree_map(lambda value: _own(value, first), (tuple(args), dict(kwargs)))
    except _Apart:
        return None
    return first.alike(func(*own_args, **own_kwargs))


def _own(value: Any, beside: RowsTensor) -> Any:
    """What an operand has for this worker's rows."""
    if isinstance(value, RowsTensor):
        if not value.is_part or value.length != beside.length:
            raise _Apart
        return value.local
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) not in (torch.Tensor, nn.Parameter):
        raise _Apart
    if value.dim() < 2 or value.shape[-2] == 1:
        return use_in_rows(beside.workers, value)[0] if value.requires_grad else value
    if value.shape[-2] != beside.length:
        raise _Apart
    return cut_rows(value, beside.workers) if value.requires_grad else rows_of(value, beside.workers)


def _in_place(out_of_place: Callable[..., Any]) -> Callable[..., Any]:
    def handle(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowsTensor | None:
        target = args[0]
        if not isinstance(target, RowsTensor):
            return None
        found = _elementwise(out_of_place, args, kwargs)
        return target if found is not None and target.replace_local(found.local) else None

    return handle


def _norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowsTensor | None:
    """Layer and RMS norms, where they normalise the features of each token."""
    inputs, shape, *rest = args
    weight, bias = kwargs.get("weight"), kwargs.get("bias")
    if rest or len(shape) != 1 or not isinstance(inputs, RowsTensor) or not inputs.is_part:
        return None
    trained = {
        key: one for key, one in (("weight", weight), ("bias", bias)) if one is not None and one.requires_grad
    }
    used = dict(zip(trained, use_in_rows(inputs.workers, *trained.values()), strict=True)) if trained else {}
    return inputs.alike(func(inputs.local, shape, **{**kwargs, **used}))


def _dropout(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowsTensor | None:
    """As many numbers are drawn as for the whole, and this worker uses those of its rows."""
    part = args[0]
    if not part.is_part or len(args) > 1 or kwargs.get("inplace"):
        return None
    if not kwargs["training"] or not kwargs["p"]:
        return part
    noise = F.dropout(torch.ones(part.shape, dtype=part.dtype, device=part.device), kwargs["p"])
    return part.alike(part.local * rows_of(noise, part.workers))


def _over_features(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowsTensor | None:
    part = args[0]
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    is_last = dim in (-1, part.dim() - 1, [-1], (-1,))
    is_kept = bool(kwargs.get("keepdim", len(args) > 2 and args[-1] is True))
    return _elementwise(func, args, kwargs) if is_last and is_kept else None


def _cast(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowsTensor | None:
    part, *rest = args
    if not part.is_part or any(isinstance(value, torch.Tensor) for value in (*rest, *kwargs.values())):
        return None
    found = func(part.local, *rest, **kwargs)
    return part if found is part.local else part.alike(found)


def _same_kind(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of a given shape, of the type of this one."""
    return func(args[0].local, *args[1:], **kwargs)


def _register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A backward pass comes by the part alone."""
    return args[0].local.register_hook(*args[1:], **kwargs)


def _all_of(names: Iterable[str]) -> list[Callable[..., Any]]:
    """The functions that torch has under these names, wherever."""
    owners = (torch, torch.Tensor, F)
    return [getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)]


_OPERATORS = ("add", "sub", "mul", "truediv", "pow")
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        _all_of(
            [
                *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "neg"),
                *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")),
                *("__neg__", "sqrt", "rsqrt", "square", "exp", "sigmoid", "tanh", "relu", "gelu", "silu", "clone"),
            ]
        ),
        _elementwise,
    ),
    **{
        func: _in_place(getattr(torch, name))
        for name in ("add", "sub", "mul", "div")
        for func in _all_of([f"{name}_", f"__i{name.replace('div', 'truediv')}__"])
    },
    F.layer_norm: _norm,
    F.rms_norm: _norm,
    F.dropout: _dropout,
    **dict.fromkeys(_all_of(["mean", "var", "std"]), _over_features),
    **dict.fromkeys(_all_of(["to", "float", "half", "bfloat16", "double", "contiguous"]), _cast),
    **dict.fromkeys(_all_of(["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"]), _same_kind),
    torch.Tensor.register_hook: _register_hook,
}
