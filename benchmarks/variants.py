"""What can be measured: a name, and the command that runs it in fresh processes.

A command prints a `Measurement` as its last line. A new variant is one more entry in `VARIANTS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import TENSORFLOW
from benchmarks.fresh import module_command
from shoal.errors import SpecError

CommandBuilder = Callable[[str, int, int | None], list[str]]
"""`(model, processes, steps) -> argv`; without `steps` the model's own number. Refuses what it cannot do."""


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
    command = module_command("peers", variant, model, "--processes", str(processes))
    return command if steps is None else [*command, "--steps", str(steps)]


def shoal_command(variant: str, strategy: str, model: str, processes: int, steps: int | None) -> list[str]:
    """The command that measures Shoal under a strategy."""
    command = module_command("shoal_variant", strategy, model, "--name", variant)
    command += ["--processes", str(processes)]
    return command if steps is None else [*command, "--steps", str(steps)]


STRATEGIES = {
    "data": "data",
    "data_without_journal": "data:journal=off",
    "ps_asp": "ps:servers=1,sync=asp",
    "ps_asp_2": "ps:servers=2,sync=asp",
    "ps_bsp": "ps:servers=1",
}
"""Shoal's own variants. Two servers keep a copy of each other's part, a single one has nobody to keep its copy."""

TENSORFLOW_MODEL = "mlp"
TENSORFLOW_OPTIONS = {
    "tensorflow_ps": ["--servers", "1"],
    "tensorflow_ps_tuned": ["--servers", "1", "--tuned"],
    "tensorflow_ps_2": ["--servers", "2"],
}
"""TensorFlow's asynchronous parameter server, as its guide documents it; tuned by hand it has a fused update and
Shoal's allocator settings."""


def tensorflow_command(variant: str, model: str, processes: int, steps: int | None) -> list[str]:
    """The command that measures TensorFlow, in its own environment."""
    if model != TENSORFLOW_MODEL:
        raise SpecError(
            f"bench: variant {variant!r} is written for the model {TENSORFLOW_MODEL!r}, found {model!r}; "
            "leave it out for other models."
        )
    # By its path and with -P: that interpreter has no Shoal, and must not find our modules by their bare names.
    script = Path(__file__).with_name("tensorflow_peer.py")
    command = [str(TENSORFLOW.require_python()), "-P", str(script), "--name", variant]
    command += [*TENSORFLOW_OPTIONS[variant], "--processes", str(processes)]
    return command if steps is None else [*command, "--steps", str(steps)]


def horovod_command(model: str, processes: int, steps: int | None) -> list[str]:
    """The command that measures Shoal behind Horovod's interface."""
    command = module_command("horovod_variant", model, "--processes", str(processes))
    return command if steps is None else [*command, "--steps", str(steps)]


VARIANTS: dict[str, CommandBuilder] = {
    "horovod": horovod_command,
    **{name: functools.partial(peer_command, name) for name in PEERS},
    **{name: functools.partial(tensorflow_command, name) for name in TENSORFLOW_OPTIONS},
    **{name: functools.partial(shoal_command, name, strategy) for name, strategy in STRATEGIES.items()},
}
