"""Gradients that are clipped sample by sample, and noise that is added to their sum: DP-SGD.

The noise of a step is added by whoever fills its first slot: once to the sum, however many processes there are. It
follows from the key and the step alone, as what all slots add up to follows from the slots: so any number of
processes comes to the bits of one that fills the same slots, and whoever takes a slot over draws the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from shoal.errors import Diverged, ShoalError, SpecError, TaskError
from shoal.feed.parts import Part
from shoal.ledger.order import mix
from shoal.model.normalising import normalises_by_batch
from shoal.model.replica import Replica
from shoal.step.compute import Backward, DeferredSums, Sums, check_finite, check_loss, raw_loss, seed_slot
from shoal.step.work import Work

_NOISE = 131  # tells these random numbers apart from others of the same step
_AT_A_TIME_BYTES = 64 << 20
"""Of gradients that are there at a time, one for each of so many samples."""
_LEAST_WEIGHT = 1e-9
"""What a first slot without samples counts: nothing to a mean over others, and enough for one of its own."""


@dataclass(frozen=True)
class GaussianNoise:
    """What is drawn for a round follows from its number, and from a key that is to stay secret."""

    std: float
    """Of what is added to each element of a sum."""
    key: int

    def of(self, number: int) -> NoiseDraw:
        """What is added to the sum of a step or round."""
        return NoiseDraw(self.std, torch.Generator().manual_seed(mix(self.key, number, _NOISE) >> 1))


@dataclass(frozen=True)
class ClientProtection:
    """What a strategy does whose rounds add up what clients have come to."""

    clip: float
    """How far a client may have come at most."""
    noise: GaussianNoise
    """Added to the sum of all clients of a round."""
    clients: int
    """Of a round."""


class NoiseDraw:
    """The noise of one round, tensor after tensor."""

    def __init__(self, std: float, generator: torch.Generator) -> None:
        self._std, self._generator = std, generator

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """As much as the next tensor needs; drawn on the CPU, so that every device gets the same."""
        kind = torch.promote_types(tensor.dtype, torch.float32)
        drawn = torch.randn(tensor.shape, generator=self._generator, dtype=kind).mul_(self._std)
        return drawn.to(tensor.device, tensor.dtype)


class PrivateCompute:
    """Runs a slot's passes sample by sample."""

    def __init__(self, replica: Replica, clip: float, noise: GaussianNoise) -> None:
        check_model(replica)
        self._replica, self._clip, self._noise = replica, clip, noise
        self._whole = _LossOf(replica)
        replica.is_by_sample = True
        self._passes = vmap(
            grad_and_value(self._loss, has_aux=True), in_dims=(None, None, 0), randomness="different"
        )
        size = sum(param.nbytes for param in replica.trained.values())
        self._at_a_time = max(1, _AT_A_TIME_BYTES // max(1, size))

    def run(self, work: Work, part: Part, backward: Backward = torch.Tensor.backward) -> DeferredSums:
        """See `Compute`."""
        replica, found = self._replica, DeferredSums(work, part)
        assert part.total_weight is not None, "a sample counts the same, whatever comes with it"
        seed_slot(work, part.slot, replica.device)
        total = {name: torch.zeros_like(param) for name, param in replica.trained.items()}
        for batch, _, samples in part.load():
            self._add(batch, samples, total, found, work, part)
        if part.slot == 0:
            draw = self._noise.of(work.step)
            for gradient in total.values():
                gradient.add_(draw.like(gradient))
            if not found.weight:  # a step that has drawn no sample at all is taken, too: it has its noise
                found.add(Sums(weight=_LEAST_WEIGHT))
        # Autograd hands gradients to whoever waits for them: those of this sum are the ones that are there.
        pairs = zip(replica.trained.values(), total.values(), strict=True)
        stands_in = torch.stack([(param * gradient).sum() for param, gradient in pairs]).sum()
        share = torch.full_like(stands_in, 1 / part.total_weight)
        backward(stands_in, share)
        return found

    def _add(
        self, batch: Any, samples: int, total: dict[str, torch.Tensor], found: DeferredSums, work: Work, part: Part
    ) -> None:
        """The clipped gradients of a batch's samples."""
        check_rows(batch, samples)
        params = {name: param.detach() for name, param in self._replica.trained.items()}
        fixed = {name: param.detach() for name, param in self._replica.untrained.items()}
        for start in range(0, samples, self._at_a_time):
            rows = tree_map(lambda one: _rows(one, start, start + self._at_a_time), batch)  # noqa: B023
            try:
                gradients, (losses, told) = self._passes(params, fixed, rows)
            except ShoalError:
                raise
            except (RuntimeError, NotImplementedError, ValueError) as error:
                raise _not_by_sample(error) from error
            for loss in losses.tolist():
                check_finite(loss, work, part)
            count, means = len(losses), [one.double().sum().item() for one in told]
            sums = losses.double().sum().item()
            found.add(Sums(sums, float(count), samples=float(count), parts=tuple(means)))
            factors = clip_factors(gradients, self._clip)
            if not torch.isfinite(factors).all():
                raise Diverged(
                    f"Task: the gradient of a sample is no number at step {work.step} (slot {part.slot}), so that "
                    "nothing could be clipped; look for bad samples, or functions without a slope."
                )
            for name, gradient in gradients.items():
                total[name].add_(torch.tensordot(factors.to(gradient.dtype), gradient, dims=1))

    def _loss(
        self, params: Mapping[str, torch.Tensor], fixed: Mapping[str, torch.Tensor], sample: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """That of one sample, as a batch of its own."""
        given = {f"module.{name}": tensor for name, tensor in (*params.items(), *fixed.items())}
        batch = tree_map(lambda one: one.unsqueeze(0) if isinstance(one, torch.Tensor) else one, sample)
        told: tuple[torch.Tensor, tuple[torch.Tensor, ...]] = functional_call(self._whole, given, (batch,))
        return told


class _LossOf(nn.Module):
    """A task's loss as a module: parameters can be put in from outside, wherever its code calls the model."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.module = replica.module
        self._task, self._parts = replica.task, replica.loss_parts

    def forward(self, batch: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The loss, and the numbers that it is told with."""
        found = raw_loss(self._task, self.module, batch)
        loss = check_loss(found).reshape(())
        parts = self._parts.of(found) if self._parts.names or not isinstance(found, torch.Tensor) else ()
        told = [torch.as_tensor(part, dtype=loss.dtype, device=loss.device).detach() for part in parts]
        return loss, tuple(one.reshape(()) for one in told)


def clip_factors(gradients: Mapping[str, torch.Tensor], clip: float) -> torch.Tensor:
    """By sample: what makes the gradient of all parameters together at most so long; nan where that is none."""
    norms = [torch.linalg.vector_norm(one.flatten(1), dim=1, dtype=torch.float64) for one in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factors = (clip / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max_(1.0)
    return torch.where(torch.isfinite(norm), factors, torch.nan)


def check_model(replica: Replica) -> None:
    """Each sample must go through the model by itself, and a step must ask for gradients once."""
    for name, layer in replica.module.named_modules():
        if normalises_by_batch(layer):
            raise TaskError(
                f"Task: privacy clips the gradient of each sample by itself, but {type(layer).__name__} "
                f"({name or 'the model'}) mixes the samples of a batch; use GroupNorm or LayerNorm in its place."
            )
    if isinstance(replica.optimizer, torch.optim.LBFGS):
        raise SpecError(
            "Task: privacy counts one sum of gradients for each step, but LBFGS asks for several; use another "
            "optimizer."
        )


def check_rows(batch: Any, samples: int) -> None:
    """A batch must be made of tensors with a row for each sample."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not leaves or any(leaf.dim() == 0 or len(leaf) != samples for leaf in leaves):
        raise TaskError(
            f"Task: privacy takes a batch apart into its {samples} samples, but it has tensors with another "
            f"number of rows: {[tuple(leaf.shape) for leaf in leaves]}; let collate stack samples."
        )


def _rows(one: Any, start: int, stop: int) -> Any:
    return one[start:stop] if isinstance(one, torch.Tensor) else one


def _not_by_sample(error: Exception) -> TaskError:
    return TaskError(
        "Task: privacy computes the gradient of each sample by torch.func.vmap, which this model or loss does not "
        f"take ({str(error).strip().splitlines()[0]}); leave out what depends on values or moves buffers, or "
        "privacy."
    )
