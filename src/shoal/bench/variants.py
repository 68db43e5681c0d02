"""What can be measured: a name, and the command that runs it in fresh processes.

A command prints a `Measurement` as its last line. A new variant is one more entry in `VARIANTS`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

CommandBuilder = Callable[[str, int, int | None], list[str]]
"""`(model, processes, steps) -> argv`; without `steps` the model's own number."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to train without Shoal."""

    distributed: bool
    """Torch's DDP over several processes, or one process alone."""
    tuned: bool
    """With the allocator, fused optimizer and bucket views that Shoal's workers use, so that a gain over it
    comes from nothing else; or as its users run it."""


PEERS = {
    "single": Peer(distributed=False, tuned=False),
    "single_tuned": Peer(distributed=False, tuned=True),
    "ddp": Peer(distributed=True, tuned=False),
    "ddp_tuned": Peer(distributed=True, tuned=True),
}


def peer_command(variant: str, model: str, processes: int, steps: int | None) -> list[str]:
    """The command that measures a peer."""
    command = [sys.executable, "-m", "shoal.bench.peers", variant, model, "--processes", str(processes)]
    return command if steps is None else [*command, "--steps", str(steps)]


def shoal_command(variant: str, strategy: str, model: str, processes: int, steps: int | None) -> list[str]:
    """The command that measures Shoal under a strategy."""
    command = [sys.executable, "-m", "shoal.bench.shoal_variant", strategy, model, "--name", variant]
    command += ["--processes", str(processes)]
    return command if steps is None else [*command, "--steps", str(steps)]


VARIANTS: dict[str, CommandBuilder] = {
    **{name: functools.partial(peer_command, name) for name in PEERS},
    "data": functools.partial(shoal_command, "data", "data"),
    "data_without_journal": functools.partial(shoal_command, "data_without_journal", "data:journal=off"),
}
