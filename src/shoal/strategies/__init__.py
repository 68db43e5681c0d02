"""Strategies: ways for many processes to train one model, behind one small contract."""

from __future__ import annotations

from importlib import import_module

from shoal.errors import SpecError
from shoal.spec import StrategySpec, World
from shoal.strategies.base import Strategy


def make_strategy(spec: StrategySpec, world: World, slots: int, *, replaceable: bool = False) -> Strategy:
    """The implementation of a strategy for a process of this world; `replaceable` by a spare if it dies."""
    module, _, function = spec.made_by.partition(":")
    if not function:
        raise SpecError(f"strategy {spec.name}: made_by must be package.module:function, found {spec.made_by!r}.")
    made: Strategy = getattr(import_module(module), function)(spec, world, slots, replaceable=replaceable)
    return made


__all__ = ["Strategy", "make_strategy"]
