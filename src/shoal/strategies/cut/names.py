"""The names of the task's model, noted before it is cut."""

from __future__ import annotations

from shoal.checkpoint.model_stream import TensorLooks
from shoal.model.replica import Replica


class WholeNames:
    """Which tensors a model's state has, and which of its names mean one and the same."""

    def __init__(self, replica: Replica) -> None:
        self.trained = list(replica.trained)
        """Parameters that the optimizer updates."""
        state = replica.module.state_dict(keep_vars=True)
        parameters = {id(p): name for name, p in replica.module.named_parameters()}
        first: dict[int, str] = {}
        self.canonical = {
            name: parameters.get(id(tensor), first.setdefault(id(tensor), name)) for name, tensor in state.items()
        }
        """By name in the model's state: the one name that stands for its tensor."""
        self.looks = {name: TensorLooks.of(tensor) for name, tensor in state.items()}
        self.distinct = list(dict.fromkeys(self.canonical.values()))
        """One name of each tensor."""
