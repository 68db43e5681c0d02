"""Whole steps of one worker as graphs on its GPU: passes, clipping and the optimizer's update, replayed at once.

The first steps run as they are, which also lets libraries choose and make what they need; then a step is captured
for each shape of a batch. What changes from step to step (the batch, what it counts, the learning rate) is copied
to where the graph reads it. Random numbers are keyed before every replay, as before every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shoal.errors import SpecError
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.optimizer.averaging import average_key
from shoal.model.optimizer.kinds import settings_of
from shoal.model.replica import Replica
from shoal.step.compute import DeferredSums, EagerCompute, Sums, check_weight, compute_of, seed_slot
from shoal.step.update import Update
from shoal.step.work import Work

PLAIN_STEPS = 3
"""Steps that run as they are before one is captured."""


class DeviceNumbers:
    """Single numbers on a GPU, which are written there when they change."""

    def __init__(self, number: int, device: str) -> None:
        self.values = [torch.ones((), device=device) for _ in range(number)]
        self._now = [1.0] * number

    def set(self, number: int, value: float) -> None:
        """Let one be this."""
        if self._now[number] != value:
            self._now[number] = value
            self.values[number].fill_(value)


@dataclass(frozen=True)
class CapturedStep:
    """A graph, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batches: Sequence[torch.Tensor]
    """The tensors of all batches."""
    shares: DeviceNumbers
    """By batch: what its loss counts."""
    told: torch.Tensor
    """By batch: its loss, and what that is told with."""


class CapturedSteps:
    """Takes the steps of one worker."""

    def __init__(self, replica: Replica, update: Update) -> None:
        self._replica = replica
        self._update = update
        compute = compute_of(replica)
        assert isinstance(compute, EagerCompute)
        self._compute = compute
        self._params = list(replica.trained.values())
        self._stream = torch.cuda.Stream()
        self._known: dict[Hashable, CapturedStep] = {}
        self._num_plain = 0
        self._seen: set[Hashable] = set()
        """Shapes of which a step was taken as it is: nothing is to be compiled while one is captured."""
        self._rates = DeviceNumbers(len(replica.optimizer.param_groups), replica.device)
        _make_capturable(replica)
        self._settings = _fixed_settings(replica.optimizer)

    def take(self, work: Work, part: Part, run_plain: Callable[[Part], DeferredSums]) -> DeferredSums:
        """A step on one part; `run_plain` takes it as it is."""
        loaded = list(part.load())
        weight = sum(weight for _, weight, _ in loaded)
        check_weight(work, Sums(weight=weight))
        counted = [one for one in loaded if one[1]]
        key = tuple(_shape_of(batch) for batch, _, _ in counted)
        if self._num_plain < PLAIN_STEPS or key not in self._seen:
            self._num_plain += 1
            self._seen.add(key)
            return self._on_stream(lambda: run_plain(Part(part.slot, lambda: iter(loaded), part.total_weight)))
        if key not in self._known:
            with self._replica.preparing():
                self._known[key] = self._capture(work, [batch for batch, _, _ in counted])
        step = self._known[key]
        return self._replayed(step, work, part, loaded, counted)

    def _replayed(
        self,
        step: CapturedStep,
        work: Work,
        part: Part,
        loaded: Sequence[LoadedBatch],
        counted: Sequence[LoadedBatch],
    ) -> DeferredSums:
        found, total = DeferredSums(work, part), sum(weight for _, weight, _ in counted)
        found.add(Sums(samples=sum(samples for _, _, samples in loaded)))
        given = [leaf for batch, _, _ in counted for leaf in _tensors(batch)]
        torch._foreach_copy_(list(step.batches), given)
        for number, (_, weight, _) in enumerate(counted):
            step.shares.set(number, weight / total)
        for number, group in enumerate(self._replica.optimizer.param_groups):
            self._rates.set(number, group["lr"])
        if _fixed_settings(self._replica.optimizer) != self._settings:
            raise SpecError(
                f"graph: a setting of {type(self._replica.optimizer).__name__} besides the learning rate has "
                "changed (by a schedule that cycles momentum, say), and a captured step would not follow it; "
                "leave graph out."
            )
        seed_slot(work, part.slot, self._replica.device)
        step.graph.replay()
        found.send_rows(step.told, [weight for _, weight, _ in counted])
        return found

    def _capture(self, work: Work, batches: Sequence[Any]) -> CapturedStep:
        replica, optimizer = self._replica, self._replica.optimizer
        still = [tree_map_only(torch.Tensor, torch.clone, batch) for batch in batches]
        shares = DeviceNumbers(len(still), replica.device)
        graph = torch.cuda.CUDAGraph()
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates.values, strict=True):
            group["lr"] = rate
        for param in self._params:
            param.grad = None
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                told = self._whole_step(still, shares.values, work.step)
        except (RuntimeError, torch.AcceleratorError) as error:
            why = str(error).strip().splitlines()[0]
            raise SpecError(
                f"graph: the step of {type(replica.module).__name__} with {type(optimizer).__name__} cannot be "
                f"captured ({why}); a captured step may not ask the GPU for values, as .item(), printing and "
                "branches on tensors do. Leave graph out, or use compile."
            ) from error
        finally:
            for group, value in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = value
        return CapturedStep(graph, [leaf for batch in still for leaf in _tensors(batch)], shares, told)

    def _whole_step(self, batches: Sequence[Any], shares: Sequence[torch.Tensor], step: int) -> torch.Tensor:
        rows = []
        for batch, share in zip(batches, shares, strict=True):
            told = self._compute.loss(batch, step)
            told.loss.backward(share.to(told.loss.dtype).reshape(told.loss.shape))
            parts = (torch.as_tensor(p, dtype=told.loss.dtype, device=share.device) for p in told.parts)
            rows.append(torch.stack([each.detach().reshape(()) for each in (told.loss, *parts)]))
        self._update.clip(self._params)
        self._replica.optimizer.step()
        return torch.stack(rows)

    def _on_stream(self, act: Callable[[], DeferredSums]) -> DeferredSums:
        """On the stream of the graphs: what a pass leaves behind must know that one alone."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            found = act()
        torch.cuda.current_stream().wait_stream(self._stream)
        return found


def why_not_capturable(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer's update cannot be replayed; empty where it can. What an optimizer computes on the host,
    from the number of its steps say, would stay as it was when it was captured."""
    if average_key(optimizer) is not None:
        return "an average of the parameters is kept, which the host decides on in every step"
    if type(optimizer) is torch.optim.SGD or all("capturable" in group for group in optimizer.param_groups):
        return ""
    return f"{type(optimizer).__name__} computes on the host in every step"


def _fixed_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """All that a graph has taken for good; the learning rate it reads."""
    return [{**settings_of(group), "lr": None} for group in optimizer.param_groups]


def _make_capturable(replica: Replica) -> None:
    """Let the optimizer count its steps on the device."""
    optimizer = replica.optimizer
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(replica.device)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def _shape_of(batch: Any) -> Hashable:
    leaves, form = tree_flatten(batch)
    return str(form), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    )
