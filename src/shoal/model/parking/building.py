"""Building a model of which this process holds a few parameters at a time; the others wait in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal.model.parking.parked import park
from shoal.model.parking.scratch_file import ScratchFile

LEAST_BYTES = 1 << 16
"""Smaller parameters stay in memory."""
_REFERENCES_HERE = 2
"""To a parameter while we count: those of a variable and of the call that counts."""


class Parking:
    """Parks the parameters of a model while it is built.

    One that anything but its layers refers to stays in memory, for whoever refers to it may still change it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = ScratchFile(folder)
        self._waiting: list[tuple[nn.Module, str]] = []

    @contextmanager
    def building(self) -> Iterator[None]:
        """Park what layers register from here on, each as soon as the next one comes."""
        hook = register_module_parameter_registration_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def park_rest(self, module: nn.Module) -> None:
        """The model is built: park the last, and what layers have got in other ways, such as copies of layers."""
        self._waiting = [(layer, name) for layer in module.modules() for name in layer._parameters]
        self._park_free()
        self._waiting.clear()

    def _note(self, layer: nn.Module, name: str, param: nn.Parameter) -> None:
        self._park_free()
        if _can_be_parked(param) and (layer, name) not in self._waiting:
            self._waiting.append((layer, name))

    def _park_free(self) -> None:
        """Park those that nobody else refers to."""
        uses: dict[int, list[tuple[nn.Module, str]]] = {}
        for layer, name in self._waiting:
            if _can_be_parked(layer._parameters.get(name)):
                uses.setdefault(id(layer._parameters[name]), []).append((layer, name))
        self._waiting = [use for held in uses.values() if not self._is_parked_now(held) for use in held]

    def _is_parked_now(self, uses: list[tuple[nn.Module, str]]) -> bool:
        layer, name = uses[0]
        param = layer._parameters[name]
        if param is None or sys.getrefcount(param) > len(uses) + _REFERENCES_HERE:
            return False
        parked = park(param, self._file, requires_grad=param.requires_grad)
        for layer, name in uses:
            layer._parameters[name] = parked
        return True


def _can_be_parked(param: nn.Parameter | None) -> bool:
    """Whether it is large, and an ordinary parameter; one without a shape yet is not."""
    return type(param) is nn.Parameter and param.device.type == "cpu" and param.nbytes >= LEAST_BYTES
