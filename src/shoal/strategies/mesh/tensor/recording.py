"""One pass of the whole model on a few samples: which layers are called in which order, and with what."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.model.replica import Replica
from shoal.step.compute import plain_loss
from shoal.strategies.mesh.tensor.observing import Inputs


@dataclass
class Recording:
    """What was seen. Modules are known by identity."""

    order: list[nn.Module] = field(default_factory=list)
    """Modules without children, as they were first called."""
    inputs: dict[int, Inputs] = field(default_factory=dict)
    """Of modules with children: the arguments of their first call, copied to the host's memory."""

    sources: dict[int, list[int]] = field(default_factory=dict)
    """Of modules without children: those whose output was their argument, as it was."""

    def was_called(self, module: nn.Module) -> bool:
        """Whether a leaf module took part."""
        return any(module is each for each in self.order)


def record(replica: Replica) -> Recording:
    """Run the replica's model on its sample; empty where it has none."""
    # Otherwise torch's own transformer layers read the weights of the layers in them, in place of calling these.
    torch.backends.mha.set_fastpath_enabled(False)
    seen = Recording()
    if replica.sample is None:
        return seen

    outputs: dict[int, tuple[torch.Tensor, list[int]]] = {}  # kept, for another tensor may get the number of one

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                outputs.setdefault(id(leaf), (leaf, []))[1].append(id(module))

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(True for _ in module.children()):
            if not seen.was_called(module):
                seen.order.append(module)
                found = [outputs[id(value)][1] for value in args if id(value) in outputs]
                seen.sources[id(module)] = [source for sources in found for source in sources]
        elif id(module) not in seen.inputs:
            # What cannot be copied cannot be tried either: then there are no inputs.
            try:
                seen.inputs[id(module)] = tree_map(_kept, copy.deepcopy((args, kwargs)))
            except Exception:
                return

    modules = list(replica.module.modules())
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    handles += [
        module.register_forward_hook(note_output) for module in modules if any(True for _ in module.children())
    ]
    try:
        with undisturbed(replica.module), torch.no_grad():
            plain_loss(replica, sample_of(replica))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def sample_of(replica: Replica) -> Any:
    """A few samples of the task, where its model is."""
    assert replica.sample is not None
    device = replica.device
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, replica.sample())


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; buffers, modes and random numbers are afterwards what they were.

    A compiled model is followed as it was written: what a worker has compiled before calls no module any more, and
    the first worker has looked at the model when others have not.
    """
    modes = [(each, each.training) for each in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.eval()
    try:
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for each, mode in modes:
            each.training = mode


def _kept(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
