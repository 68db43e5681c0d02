"""Strategies as the user writes them: `name:key=value,key=value`, or the dataclass; both are one thing."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

from shoal.errors import SpecError, unknown
from shoal.spec.conduct import Claim, Conduct
from shoal.spec.footprint import Footprint
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.whole_footprint import whole_footprint

if TYPE_CHECKING:
    from shoal.spec.cluster import Cluster
    from shoal.spec.job import Job

ENTRY_POINTS = "shoal.strategies"
"""Where packages name strategies of their own: `slow = "their.module:SlowSpec"`."""
_REGISTRY: dict[str, type[StrategySpec]] = {}


@dataclass(frozen=True)
class Only:
    """A key acts only where something else holds."""

    holds: Callable[[Any], bool]
    """Of the strategy."""
    words: str
    """What that is: `with wire=tcp`."""


@dataclass(frozen=True, kw_only=True)
class StrategySpec(ABC):
    """How to train. A subclass per strategy; its fields are the keys of the written form."""

    name: ClassVar[str] = ""
    made_by: ClassVar[str] = ""
    """`package.module:function`, which gives a process its `Strategy`; see `shoal.strategies.make_strategy`."""

    cut_by: ClassVar[str] = ""
    """Likewise what says how that code cuts a model, as a `CutSize`: `(spec, blueprint, workers)`; empty where all
    have all of it."""

    tried_by: ClassVar[str] = ""
    """Likewise what cuts a model for nothing, and raises what a run would: `(spec, replica, batch, workers)`;
    empty where any model can be trained."""

    only: ClassVar[Mapping[str, Only]] = {}
    """By key, of those that do not act always: when they do. Elsewhere they are refused."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            _REGISTRY[cls.name] = cls

    @classmethod
    def of(cls, job: Job) -> Self:
        """A job's strategy, for its own implementation: whoever asks knows that it is this one."""
        if not isinstance(spec := job.spec, cls):
            raise SpecError(f"strategy={job.strategy} is not {cls.name or cls.__name__}, whose code met it.")
        return spec

    @classmethod
    def unknown_key(cls, key: str, known: Collection[str]) -> SpecError:
        """What is said to whoever writes a key that there is not."""
        return unknown(f"strategy {cls.name}: key", key, known)

    @abstractmethod
    def conduct(self, cluster: Cluster, slots: int | None = None) -> Conduct:
        """The facts of a job on this cluster; `slots`: as many as the user wants, or the strategy's own number."""

    @abstractmethod
    def claim(self, workers: int, optimizer: str = "SGD") -> Claim:
        """How close to one process this comes, with so many workers and an optimizer of this class."""

    def check(self, job: Job) -> None:
        """Refuse, with a `SpecError`, what contradicts itself in a job under this strategy."""
        return

    def check_effects(self) -> None:
        """Refuse keys that would change nothing: whoever writes one expects something of it."""
        for key, only in self.only.items():
            default = next(field.default for field in fields(self) if field.name == key)
            if getattr(self, key) != default and not only.holds(self):
                written = f"{written_key(key)}={_written(getattr(self, key))}"
                raise SpecError(f"{self.name}: {written} acts only {only.words}; leave it out, or change that.")

    def footprint(self, model: ModelSize, run: RunSize, cut: CutSize | None = None) -> Footprint:
        """What a job lays out and sends; `cut`: how this strategy's own code cuts the model, where it was asked.
        By default each worker has all of the model."""
        return whole_footprint(model, run)

    def synchronised(self) -> Self:
        """The same, with BatchNorm over the whole batch; for strategies whose conduct says that they can."""
        return self

    def for_trial(self, steps: int) -> Self:
        """The same as it is compared with one process for so many steps."""
        return self

    def across_hosts(self) -> Self:
        """The same where processes are on several hosts: what `auto` means there."""
        return self

    def across_devices(self, *, mixed: bool) -> Self:
        """The same once it was measured how fast the devices are: with both kinds (`mixed`), or on GPUs alone."""
        return self

    def for_inference(self) -> StrategySpec:
        """What evaluates a saved model, or predicts with it, for whoever names this."""
        return self

    def __str__(self) -> str:
        changed = [
            f"{written_key(spec.name)}={_written(getattr(self, spec.name))}"
            for spec in fields(self)
            if spec.default is MISSING or getattr(self, spec.name) != spec.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def written_key(name: str) -> str:
    """How users write a field's name: one that is a word of Python's own has a line behind it."""
    return name.removesuffix("_")


def _written(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def parse_strategy(text: str | StrategySpec) -> StrategySpec:
    """The strategy that `name:key=value,…` names. A spec passes through unchanged."""
    if isinstance(text, StrategySpec):
        return text
    name, _, written = text.partition(":")
    cls = _find(name)
    names = {written_key(f.name): f.name for f in fields(cls)}
    types = {written_key(key): kind for key, kind in get_type_hints(cls).items() if key in names.values()}
    values: dict[str, Any] = {}
    # A comma separates keys only where another `key=` follows, so that values may hold commas.
    for item in re.split(r",(?=\w+=)", written) if written else []:
        key, equals, value = item.partition("=")
        if key not in types:
            raise cls.unknown_key(key, types)
        if not equals:
            raise SpecError(f"strategy {name}: write {key}=value, found {item!r}.")
        values[names[key]] = _convert(name, key, value, types[key])
    spec = cls(**values)
    spec.check_effects()
    return spec


def known_strategies() -> list[str]:
    """The names of all strategies: Shoal's own, and those that installed packages bring."""
    return list(dict.fromkeys([*_REGISTRY, *entry_points(group=ENTRY_POINTS).names]))


def _find(name: str) -> type[StrategySpec]:
    """The strategy of this name: Shoal's own, or one that an installed package brings."""
    if name not in _REGISTRY:
        for found in entry_points(group=ENTRY_POINTS, name=name):
            found.load()
    if name not in _REGISTRY:
        raise unknown("strategy", name, known_strategies())
    return _REGISTRY[name]


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
