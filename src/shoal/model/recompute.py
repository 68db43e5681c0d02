"""Activation checkpointing: blocks of a model keep their inputs alone; the backward pass computes the rest again.

Random numbers are drawn again as they were, buffers move once, and other processes are asked once, so that no bit
of the result is another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from shoal.model.gathering import Asking, Gathered, now_asked

_FEWEST_LEAVES = 4
"""A shorter sequence of single layers is not worth cutting."""


def recompute_blocks(module: nn.Module) -> int:
    """Let the repeated blocks of a model be computed twice; returns how many there are."""
    blocks = find_blocks(module)
    for block in blocks:
        recompute_whole(block)
    sequences = find_sequences(module, blocks)
    for sequence in sequences:
        sequence.forward = partial(_by_segments, segments_of(sequence))  # type: ignore[method-assign]
    return len(blocks) + len(sequences)


def compute_once(module: nn.Module) -> None:
    """Let a model compute as it did before `recompute_blocks`."""
    for each in module.modules():
        wrapped = each.__dict__.get("forward")
        if isinstance(wrapped, partial) and wrapped.func in (_checkpointed, _by_segments):
            del each.__dict__["forward"]


def recompute_whole(module: nn.Module) -> None:
    """Let a module keep what it is given alone."""
    module.forward = partial(_checkpointed, module.forward, (module,))


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Modules of several layers that are repeated in a Sequential or ModuleList; of nested ones the outermost, but
    the inner ones of a mere sequence of them."""
    kinds = Counter(type(child) for child in module.children() if _is_list(module) and _is_block(child))
    blocks: list[nn.Module] = []
    for child in module.children():
        inner = find_blocks(child)
        is_repeated = kinds[type(child)] > 1 and _is_block(child) and not (inner and _is_list(child))
        blocks += [child] if is_repeated else inner
    return list(dict.fromkeys(blocks))


def find_sequences(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Sequential]:
    """Long sequences of single layers outside of the blocks."""
    if module in blocks:
        return []
    leaves = [child for child in module.children() if not any(True for _ in child.children())]
    if type(module) is nn.Sequential and len(leaves) == len(module) >= _FEWEST_LEAVES:
        return [module]
    return [found for child in module.children() for found in find_sequences(child, blocks)]


def segments_of(sequence: nn.Sequential) -> list[list[nn.Module]]:
    """About as many segments as each has layers: then the least is kept."""
    layers = list(sequence)
    size = math.ceil(math.sqrt(len(layers)))
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _is_block(module: nn.Module) -> bool:
    has_layers = any(True for _ in module.children())
    return has_layers and any(True for _ in module.parameters())


def _by_segments(segments: Sequence[Sequence[nn.Module]], input: Any) -> Any:
    for layers in segments:
        input = _checkpointed(partial(_in_turn, layers), layers, input)
    return input


def _in_turn(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _checkpointed(forward: Callable[..., Any], modules: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    is_traced = any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))
    if not torch.is_grad_enabled() or is_traced:
        return forward(*args, **kwargs)

    def contexts() -> tuple[Any, Any]:
        answers: dict[Asking, list[Gathered]] = {asking: [] for asking in _asking(modules)}
        return _first_pass(answers), _second_pass(answers, modules)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _asking(modules: Sequence[nn.Module]) -> Iterator[Asking]:
    """Whom is asked in a forward pass: by `gather`, and by layers that have an `asking`."""
    if (asked := now_asked()) is not None:
        yield asked
    for layer in (layer for module in modules for layer in module.modules()):
        if isinstance(asking := layer.__dict__.get("asking"), Asking):
            yield asking


@contextmanager
def _first_pass(answers: Mapping[Asking, list[Gathered]]) -> Iterator[None]:
    with ExitStack() as stack:
        for asking, own in answers.items():
            stack.enter_context(asking.remembering(own))
        yield


@contextmanager
def _second_pass(answers: Mapping[Asking, list[Gathered]], modules: Sequence[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for asking, own in answers.items():
            stack.enter_context(asking.repeating(own))
        stack.enter_context(_on_copied_buffers(modules))
        yield


@contextmanager
def _on_copied_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Running statistics have moved in the first pass already."""
    owners = [
        (owner, name, buffer)
        for module in modules
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in owners:
        owner._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in owners:
            owner._buffers[name] = buffer
