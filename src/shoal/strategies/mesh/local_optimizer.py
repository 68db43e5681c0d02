"""The task's optimizer over the parts that this process holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shoal.checkpoint.model_stream import TensorLooks
from shoal.errors import SpecError
from shoal.model.optimizer.kinds import (
    ELEMENTWISE,
    changed_settings,
    prefer_fused,
    rebuild,
    settings_of,
    state_schema,
)
from shoal.model.optimizer.state import COUNT, by_parameter, copied_number, copied_state, counted_beside
from shoal.model.replica import Replica
from shoal.strategies.groups.plain import share_plain
from shoal.strategies.mesh.axes import Axes
from shoal.strategies.mesh.held import Held, in_span, in_width


class LocalOptimizer:
    """Has the groups and settings of the task's own, which was made on whole parameters."""

    def __init__(self, replica: Replica, numbers: Mapping[str, int], held: Sequence[Held], axes: Axes) -> None:
        self.held = [one for one in held if one.tensor.numel()]
        self._axes = axes
        self._template = replica.optimizer
        self._schema = state_schema(replica.optimizer)
        self._by_element = type(replica.optimizer) in ELEMENTWISE
        _check(replica, held)
        self._params = {one.name: one.tensor if self._by_element else _whole(one) for one in self.held}
        """By name: what the optimizer updates."""
        groups = [
            {**settings_of(group), "params": [p for name, p in self._params.items() if numbers[name] == number]}
            for number, group in enumerate(self._template.param_groups)
        ]
        self._used = [number for number, group in enumerate(groups) if group["params"]]
        self._own = self._make([groups[number] for number in self._used]) if self._used else None
        self._told: dict[int, dict[str, Any]] = {}
        """By number of a group: the settings that the task's own had at the last step."""
        self._load(replica.start.optimizer)

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        own = rebuild(self._template, groups)
        prefer_fused(own)
        if not self._by_element:
            own.state = self._template.state  # so that who asks the task's own what it keeps is told
        return own

    def step(self) -> None:
        """Update what is here."""
        if self._own is None:
            return
        for number, group in zip(self._used, self._own.param_groups, strict=True):
            wanted = settings_of(self._template.param_groups[number])
            # What an optimizer changes in its groups itself is its own: only what others changed is told.
            group.update(changed_settings(self._told.get(number, group), wanted))
            self._told[number] = wanted
        if self._by_element:
            _step_newcomers_apart(self._own)
        else:
            self._step_whole(self._own)

    def _step_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients come as flat as the parts are; here they are as the parameters."""
        for one in self.held:
            gradient, param = one.tensor.grad, self._params[one.name]
            param.grad = None if gradient is None else gradient.view(param.shape)
        optimizer.step()
        for param in self._params.values():
            param.grad = None

    def looks(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorLooks]:
        """All that is kept for any parameter, by `parameter/key`, as it looks whole; everybody calls this.

        `shapes`: those of whole parameters, by name.
        """
        own = {}
        for one in self.held:
            for key, value in self._kept(one).items():
                shape = shapes[one.name] if self.is_cut(key) else tuple(value.shape)
                own[f"{one.name}/{key}"] = (str(value.dtype).removeprefix("torch."), shape)
        found = {path: told for each in share_plain(own, self._axes.everybody) for path, told in each.items()}
        return {
            path: TensorLooks(dtype=getattr(torch, dtype), shape=tuple(shape))
            for path, (dtype, shape) in found.items()
        }

    def is_cut(self, key: str) -> bool:
        """Whether what is kept under this key is cut where its parameter is."""
        return self._schema is not None and key in self._schema.mirrored

    def value(self, key: str, one: Held) -> torch.Tensor | None:
        """What is kept here under this key."""
        return self._kept(one).get(key)

    def _kept(self, one: Held) -> dict[str, torch.Tensor]:
        param = self._params.get(one.name)
        kept = {} if self._own is None or param is None else self._own.state.get(param, {})
        return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}

    def _load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Begin with what an earlier run left: of each whole tensor, the part that is here."""
        states = by_parameter(saved)
        if self._own is None:
            return
        beside = counted_beside(self._own)
        for one in self.held:
            if one.name not in states:
                continue
            param, kept = self._params[one.name], states[one.name]
            counts_beside = id(param) in beside
            self._own.state[param] = (
                {key: self._part(one, key, value, counts_beside=counts_beside) for key, value in kept.items()}
                if self._by_element
                else copied_state(param, kept, counts_beside=counts_beside)
            )

    def _part(self, one: Held, key: str, value: torch.Tensor, *, counts_beside: bool) -> torch.Tensor:
        wide = in_width(one, value, self._axes)
        if wide.shape != one.shape or key == COUNT:
            return copied_number(key, value, one.tensor, counts_beside=counts_beside)
        return torch.empty_like(one.tensor).copy_(in_span(one, wide, self._axes))


def _step_newcomers_apart(optimizer: torch.optim.Optimizer) -> None:
    """Fused SGD wants all parameters of a step to have momentum already, or none; one that was never used before
    has none."""
    used = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    known = {p: p.grad for p in used if optimizer.state.get(p)}
    if known and len(known) < len(used):
        for p in known:
            p.grad = None
        optimizer.step()
        for p in used:
            p.grad = known.get(p)
    optimizer.step()


def _whole(one: Held) -> torch.Tensor:
    """A parameter that is here as a whole, in its own shape; parts of a vector are flat."""
    return one.tensor if one.tensor.shape == one.shape else one.tensor.detach().view(one.shape)


def _check(replica: Replica, held: Iterable[Held]) -> None:
    """What an optimizer does with a part of a parameter must be what it does with the whole."""
    kind = type(replica.optimizer)
    if issubclass(kind, torch.optim.LBFGS):
        raise SpecError(f"{kind.__name__} works on the whole model at once, which is cut here; use data.")
    if kind in ELEMENTWISE:
        return
    for one in held:
        if one.split is not None:
            raise SpecError(
                f"{kind.__name__} works on whole parameters, but {one.name!r} is cut by its width, so that nobody "
                "has all of it; use sharded:policy=layer, pipeline or data, or an optimizer that works element by "
                "element, such as AdamW."
            )
        if sum(span.stop > span.start for span in one.spans) > 1:
            raise SpecError(
                f"{kind.__name__} works on whole parameters, but several workers keep parts of {one.name!r}; use "
                "policy=layer or policy=count, which leave them whole, or an optimizer that works element by "
                "element, such as AdamW."
            )


def group_numbers(replica: Replica) -> dict[str, int]:
    """By name of a trained parameter: the number of its group. Asked before the model is cut."""
    numbers: dict[int, int] = {
        id(p): number for number, group in enumerate(replica.optimizer.param_groups) for p in group["params"]
    }
    return {name: numbers[id(p)] for name, p in replica.trained.items()}
