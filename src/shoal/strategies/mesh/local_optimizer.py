"""The task's optimizer over the parts that this process holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from shoal.checkpoint.model_stream import TensorLooks
from shoal.errors import SpecError
from shoal.strategies.clipping import clip_together
from shoal.strategies.mesh.axes import Axes
from shoal.strategies.mesh.held import Held, HeldSpan
from shoal.strategies.mesh.wires import share_plain
from shoal.strategies.optimizer_state import by_parameter
from shoal.strategies.optimizers import ELEMENTWISE, prefer_fused, rebuild, settings_of, state_schema
from shoal.strategies.replica import Replica


class LocalOptimizer:
    """Has the groups and settings of the task's own, which was made on whole parameters."""

    def __init__(self, replica: Replica, numbers: Mapping[str, int], held: Sequence[Held], axes: Axes) -> None:
        self.held = [one for one in held if one.tensor.numel()]
        self._axes = axes
        self._template = replica.optimizer
        self._schema = state_schema(replica.optimizer)
        _check(replica, self.held)
        groups = [
            {**settings_of(group), "params": [one.tensor for one in self.held if numbers[one.name] == number]}
            for number, group in enumerate(self._template.param_groups)
        ]
        self._used = [number for number, group in enumerate(groups) if group["params"]]
        self._own = rebuild(self._template, [groups[number] for number in self._used]) if self._used else None
        if self._own is not None:
            prefer_fused(self._own)
        self._load(replica.start.optimizer)

    def step(self, clip_norm: float | None) -> None:
        """Clip by the norm of the whole model's gradient, and update what is here."""
        if clip_norm is not None:
            updated = [(one, one.tensor.grad) for one in self.held if one.tensor.grad is not None]
            counted = [grad for one, grad in updated if one.counts(self._axes)]
            clip_together([grad for _, grad in updated], counted, clip_norm, self._axes.world.all_reduce_)
        if self._own is None:
            return
        for number, group in zip(self._used, self._own.param_groups, strict=True):
            group.update(settings_of(self._template.param_groups[number]))
        _step_newcomers_apart(self._own)

    def looks(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorLooks]:
        """All that is kept for any parameter, by `parameter/key`, as it looks whole; everybody calls this.

        `shapes`: those of whole parameters, by name.
        """
        own = {}
        for one in self.held:
            for key, value in self._kept(one).items():
                shape = shapes[one.name] if self.is_cut(key) else tuple(value.shape)
                own[f"{one.name}/{key}"] = (str(value.dtype).removeprefix("torch."), shape)
        found = {path: told for each in share_plain(own, self._axes.world) for path, told in each.items()}
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
        kept = {} if self._own is None else self._own.state.get(one.tensor, {})
        return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}

    def _load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Begin with what an earlier run left: of each whole tensor, the part that is here."""
        states = by_parameter(saved)
        for one in self.held:
            if one.name in states and self._own is not None:
                self._own.state[one.tensor] = {
                    key: self._part(one, value) for key, value in states[one.name].items()
                }

    def _part(self, one: Held, value: torch.Tensor) -> torch.Tensor:
        wide = value
        if one.split is not None and value.dim() == len(one.shape):
            wide = one.split.cut(value, self._axes.tensor.index, self._axes.tensor.size)
        if wide.shape != one.shape:
            return value.clone()  # a single number, such as a step count
        span = one.spans[self._axes.shard.index] if one.spans else HeldSpan(0, wide.numel())
        part = wide.reshape(-1)[span.start : span.stop].reshape(one.tensor.shape)
        return torch.empty_like(one.tensor).copy_(part)


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


def _check(replica: Replica, held: Iterable[Held]) -> None:
    """What an optimizer does with a part of a parameter must be what it does with the whole."""
    name = type(replica.optimizer).__name__
    if isinstance(replica.optimizer, torch.optim.LBFGS):
        raise SpecError(f"{name} works on the whole model at once, which is cut here; use data.")
    if type(replica.optimizer) not in ELEMENTWISE and any(one.split or one.spans for one in held):
        raise SpecError(
            f"{name} works on whole parameters, which are cut here; use pipeline or data, or an optimizer that "
            "works element by element, such as AdamW."
        )


def group_numbers(replica: Replica) -> dict[str, int]:
    """By name of a trained parameter: the number of its group. Asked before the model is cut."""
    numbers: dict[int, int] = {
        id(p): number for number, group in enumerate(replica.optimizer.param_groups) for p in group["params"]
    }
    return {name: numbers[id(p)] for name, p in replica.trained.items()}
