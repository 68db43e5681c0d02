"""Parameters as one vector, of which each worker keeps a part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.layout.state_cuts import StateCut
from shoal.model.parking.parked import Values
from shoal.strategies.mesh.held import HeldSpan


class Vector:
    """Parameters of one dtype. While they are let go, the memory is given back and they read as NaN."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        cut: StateCut,
        axis: Group,
        values: Values,
        *,
        apart: str | None = None,
        room: torch.Tensor | None = None,
    ) -> None:
        """`values` gives those of a parameter; `apart`: the device of this worker's part where it is kept apart
        from the vector; `room`: where the vector lies, if not in memory of its own."""
        self._params = params
        self._axis = axis
        first = next(iter(params.values()))
        made = torch.empty(sum(cut.numels), dtype=first.dtype, device=first.device) if room is None else room
        self._vector = made
        self._num_bytes = self._vector.untyped_storage().nbytes()
        self._nothing = torch.full((), torch.nan, dtype=first.dtype, device=first.device)
        self._slices = [self._vector[start:stop] for start, stop in pairwise(cut.bounds)]
        self._ranges = {
            name: slice(start, start + numel)
            for name, start, numel in zip(params, cut.starts, cut.numels, strict=True)
        }
        self.is_gathered = True
        self._enter(values)
        mine = self._slices[axis.index]
        self._is_apart = apart is not None
        self._own = mine if apart is None else mine.to(apart, copy=True)
        self._own_sum: torch.Tensor | None = None
        self.spans = {
            name: tuple(HeldSpan(*cut.span(number, worker)) for worker in range(axis.size))
            for number, name in enumerate(params)
        }
        self._own_ranges = {name: self._range_in_own(name, cut.bounds[axis.index]) for name in params}
        self.parts = {name: self._own[own].detach() for name, own in self._own_ranges.items()}
        """What this worker keeps of each parameter: leaf tensors, some of them empty."""

    def _enter(self, values: Values) -> None:
        """Let the parameters lie in the vector, with their values."""
        for name, param in self._params.items():
            view = self._vector[self._ranges[name]].view(param.shape)
            param.data = view.copy_(values(param))

    def _range_in_own(self, name: str, begin: int) -> slice:
        span = self.spans[name][self._axis.index]
        if span.start == span.stop:
            return slice(0, 0)
        start = self._ranges[name].start - begin
        return slice(start + span.start, start + span.stop)

    def gather(self) -> None:
        """Have the current values of all parameters here; everybody in the row calls this."""
        if not self.is_gathered:
            self._vector.untyped_storage().resize_(self._num_bytes)
            for name, param in self._params.items():
                param.data = self._vector[self._ranges[name]].view(param.shape)
            self.is_gathered = True
        if self._is_apart:
            self._slices[self._axis.index].copy_(self._own)
        self._axis.all_gather_(self._slices)

    def let_go(self) -> None:
        """Give the memory back; views that autograd has kept see the values again after `gather`."""
        if not self.is_gathered:
            return
        for param in self._params.values():
            param.data = self._nothing.expand(param.shape)
        self._vector.untyped_storage().resize_(0)
        self.is_gathered = False

    def reduce(self) -> set[str]:
        """Add what all workers have found to the owners' sums, and let the gradients go; all in the row call
        this. Returns the parameters that had one here."""
        found = torch.empty_like(self._vector)
        names = self._take_gradients(found)
        slices = found.split([one.numel() for one in self._slices])
        mine = self._axis.reduce_scatter(slices).to(self._own.device)
        self._own_sum = mine if self._own_sum is None else self._own_sum.add_(mine)
        return names

    def _take_gradients(self, room: torch.Tensor) -> set[str]:
        """Bring them to where all lie end to end, zeros for those that have none; whose they were."""
        names = set()
        for name, param in self._params.items():
            target = room[self._ranges[name]].view(param.shape)
            if param.grad is None:
                target.zero_()
            else:
                target.copy_(param.grad.to_dense())
                param.grad = None
                names.add(name)
        return names

    def hand_out(self, names: Collection[str]) -> None:
        """Give the parts of these parameters their gradients, for the optimizer."""
        if not names & self.parts.keys():
            return
        if self._own_sum is None:
            self._own_sum = torch.zeros_like(self._own)
        for name in names & self.parts.keys():
            self.parts[name].grad = self._own_sum[self._own_ranges[name]]

    def forget_gradients(self) -> None:
        """The step is over."""
        self._own_sum = None
        for part in self.parts.values():
            part.grad = None
