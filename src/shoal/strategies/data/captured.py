"""Whole steps of one worker as graphs on its GPU: passes, clipping and the optimizer's update, replayed at once.

The first steps run as they are, which also lets libraries choose and make what they need; then a step is captured
for each shape of a batch. What changes from step to step (the batch, what it counts, the learning rate) is sent
to where the graph reads it (`step_block.py`). Random numbers are keyed before every replay, as before every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shoal.errors import SpecError
from shoal.feed.parts import Part
from shoal.model.optimizer.averaging import average_key
from shoal.model.optimizer.kinds import settings_of
from shoal.model.replica import Replica
from shoal.step.compute import DeferredSums, EagerCompute, Sums, check_weight, compute_of, seed_slot
from shoal.step.device_scale import ScaledSums
from shoal.step.device_step import DeviceStep
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.data.step_block import StepBlock, StepRoom

PLAIN_STEPS = 3
"""Steps that run as they are, and are not skipped, before one is captured."""


Leaves = list[Any]
"""The tensors of all batches of a step, and what else they hold."""


@dataclass(frozen=True)
class CapturedStep:
    """A graph, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    block: StepBlock
    rooms: Iterator[StepRoom]
    """Those of the host, in turn."""
    at_gpu: Sequence[torch.Tensor]
    """Where it reads what lies on the GPU already."""
    told: torch.Tensor
    """What a step tells (`DeviceStep.run`)."""


class CapturedSteps:
    """Takes the steps of one worker. Batches may lie in the host's memory."""

    def __init__(self, replica: Replica, update: Update) -> None:
        self._replica = replica
        compute = compute_of(replica)
        assert isinstance(compute, EagerCompute)
        self._step = DeviceStep(replica, compute, update)
        self._params = list(replica.trained.values())
        self._stream = torch.cuda.Stream()
        self._known: dict[Hashable, CapturedStep] = {}
        self._num_plain = 0
        self._seen: set[Hashable] = set()
        """Shapes of which a step was taken as it is, and not skipped: nothing is to be compiled, and nothing that
        the optimizer keeps to be made, while one is captured."""
        _make_capturable(replica)
        self._settings = [_fixed_settings(group) for group in replica.optimizer.param_groups]

    def take(self, work: Work, part: Part, run_plain: Callable[[Part], DeferredSums]) -> DeferredSums:
        """A step on one part; `run_plain` takes it as it is."""
        seed_slot(work, part.slot, self._replica.device)  # what is loaded may draw numbers, too
        loaded = list(part.load())
        counted = [one for one in loaded if one[1]]
        weights = [weight for _, weight, _ in counted]
        if not weights:
            check_weight(work, Sums())
        leaves, key = _leaves_of([batch for batch, _, _ in counted])
        step = self._known.get(key)
        if step is None:
            if self._num_plain < PLAIN_STEPS or key not in self._seen:
                moved = [(self._at_gpu(batch), weight, samples) for batch, weight, samples in loaded]
                return self._take_plain(Part(part.slot, lambda: iter(moved), part.total_weight), run_plain, key)
            with self._replica.preparing():
                step = self._known[key] = self._capture(work, [batch for batch, _, _ in counted], leaves)
        scale = self._step.scale
        found = DeferredSums(work, part) if scale is None else ScaledSums(work, part, scale)
        found.add(Sums(samples=sum([samples for _, _, samples in loaded])))
        self._replay(step, leaves, weights, found)
        return found

    def _take_plain(self, part: Part, run_plain: Callable[[Part], DeferredSums], key: Hashable) -> DeferredSums:
        if self._step.scale is not None:
            self._step.scale.settle()
        precision = self._replica.precision
        skipped = precision.state.skipped
        found = self._on_stream(lambda: run_plain(part))
        if precision.state.skipped == skipped:  # else the optimizer may not have made yet what it keeps
            self._num_plain += 1
            self._seen.add(key)
        return found

    def _replay(self, step: CapturedStep, leaves: Leaves, weights: Sequence[float], found: DeferredSums) -> None:
        total, room = sum(weights), next(step.rooms)
        rates = [group["lr"] for group in self._replica.optimizer.param_groups]
        room.send([*(weight / total for weight in weights), *rates], _tensors(leaves, is_cuda=False))
        if step.at_gpu:
            torch._foreach_copy_(list(step.at_gpu), _tensors(leaves, is_cuda=True))
        self._check_settings()
        if self._step.scale is not None:
            self._step.scale.send()
        step.graph.replay()
        room.fetch(step.told, found, weights)

    def _check_settings(self) -> None:
        for group, fixed in zip(self._replica.optimizer.param_groups, self._settings, strict=True):
            for key, value in fixed:
                if group[key] is not value and group[key] != value:
                    raise SpecError(
                        f"graph: {key} of {type(self._replica.optimizer).__name__} has changed from {value} to "
                        f"{group[key]} (by a schedule that cycles momentum, say), and a captured step follows the "
                        "learning rate alone; leave graph out."
                    )

    def _capture(self, work: Work, batches: Sequence[Any], leaves: Leaves) -> CapturedStep:
        replica, optimizer = self._replica, self._replica.optimizer
        groups = optimizer.param_groups
        block = StepBlock(len(batches) + len(groups), _tensors(leaves, is_cuda=False), replica.device)
        at_gpu = [torch.clone(leaf) for leaf in _tensors(leaves, is_cuda=True)]
        still = _placed(batches, iter(block.tensors), iter(at_gpu))
        graph = torch.cuda.CUDAGraph()
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, block.numbers[len(batches) :], strict=True):
            group["lr"] = rate
        for param in self._params:
            param.grad = None
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                told = self._step.run(still, block.numbers[: len(batches)], work.step)
        except (RuntimeError, torch.AcceleratorError) as error:
            why = str(error).strip().splitlines()[0]
            raise SpecError(
                f"graph: the step of {type(replica.module).__name__} with {type(optimizer).__name__} cannot be "
                f"captured ({why}); a captured step may not ask the GPU for values, as .item(), printing and "
                "branches on tensors do. Leave graph out, or use compile."
            ) from error
        finally:
            for group, value in zip(groups, rates, strict=True):
                group["lr"] = value
        return CapturedStep(graph, block, cycle(block.rooms(told)), at_gpu, told)

    def _at_gpu(self, batch: Any) -> Any:
        device = self._replica.device
        return tree_map_only(torch.Tensor, lambda leaf: leaf if leaf.is_cuda else leaf.to(device), batch)

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


def _fixed_settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """All that a graph has taken for good; the learning rate it reads."""
    return [(key, value) for key, value in settings_of(group).items() if key != "lr"]


def _make_capturable(replica: Replica) -> None:
    """Let the optimizer count its steps on the device."""
    optimizer = replica.optimizer
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(replica.device)


def _leaves_of(batches: Sequence[Any]) -> tuple[Leaves, Hashable]:
    """What batches hold, and what tells apart those for which there is another graph."""
    leaves: Leaves = []
    forms: list[Hashable] = []
    for batch in batches:
        if type(batch) in (tuple, list) and all(type(leaf) is torch.Tensor for leaf in batch):
            leaves += batch  # as most are: torch's own way takes longer than all that follows
            forms.append((type(batch), len(batch)))
        else:
            flat, form = tree_flatten(batch)
            leaves += flat
            forms.append(str(form))
    looks = [(leaf.shape, leaf.dtype, leaf.is_cuda) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return leaves, (*forms, *looks)


def _tensors(leaves: Leaves, *, is_cuda: bool) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda == is_cuda]


def _placed(
    batches: Sequence[Any], from_host: Iterator[torch.Tensor], at_gpu: Iterator[torch.Tensor]
) -> list[Any]:
    """The batches with other tensors in the places of theirs."""
    return [
        tree_map_only(torch.Tensor, lambda leaf: next(at_gpu if leaf.is_cuda else from_host), batch)
        for batch in batches
    ]
