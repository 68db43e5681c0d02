"""What happens to a unit while the model runs: when it is gathered, reduced and let go."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shoal.strategies.mesh.sharded.agreement import UseAgreement
from shoal.strategies.mesh.sharded.unit import ShardedUnit


class GradientHooks:
    """Reduces a unit's gradients as soon as its backward pass has left all of them."""

    def __init__(self, number: int, unit: ShardedUnit, agreement: UseAgreement) -> None:
        self._number = number
        self._agreement = agreement
        self.unit = unit
        self._all = {id(param) for param in unit.params.values()}
        self._missing = set(self._all)
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._on_gradient) for param in unit.params.values()
        ]

    def _on_gradient(self, param: torch.Tensor) -> None:
        self._missing.discard(id(param))
        if not self._missing:
            self._end_backward()

    def _end_backward(self) -> None:
        self._missing = set(self._all)
        self._agreement.reduce(self._number)

    def begin(self) -> None:
        """Something is about to run."""

    def finish(self) -> None:
        """The passes of this process are over; some may have left only some of the gradients."""
        self._missing = set(self._all)
        if self.unit.has_gradients():
            self._agreement.reduce(self._number)

    def remove(self) -> None:
        """Let the model run without them."""
        for handle in self._handles:
            handle.remove()


class ParameterHooks(GradientHooks):
    """Also gathers a unit's parameters before its layers run, forward or back, and lets them go afterwards.

    A backward pass reaches the unit through what its layers have put out; where nothing can be found in that (an
    unknown kind of object), the unit stays gathered.
    """

    def __init__(self, number: int, unit: ShardedUnit, agreement: UseAgreement) -> None:
        super().__init__(number, unit, agreement)
        self._running = 0
        self._is_in_backward = False
        for module in unit.modules:
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                # A recomputed forward pass may be left in the middle by an exception.
                module.register_forward_hook(self._after_forward, always_call=True),
            ]

    def _gather(self) -> None:
        if not self.unit.is_gathered:
            self._agreement.gather(self._number)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self._running += 1
        self._gather()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running -= 1
        if torch.is_grad_enabled():
            self._watch(output)
        if module is self.unit.modules[-1]:
            self._let_go()

    def _watch(self, output: Any) -> None:
        reached = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for tensor in reached:
            tensor.register_hook(self._before_backward)
        if not reached:
            self._is_in_backward = True

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self._is_in_backward = True
        self._gather()

    def _end_backward(self) -> None:
        self._is_in_backward = False
        self._let_go()  # first: reducing needs memory
        super()._end_backward()

    def _let_go(self) -> None:
        if not self._running and not self._is_in_backward:
            self.unit.let_go()

    def finish(self) -> None:
        self._running = 0
        self._is_in_backward = False
        self._let_go()
        super().finish()


class RootHooks(GradientHooks):
    """The root's parameters are used anywhere: they are here as long as anything runs."""

    def begin(self) -> None:
        self._agreement.gather(self._number)

    def finish(self) -> None:
        self.unit.let_go()
        super().finish()
