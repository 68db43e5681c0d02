"""Strategies as the user writes them: `name:key=value,key=value`, or the dataclass; both are one thing."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_type_hints

from shoal.errors import SpecError, unknown
from shoal.spec.checks import require_choice

_REGISTRY: dict[str, type[StrategySpec]] = {}


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """How to train. A subclass per strategy; its fields are the keys of the written form."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.name] = cls

    def __str__(self) -> str:
        changed = [
            f"{spec.name}={getattr(self, spec.name)}"
            for spec in fields(self)
            if spec.default is MISSING or getattr(self, spec.name) != spec.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


@dataclass(frozen=True, kw_only=True)
class Data(StrategySpec):
    """Synchronous data parallel: each worker trains on its part of the batch, all take the same step."""

    name: ClassVar[str] = "data"
    VIA: ClassVar[tuple[str, ...]] = ("auto", "arena", "backend", "ring", "tree", "central", "allgather")

    via: str = "auto"
    """How gradients are summed: shared memory (`arena`, the default on one host), torch's own collectives
    (`backend`), or ours over sockets."""
    batchnorm: str = "local"
    """`local`: each slot normalises by its own part of the batch; `sync`: by the whole batch."""
    shares: str = "even"
    """How many slots each worker fills: `even`, or one number per worker, as in `1+3`."""
    journal: bool = True
    """Keep the redo journal that lets another process finish the step of one that was killed."""

    def __post_init__(self) -> None:
        require_choice("data", "via", self.via, self.VIA)
        require_choice("data", "batchnorm", self.batchnorm, ("local", "sync"))
        if self.shares != "even" and not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", self.shares):
            raise SpecError(
                f"data: shares must be 'even' or one number per worker as in 1+3, found {self.shares!r}."
            )

    @property
    def counts(self) -> list[int]:
        """The written shares, one per worker; empty where they are even."""
        return [] if self.shares == "even" else [int(count) for count in self.shares.split("+")]

    def slots_per_worker(self, slots: int, workers: int) -> list[int]:
        """How many slots each worker fills; they add up to `slots`."""
        if self.shares == "even":
            return [slots * (rank + 1) // workers - slots * rank // workers for rank in range(workers)]
        counts = self.counts
        if len(counts) != workers or sum(counts) != slots:
            raise SpecError(
                f"data: shares={self.shares} names {len(counts)} workers and {sum(counts)} slots, "
                f"but the job has {workers} workers and {slots} slots."
            )
        return counts


def parse_strategy(text: str | StrategySpec) -> StrategySpec:
    """The strategy that `name:key=value,…` names. A spec passes through unchanged."""
    if isinstance(text, StrategySpec):
        return text
    name, _, written = text.partition(":")
    if name not in _REGISTRY:
        raise unknown("strategy", name, _REGISTRY)
    cls = _REGISTRY[name]
    types = {key: kind for key, kind in get_type_hints(cls).items() if key in {f.name for f in fields(cls)}}
    values: dict[str, Any] = {}
    # A comma separates keys only where another `key=` follows, so that values may hold commas.
    for item in re.split(r",(?=\w+=)", written) if written else []:
        key, equals, value = item.partition("=")
        if key not in types:
            raise unknown(f"strategy {name}: key", key, types)
        if not equals:
            raise SpecError(f"strategy {name}: write {key}=value, found {item!r}.")
        values[key] = _convert(name, key, value, types[key])
    return cls(**values)


def _convert(name: str, key: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false", "on", "off", "yes", "no", "1", "0"):
            raise SpecError(f"strategy {name}: {key} must be on or off, found {value!r}.")
        return value.lower() in ("true", "on", "yes", "1")
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            raise SpecError(f"strategy {name}: {key} must be a number, found {value!r}.") from None
    return value
