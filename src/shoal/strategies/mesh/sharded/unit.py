"""A block of layers whose parameters are gathered, reduced and let go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from shoal.strategies.mesh.sharded.vector import Vector


class ShardedUnit:
    """A vector for each dtype that occurs in it."""

    def __init__(
        self, modules: Sequence[nn.Module], params: Mapping[str, nn.Parameter], vectors: Sequence[Vector]
    ) -> None:
        self.modules = modules
        """In the order in which they run; none in the root."""
        self.params = params
        self.vectors = vectors
        self.touched: set[str] = set()
        """Parameters for which a gradient was reduced from here since the last step."""

    @property
    def is_gathered(self) -> bool:
        """Whether the values of all its parameters are here."""
        return all(vector.is_gathered for vector in self.vectors)

    def gather(self) -> None:
        """Have the current values of all parameters here; everybody in the row calls this."""
        for vector in self.vectors:
            vector.gather()

    def let_go(self) -> None:
        """Keep this worker's part alone."""
        for vector in self.vectors:
            vector.let_go()

    def has_gradients(self) -> bool:
        """Whether backward passes have left some that were not reduced yet."""
        return any(param.grad is not None for param in self.params.values())

    def reduce(self) -> None:
        """Add the gradients to their owners' sums; everybody in the row calls this."""
        for vector in self.vectors:
            self.touched |= vector.reduce()

    def hand_out(self, names: Collection[str]) -> None:
        """Give the parts of these parameters their gradients, for the optimizer."""
        for vector in self.vectors:
            vector.hand_out(names)

    def forget_gradients(self) -> None:
        """The step is over."""
        self.touched.clear()
        for vector in self.vectors:
            vector.forget_gradients()
