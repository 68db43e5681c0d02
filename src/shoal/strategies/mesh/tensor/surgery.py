"""Puts parts of layers in the place of whole ones, and takes them out again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shoal.layout.tensor_plan import LayerCut, Region, SequenceStream
from shoal.strategies.mesh.tensor.building import Parts, build
from shoal.strategies.mesh.tensor.narrowed import narrow_inputs
from shoal.strategies.mesh.tensor.sequence import cut_stream, end_stream


@dataclass
class Surgery:
    """What has been done to a model, so that it can be undone. Layers are known by name."""

    root: nn.Module
    named: Mapping[str, nn.Module]
    """The whole layers and blocks, by name in the task's model."""
    parts: Parts
    _replaced: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    _divided: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)

    def cut(self, cuts: Iterable[LayerCut]) -> None:
        """Replace these layers by this worker's parts of them, wherever they are used."""
        layers = [(self.named[cut.layer], cut) for cut in cuts]
        made = {id(layer): build(layer, cut, self.parts) for layer, cut in layers}
        for parent in list(self.root.modules()):
            for key, child in parent._modules.items():
                if id(child) in made and child is not None:
                    self._replaced.append((parent, key, child))
                    parent._modules[key] = made[id(child)]

    def cut_region(self, region: Region) -> None:
        """Cut layers that fit each other, and tell the modules around them how much is left to each worker."""
        self.cut(region.cuts)
        for name, attribute in region.divided:
            module = self.named[name]
            if any(module is done and attribute == of for done, of, _ in self._divided):
                continue  # by another region of the same block
            value = getattr(module, attribute)
            self._divided.append((module, attribute, value))
            setattr(module, attribute, value // self.parts.workers.size)
        if region.narrowed:
            block = self.named[region.block]
            self._hooks.append(narrow_inputs(block, region.narrowed, self.parts.workers.size))

    def cut_stream(self, stream: SequenceStream) -> None:
        """Give a block its part of the sequence."""
        self._hooks.append(cut_stream(self.named[stream.block], stream.width, self.parts.workers))

    def end_streams(self, modules: Iterable[nn.Module]) -> None:
        """Let what these modules return be whole."""
        self._hooks += [end_stream(module) for module in modules]

    def undo(self) -> None:
        """Make the model whole again."""
        for parent, key, child in reversed(self._replaced):
            parent._modules[key] = child
        for module, attribute, value in reversed(self._divided):
            setattr(module, attribute, value)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._replaced.clear()
        self._divided.clear()
