"""Evaluate on the test set, and on what clients hold back, spread over the workers, with the same result for any
number of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from shoal.errors import TaskError
from shoal.feed.feed import Feed
from shoal.ledger.order import mix
from shoal.metrics import OverAll, over_all
from shoal.model.replica import Replica
from shoal.roles.inference.kept_outputs import KeptOutputs, LaneFile, require_tensors
from shoal.roles.inference.lent_outputs import OutputLender, fetch_outputs
from shoal.roles.inference.tried_batches import ClientBatches, TestBatches, TriedBatches, client_summary
from shoal.spec import Conduct, Task, World
from shoal.spec.task import MOST_LOSS_PARTS
from shoal.step.compute import ToldLoss, split_batch, task_loss
from shoal.step.objective import inputs_of, loss_from
from shoal.strategies.base import Strategy

_TESTING = 1 << 32
"""In the place of a step: keys what is drawn while test samples are read."""
_TARGETS = ("labels", "label", "target")
"""What the targets are called in batches that are dicts."""


class Tables(NamedTuple):
    """What an evaluation exchanges: a table of all batches, and one of what is known when all are computed."""

    number: int
    columns: int
    """Of the wider one."""

    @classmethod
    def of(cls, task: Task, *, has_clients: bool = False) -> Tables:
        """Weight, loss, what it is told with, and means of each batch; where there are metrics over all of them, a
        mark and these; where clients have held something back, the same of their batches."""
        means, whole = len(_means(task)), len(_over_all(task))
        return cls((2 if whole else 1) + has_clients, max(2 + MOST_LOSS_PARTS + means, 1 + whole))


class Evaluator:
    """Batches go round the workers; their sums are added in the order of the batches."""

    def __init__(
        self,
        task: Task,
        replica: Replica,
        length: int,
        feed: Feed,
        conduct: Conduct,
        clients: ClientBatches | None = None,
    ) -> None:
        """`length`: of the test set, which `feed` reads; `clients`: what they have held back."""
        self._task = task
        self._replica = replica
        self._test = TestBatches(feed, length, task.batch_size)
        self._clients = clients
        self._conduct = conduct
        self._means = _means(task)
        self._over_all = _over_all(task)
        self.tables = Tables.of(task, has_clients=clients is not None)
        self.most_batches = max(len(self._test), len(clients) if clients else 0)
        """Of what is tried at a time."""
        self._serial = 0
        self.by_client: dict[str, list[Any]] | None = None
        """Of the last evaluation, where clients have held something back: a column for each thing that is known of
        them."""
        self.meet: Callable[[str, str], dict[int, str]] | None = None
        """Leaves a text for all workers of several hosts under a name, and waits for theirs."""

    def run(self, strategy: Strategy, world: World) -> dict[str, float]:
        """Loss and metrics over the whole test set."""
        serial, lanes = self._serial + 1, self._conduct.lanes(world.world_size)
        # Where the first worker evaluates for all, others may do so for themselves afterwards.
        name = f"outputs-{serial}-{world.global_rank if self._conduct.first_evaluates else 'of-all'}"
        kept = KeptOutputs(world, name) if self._over_all else None
        table = self._table_of(self._test, strategy, serial, lanes, kept)
        weights = table[:, 0]
        sums = (table[:, 1:] * weights[:, None]).sum(0) / weights.sum()
        found = self._named(sums.tolist())
        if kept is not None:
            serial += 1
            found |= self._conclude(strategy, serial, kept, weights.nonzero()[:, 0].tolist(), lanes, world)
            kept.remove()  # all have what it came to
        found = {name: found[name] for name in ("loss", *self._replica.loss_parts.names, *self._task.metrics)}
        if self._clients is not None:
            serial += 1
            table = self._table_of(self._clients, strategy, serial, lanes, None)
            columns = {name: 2 + MOST_LOSS_PARTS + at for at, name in enumerate(self._means)}
            self.by_client = self._clients.by_client(table, {"loss": 1} | columns)
            found |= client_summary(self.by_client)
        self._serial = serial  # not where an exchange was left: all of it is made again
        return found

    def _table_of(
        self, batches: TriedBatches, strategy: Strategy, serial: int, lanes: int, kept: KeptOutputs | None
    ) -> torch.Tensor:
        """A row for each batch: its weight, loss, what that is told with, and means."""
        self._replica.module.eval()
        try:
            return strategy.exchange(
                serial,
                (len(batches), 2 + MOST_LOSS_PARTS + len(self._means)),
                lambda table, lane: self._fill(batches, table, lane, strategy, lanes, kept),
            )
        finally:
            self._replica.train_mode()

    def _named(self, values: list[float]) -> dict[str, float]:
        """Loss, what it is told with, and means."""
        loss, told, means = values[0], values[1 : 1 + MOST_LOSS_PARTS], values[1 + MOST_LOSS_PARTS :]
        parts = zip(self._replica.loss_parts.names, told, strict=False)
        return {"loss": loss, **dict(parts), **dict(zip(self._means, means, strict=True))}

    @torch.no_grad()
    def _fill(
        self,
        batches: TriedBatches,
        table: torch.Tensor,
        lane: int,
        strategy: Strategy,
        lanes: int,
        kept: KeptOutputs | None,
    ) -> None:
        if kept is None:
            self._fill_rows(batches, table, lane, strategy, lanes, [])
            return
        with kept.of_lane(lane, len(self._over_all)) as files:
            self._fill_rows(batches, table, lane, strategy, lanes, files)

    def _fill_rows(
        self,
        batches: TriedBatches,
        table: torch.Tensor,
        lane: int,
        strategy: Strategy,
        lanes: int,
        files: list[LaneFile],
    ) -> None:
        last, feed = len(batches) - 1, batches.feed
        # Where the model is cut, every lane makes the same number of passes: the last ones may be for nothing.
        stop = -(-len(batches) // lanes) * lanes if self._conduct.gathers else len(batches)
        for number in range(lane, stop, lanes):
            samples = batches.samples(min(number, last))
            batch = feed.keyed_batch(samples, mix(self._task.seed, _TESTING, min(number, last)))
            weight = feed.weight(batch, samples)
            # What counts nothing (padding alone) has no mean either.
            values = self._measure(strategy, batch, files if number <= last else []) if weight else self._nothing
            if values is not None and number <= last:
                table[number] = torch.tensor([weight, *values], dtype=torch.float64)

    @property
    def _nothing(self) -> list[float]:
        return [0.0] * (1 + MOST_LOSS_PARTS + len(self._means))

    def _measure(self, strategy: Strategy, batch: Any, files: list[LaneFile]) -> list[float] | None:
        """Loss and means, and into the files what other metrics read; None where another has the output."""
        replica, task = self._replica, self._replica.task
        told: ToldLoss | None = None
        if task.objective is not None and self._conduct.calls_model:
            told = task_loss(replica, batch)
            if not task.metrics:
                return _row(told)
            inputs, _ = _seen_by_model(replica.module, batch)
        else:
            inputs = inputs_of(task, batch)
        with replica.precision.autocast():
            output = strategy.infer(replica, inputs)
            if output is None:
                return None
            if told is None:
                told = loss_from(replica, output, batch)
        if not task.metrics:
            return _row(told)
        if task.objective is None:
            _, target = split_batch(batch)
        else:
            _, target = _seen_by_model(replica.module, batch)
            output = getattr(output, "logits", output)
        output = replica.precision.widened(output)  # metrics may not know half precision
        for metric, file in zip(self._over_all.values(), files, strict=False):
            if not metric.chooses:
                require_tensors(output, target)
            file.append(metric.keep(output, target))
        return [*_row(told), *(float(mean(output, target)) for mean in self._means.values())]

    def _conclude(
        self, strategy: Strategy, serial: int, kept: KeptOutputs, batches: list[int], lanes: int, world: World
    ) -> dict[str, float]:
        """The metrics over all batches that count, computed by whoever has the first lane."""
        at_end, addresses = ExitStack(), dict[int, str]()

        def fill(table: torch.Tensor, lane: int) -> None:
            if lanes > 1 and world.is_spread and not addresses:
                assert self.meet is not None, "somebody supervises workers on several hosts"
                lender = at_end.enter_context(OutputLender(kept.folder, world))
                addresses.update(self.meet(f"outputs-{serial}@{world.generation}", lender.address))
            if lane == 0:
                if addresses:
                    self._bring_together(
                        kept, addresses, {number % lanes for number in batches}, lanes, strategy, world
                    )
                # The mark says that the row is filled, also where a metric is no number.
                values = [
                    metric.value(kept.read(number, batches, lanes))
                    for number, metric in enumerate(self._over_all.values())
                ]
                table[0] = torch.tensor([1.0, *values], dtype=torch.float64)

        with torch.no_grad(), at_end:
            (row,) = strategy.exchange(serial, (1, 1 + len(self._over_all)), fill).tolist()
        return dict(zip(self._over_all, row[1:], strict=True))

    def _bring_together(
        self,
        kept: KeptOutputs,
        addresses: dict[int, str],
        needed: set[int],
        lanes: int,
        strategy: Strategy,
        world: World,
    ) -> None:
        """Have what was kept on all hosts on this one; what a host took with it that was lost since is made again,
        by this process alone: where hosts may be lost, each has the whole model."""
        fetch_outputs(addresses.values(), kept.folder, world)
        for lane in sorted(needed):
            if kept.lacks(lane, len(self._over_all)):
                nowhere = torch.zeros(len(self._test), 2 + MOST_LOSS_PARTS + len(self._means), dtype=torch.float64)
                self._replica.module.eval()
                self._fill(self._test, nowhere, lane, strategy, lanes, kept)
                self._replica.train_mode()


def _row(told: ToldLoss) -> list[float]:
    found = told.weighted(1.0)
    return [found.loss, *found.all_parts]


def _means(task: Task) -> dict[str, Any]:
    return {name: metric for name, metric in task.metrics.items() if over_all(metric) is None}


def _over_all(task: Task) -> dict[str, OverAll]:
    return {name: found for name, metric in task.metrics.items() if (found := over_all(metric)) is not None}


def _seen_by_model(module: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """Inputs and target of a batch that an objective takes whole."""
    if isinstance(batch, dict):
        for name in _TARGETS:
            if name in batch:
                taken = inspect.signature(module.forward).parameters
                # Who names its target names all that it takes: what else is in a row is not for the model.
                inputs = {key: batch[key] for key in batch if (key in taken if name in taken else key != name)}
                return inputs, batch[name]
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise TaskError(
        "Task: metrics with objective= compare what the model makes of a batch with its target; let a batch be "
        f"(inputs, target) or a dict with {' or '.join(_TARGETS)}, or leave metrics out."
    )
