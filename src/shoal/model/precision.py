"""In which numbers a replica computes: autocast, the loss scale, and the layers that stay in float32.

Parameters, their gradients and the optimizer's state are float32 in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.errors import Diverged
from shoal.model.half_range import SMALLEST_SCALE, HalfState, Seen, is_measured, measure
from shoal.spec.precision import SCALED

_HALF = (torch.float16, torch.bfloat16)


class Precision:
    """How one process computes, and what it has learnt of gradients together with the others."""

    def __init__(
        self,
        kind: str = "fp32",
        *,
        device: str = "cpu",
        layers: Sequence[str] = (),
        saved: Sequence[float] | None = None,
    ) -> None:
        self.kind = kind
        self.scales = kind in SCALED
        """Whether losses are multiplied, and steps may be skipped."""
        self._device = torch.device(device).type
        self._layers = list(layers) if kind == "adaptive" else []
        self._numbers = {name: number for number, name in enumerate(self._layers)}
        fresh = HalfState(streaks=(0,) * len(self._layers))
        is_alike = saved is not None and len(saved) == len(fresh.values)
        self.state = HalfState.of(saved) if saved is not None and is_alike else fresh
        self._modules: dict[str, list[nn.Module]] = {}
        self._in_float32: dict[str, list[nn.Module]] = {}
        self._told: set[str] = set()
        self._report: Callable[[str], None] = lambda text: None

    def autocast(self, step: int = 0) -> AbstractContextManager[Any]:
        """Run a forward pass and a loss in it; 0 where it belongs to no step."""
        if self.kind == "fp32":
            return nullcontext()
        return torch.autocast(self._device, dtype=self._dtype(step))

    def numbers(self, step: int = 0) -> Hashable:
        """What decides the dtypes of all that a forward pass makes."""
        return None if self.kind == "fp32" else (self._dtype(step), tuple(self.state.too_small))

    def _dtype(self, step: int) -> torch.dtype:
        if self.kind == "fp16":
            return torch.float16
        # bf16 has the range of float32: it shows what fp16 would lose. CPUs are a hundred times slower with fp16.
        is_wide = self.kind == "bf16" or self._device == "cpu" or is_measured(step)
        return torch.bfloat16 if is_wide else torch.float16

    @property
    def scale(self) -> float:
        """What losses are multiplied by before the backward pass."""
        return self.state.scale if self.scales else 1.0

    def bind(
        self,
        module: nn.Module,
        names: Mapping[str, str] | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Know the layers by name; `names`: by a parameter's name in the module, that in the task's model."""
        self._report = report or self._report
        owners: dict[int, list[nn.Module]] = {}
        for layer in module.modules():
            for param in layer.parameters(recurse=False):
                owners.setdefault(id(param), []).append(layer)
        self._modules = {}
        for name, param in module.named_parameters():
            found = self._modules.setdefault(layer_of(name if names is None else names[name]), [])
            found += [layer for layer in owners[id(param)] if layer not in found]
        self.adopt(self.state)

    def measure(self, step: int, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> Seen:
        """Look at gradients that still are multiplied by the scale, by parameter."""
        numbered = (
            (self._numbers.get(layer_of(name), -1), gradient)
            for name, gradient in gradients
            if gradient is not None
        )
        return measure(numbered, len(self._layers), in_full=is_measured(step))

    def after(self, step: int, seen: Seen) -> HalfState:
        """The state that follows from what all processes have seen."""
        return self._checked(step, self.state.after(seen))

    def follow(self, step: int, following: HalfState) -> None:
        """Go on from what a device has made of the state, by the same rules."""
        self.adopt(self._checked(step, following))

    def _checked(self, step: int, following: HalfState) -> HalfState:
        if following.scale < SMALLEST_SCALE:
            raise Diverged(
                f"Task: the gradients of step {step} and of those before it are no numbers, even with a loss "
                f"scale of {self.state.scale:g}; lower the learning rate, or look for bad samples."
            )
        return following

    def conclude(self, step: int, seen: Seen) -> bool:
        """Go on from what all processes have seen; whether the optimizer takes this step."""
        skipped = self.state.skipped
        self.adopt(self.after(step, seen))
        return self.state.skipped == skipped

    def adopt(self, state: HalfState) -> None:
        """Go on from this state; layers that half precision is too small for compute in float32, and no others."""
        self.state = state
        for name in self._in_float32.keys() - set(self.float32_layers):  # it is another model's state
            for layer in self._in_float32.pop(name):
                compute_as_others(layer)
        for name in self.float32_layers:
            if self._in_float32.get(name):
                continue
            self._in_float32[name] = list(self._modules.get(name, ()))  # none where another process has it
            for layer in self._in_float32[name]:
                compute_in_float32(layer, self._device)
            if name not in self._told:
                self._told.add(name)
                self._report(f"{name} computes in float32: its gradients leave the range of half precision")

    @property
    def float32_layers(self) -> list[str]:
        """Names of the layers that half precision is too small for."""
        return [self._layers[number] for number in self.state.too_small]

    def facts(self) -> dict[str, Any]:
        """What the run's results say."""
        found: dict[str, Any] = {"precision": self.kind} if self.kind != "fp32" else {}
        if self.scales:
            found |= {"loss_scale": self.scale, "skipped_steps": self.state.skipped}
        if self.kind == "adaptive":
            found["float32_layers"] = self.float32_layers
        return found

    def widened(self, values: Any) -> Any:
        """What autocast has left in half precision, in float32."""
        return values if self.kind == "fp32" else as_float32(values)


def layer_of(parameter: str) -> str:
    """The name of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def layers_of(module: nn.Module, parameters: Iterable[str]) -> list[str]:
    """Names of the layers that have these parameters and consist of nothing else."""
    names = dict.fromkeys(layer_of(name) for name in parameters)
    return [name for name in names if name and not any(True for _ in module.get_submodule(name).children())]


def compute_in_float32(layer: nn.Module, device: str) -> None:
    """Take a layer out of autocast from now on."""
    layer.forward = partial(_without_autocast, layer.forward, device)


def compute_as_others(layer: nn.Module) -> None:
    """Take it back."""
    assert isinstance(layer.forward, partial)
    layer.forward = layer.forward.args[0]


def _without_autocast(forward: Callable[..., Any], device: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return forward(*as_float32(args), **as_float32(kwargs))


def as_float32(values: Any) -> Any:
    """The same structure; tensors of half precision become float32."""
    if isinstance(values, torch.Tensor):
        return values.float() if values.dtype in _HALF else values
    if isinstance(values, dict):
        return {key: as_float32(value) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(as_float32(value) for value in values)
    return values
