"""The parameters of a plain server and the optimizer that moves them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from shoal.errors import SpecError
from shoal.ps.plain.merging import MergeBuffer, Merging
from shoal.ps.plain.tensors import PIECE_BYTES, TensorSpec, pieces, require_fit, require_known

MOST_PIECES = 4096
MOST_NAME_BYTES = 2 << 20
"""So that a greeting, and a request that names all parameters, fit the header of a message."""

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ParameterTable:
    """Named parameters, copied from those given, changed as a whole or not at all; for several threads.

    Gradients move them by the optimizer; without one, what is sent is added.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | nn.Module,
        make_optimizer: MakeOptimizer | None,
        merging: Merging | None = None,
        version: int = 0,
    ) -> None:
        named = _named(parameters)
        self.specs = {name: TensorSpec.of(tensor) for name, tensor in named.items()}
        self.version = version
        """Counts the changes."""
        self._merged = None if merging is None else MergeBuffer(merging)
        # A plain tensor seldom asks for gradients, but only those of a module can be meant to stay as they are.
        self._values = {
            name: _copied(tensor, trained=tensor.requires_grad or not isinstance(parameters, nn.Module))
            for name, tensor in named.items()
        }
        _require_that_all_fit(self._values)
        trained = [value for value in self._values.values() if value.requires_grad]
        self._optimizer = make_optimizer(trained) if make_optimizer else None
        self._optimized = _optimized(self._optimizer, self._values)
        self._copies: dict[str, Tensor] = {}
        """Of this version's values, as far as somebody wanted them. They are lent out, and never change."""
        self._lock = threading.Lock()

    @torch.no_grad()
    def copies(self, names: Iterable[str] = ()) -> tuple[int, dict[str, Tensor]]:
        """The version, and its values by name, all of them where no name is given; to be read only."""
        names = tuple(names) or tuple(self.specs)
        require_known(names, self.specs)
        with self._lock:
            for name in names:
                if name not in self._copies:
                    self._copies[name] = self._values[name].detach().clone()
            return self.version, {name: self._copies[name] for name in names}

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor]) -> int:
        """One step of the optimizer, or the sum where there is none; parameters not named have no gradient."""
        require_fit(gradients, self.specs)
        with self._lock:
            if self._optimizer is None:
                self._set({name: self._values[name] + gradient for name, gradient in gradients.items()})
            else:
                self._step(self._optimizer, gradients)
            return self._changed()

    @torch.no_grad()
    def store(self, values: Mapping[str, Tensor]) -> int:
        """Set these parameters; what the optimizer remembers stays."""
        require_fit(values, self.specs)
        with self._lock:
            self._set(values)
            return self._changed()

    @torch.no_grad()
    def average(self, values: Mapping[str, Tensor], share: float) -> int:
        """Move these parameters by `share` of the way to the values."""
        require_fit(values, self.specs)
        for name, value in values.items():
            if not value.is_floating_point():
                raise SpecError(
                    f"Parameter {name!r} is {self.specs[name]}, but only floating types can be averaged; "
                    "store it instead."
                )
        with self._lock:
            self._set({name: self._values[name].lerp(value, share) for name, value in values.items()})
            return self._changed()

    @torch.no_grad()
    def merge(self, differences: Mapping[str, Tensor], since: int) -> int:
        """Take in how far a client has come since a version. Where it was the last that a new one needs, all
        parameters move; the version afterwards."""
        require_fit(differences, self.specs)
        if self._merged is None:
            raise SpecError("This server merges no differences; make it with merging=shoal.ps.Merging(buffer=4).")
        if missing := sorted(self.specs.keys() - differences.keys()):
            raise SpecError(
                f"A difference is of all parameters together, but {missing[0]!r} is missing; send all."
            )
        with self._lock:
            moved = self._merged.add(differences, self.version - since)
            if moved is None:
                return self.version
            self._set({name: self._values[name] + each for name, each in moved.items()})
            return self._changed()

    def _step(self, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor]) -> None:
        if fixed := sorted(gradients.keys() - self._optimized):
            raise SpecError(
                f"A gradient for {fixed[0]!r} was sent, but the server's optimizer does not train it; omit it."
            )
        try:
            for name, gradient in gradients.items():
                self._values[name].grad = gradient
            optimizer.step()
        finally:
            # Should it fail halfway, some have moved: what was copied before is true no more.
            self._copies = {}
            for value in self._values.values():
                value.grad = None

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._values[name].copy_(value)

    def _changed(self) -> int:
        self._copies = {}
        self.version += 1
        return self.version


def _named(parameters: Mapping[str, Tensor] | nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = dict(
        parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
    )
    if not named:
        raise SpecError("A server needs parameters, found none; give it a module or tensors by name.")
    for name, tensor in named.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided):
            raise SpecError(
                f"A server's parameters are dense tensors by name, found {type(tensor)} as {name!r}; "
                "leave it out, or call .to_dense() first."
            )
    return named


def _require_that_all_fit(values: Mapping[str, Tensor]) -> None:
    """They must fit into one message, and so must their names."""
    if (num_pieces := sum(len(pieces(value)) for value in values.values())) > MOST_PIECES:
        raise SpecError(
            f"The parameters of one server travel in at most {MOST_PIECES} pieces of {PIECE_BYTES >> 20} MiB, "
            f"found {num_pieces}; spread them over several servers."
        )
    if (num_bytes := sum(len(name.encode()) for name in values)) > MOST_NAME_BYTES:
        raise SpecError(
            f"The names of one server's {len(values)} parameters may have {MOST_NAME_BYTES} bytes together, found "
            f"{num_bytes}; use shorter ones, or spread them over several servers."
        )


def _copied(tensor: Tensor, *, trained: bool) -> nn.Parameter:
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=trained and (copy.is_floating_point() or copy.is_complex()))


def _optimized(optimizer: torch.optim.Optimizer | None, values: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of what the optimizer trains."""
    if optimizer is None:
        return frozenset()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(
            f"optimizer must be a function that makes a torch.optim optimizer, it made {optimizer!r}; "
            "give one like lambda params: torch.optim.SGD(params, lr=0.1)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SpecError("LBFGS computes the loss several times in a step, but a server has none; choose another.")
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return frozenset(name for name, value in values.items() if id(value) in trained)
