"""A model as a chain of links, between which it can be cut: what the ways to find them have in common."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Anchor = tuple[str, int]
"""Where a link begins: the name of a layer or parameter, and how often it has been used before."""


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """What one link takes, measured on a sample."""

    seconds: float
    crossing_s: float
    """How long what travels over a cut before it is on its way; infinity where it cannot travel."""
    entering: int
    """The bytes of that."""
    activations: Mapping[str, int]
    """By name: the values that it keeps for the backward pass, in bytes."""
    state: Mapping[str, torch.Tensor]
    """By name in the model: the parameters and buffers that it uses."""


class ModelLinks(Protocol):
    """What torch.fx has followed (`Chain`), or what was seen block by block (`BlockChain`)."""

    signature: inspect.Signature
    links: list[Anchor]
    besides: Mapping[str, Any]
    """What the model is given, by name, where the batch does not say otherwise."""

    def layers(self) -> dict[str, int]:
        """What a user counts when splitting by hand, with the link at which each begins; in order."""

    def stages(self, counts: Sequence[int]) -> Sequence[nn.Module]:
        """Cut into stages with so many links each."""

    def costs(self, given: Mapping[str, Any]) -> list[LinkCost]:
        """What each link takes."""
