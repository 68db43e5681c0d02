"""A model cut over a grid of workers: what the ways to cut it have in common.

Every lane (workers that share a part of the batch) computes the gradient of that part; who holds the same part of
the model adds up what the lanes found; each updates what it holds. How a lane computes is the business of its
`Line`: the whole model in one process, whatever its layers do inside, or a pipeline of stages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.model_stream import TensorLooks, TensorStream
from shoal.model.buffers import MovingBuffers
from shoal.model.parking.parked import Values, hollow_out, unpark, unpark_module
from shoal.model.replica import Replica
from shoal.spec import Mesh
from shoal.step.compute import Sums, check_weight
from shoal.step.passes import SlotPasses
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.base import Fill, Lockstep, Setting, StepResult, step_result
from shoal.strategies.cut.loss_names import learn_names
from shoal.strategies.cut.names import WholeNames
from shoal.strategies.data.batchnorm import check_pieces, check_took_part, synchronise
from shoal.strategies.groups.summed import SummedSwap
from shoal.strategies.mesh.axes import Axes, GridCrew
from shoal.strategies.mesh.copy_sums import EarlySums, LateSums
from shoal.strategies.mesh.held import Held, Wanted, gather
from shoal.strategies.mesh.lines import LaneSums, Line, make_line
from shoal.strategies.mesh.local_optimizer import LocalOptimizer, group_numbers
from shoal.strategies.mesh.sharding import make_sharding
from shoal.strategies.mesh.summing import add_over_stages


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all processes know of a step once they have spoken."""

    sums: Sums
    stop: bool
    save: bool
    counted: bool
    """Whether whole numbers among the moving buffers have changed."""
    counts: list[int]
    """By slot: the samples that were used."""
    touched: frozenset[str]
    """Parameters that have a gradient, wherever they are."""


class MeshStrategy(Lockstep):
    """Implements every strategy that cuts the model."""

    def __init__(self, mesh: Mesh, crew: GridCrew | None = None) -> None:
        """`crew`: of a grid that is one of several. Its part of a small batch may be nothing: then it takes no
        step."""
        self.mesh = mesh
        self._crew = crew

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        self.axes = axes = Axes.form(self.mesh, setting, self._crew)
        self._lane = self.mesh.lane_of(axes.everybody.index)
        numbers = group_numbers(replica)
        self._names = WholeNames(replica)
        if replica.start.model is None:  # else all have read the same
            self._take_first_workers_values(replica.module)
        self._line = line = make_line(replica, self.mesh, axes, setting)
        values = self._bring_in(line, numbers)
        swap = SummedSwap(self.mesh.lanes, axes.across_lanes.all_reduce_)
        self._passes = SlotPasses(swap, device=replica.device)
        if self.mesh.batchnorm == "sync":
            check_pieces(setting)
            synchronise(line.module, self._passes.asking)
        self._buffers = MovingBuffers(line.module)
        trained = {
            line.names[name]: p for name, p in line.module.named_parameters() if line.names[name] in numbers
        }
        shared = {name for name in trained if len(line.stages[name]) > 1}
        self._sharding = make_sharding(
            line.module,
            trained,
            axes.shard,
            self.mesh,
            whole=shared,
            values=values,
            is_limited=setting.memory_bytes is not None,
        )
        self.held = {name: self._hold_trained(name, p) for name, p in trained.items()}
        """By name in the task's model: what the optimizer of this process updates."""
        self.fixed = {
            line.names[name]: self._hold(line.names[name], tensor)
            for name, tensor in line.module.state_dict(keep_vars=True).items()
            if line.names[name] not in trained
        }
        """Likewise what is not trained: buffers, and frozen parameters."""
        self._copies = self._make_copies(trained)
        replica.forget_whole(line.module)
        replica.precision.bind(line.module, line.names, setting.company.report if setting.world.is_first else None)
        self._optimizer = LocalOptimizer(replica, numbers, list(self.held.values()), axes)
        self._update = Update(replica, setting.clip_norm, axes.everybody.all_reduce_)

    def _make_copies(self, trained: Mapping[str, nn.Parameter]) -> LateSums:
        """Who adds up what the copies have found: while a pass goes on, where one pass leaves whole gradients."""
        axes, setting = self.axes, self._setting
        is_one_pass = self.mesh.pipeline * self.mesh.shard == 1 and setting.extent.accumulate == 1
        if axes.data.sums_ahead and is_one_pass and self.mesh.batchnorm != "sync":
            return EarlySums(trained, axes.data)
        return LateSums({name: held.tensor for name, held in self.held.items()}, axes.data)

    def _bring_in(self, line: Line, trained: Collection[str]) -> Values:
        """Have in memory what is parked and stays here; of what will be cut, a function gives the values."""
        is_cut = self.axes.shard.size > 1 and self.mesh.level == 3
        cut = {own for own, name in line.names.items() if name in trained and len(line.stages[name]) == 1}
        unpark_module(line.module, but=cut if is_cut else ())
        return hollow_out(line.module)

    def _hold(self, name: str, tensor: torch.Tensor) -> Held:
        split, stages = self._line.splits.get(name), self._line.stages[name]
        return Held(name=name, tensor=tensor, shape=tensor.shape, split=split, stages=stages)

    def _hold_trained(self, name: str, param: nn.Parameter) -> Held:
        part, spans = self._sharding.part(name), self._sharding.spans(name)
        return replace(self._hold(name, param), tensor=part, spans=spans)

    def _take_first_workers_values(self, module: nn.Module) -> None:
        for tensor in module.parameters():
            if tensor.is_floating_point():
                values = unpark(tensor).detach().contiguous().view(-1)
                self.axes.alike.broadcast_(values)
                tensor.data.copy_(values.view(tensor.shape))

    def take(self, work: Work) -> StepResult:
        moved = self._buffers.begin_mean()
        moved.start()
        own = self._backward(work)
        if self.mesh.batchnorm == "sync":
            check_took_part(own.sums.weight, work.step)
        moved.add(own.sums.weight)
        agreed = self._agree(work, own, moved.counted)
        lacks_samples = self._crew is not None and not agreed.sums.weight
        if not lacks_samples:
            check_weight(work, agreed.sums)
        gradients = self._sum_gradients(agreed)
        if lacks_samples:
            moved.start()
        else:
            across = self.axes.across_lanes
            moved.finish(across.all_reduce_, agreed.sums.weight, counted=agreed.counted, speaks=across.is_first)
            if self._are_fit(gradients, work, agreed.sums.weight):
                self._clip()
                self._optimizer.step()
        for held in self.held.values():
            held.tensor.grad = None
        self.refresh()
        if lacks_samples:
            return StepResult(
                loss=math.nan, weight=0.0, stop=agreed.stop, save=agreed.save, counts=tuple(agreed.counts)
            )
        names = self._replica.loss_parts.names
        found = step_result(agreed.sums, stop=agreed.stop, save=agreed.save, counts=agreed.counts, names=names)
        return replace(found, facts=self._copies.facts)

    def _backward(self, work: Work) -> LaneSums:
        """This lane's passes, in which it may meet the others; not in a pipeline, where they are cut further."""

        self._copies.begin()

        def compute(lane: int) -> LaneSums:
            # What is on its way within the shards has arrived before lanes tell each other that they have ended.
            with self._sharding.in_use():
                return self._line.backward(work, self._sharding.backward)

        if self.mesh.pipeline > 1:
            return compute(self._lane)
        return self._passes.run(work.step, [self._lane], compute)[0]

    def _agree(self, work: Work, own: LaneSums, counted: bool) -> Agreement:
        """Exchange small numbers among all: losses, wishes, samples, and which parameters have gradients."""
        speaks = float(own.speaks)
        head = [
            own.sums.loss * speaks,
            own.sums.weight * speaks,
            float(work.stop),
            float(work.save),
            float(counted),
            float(len(own.sums.parts)),
            *(part * speaks for part in own.sums.all_parts),
        ]
        counts = torch.zeros(self._setting.slots, dtype=torch.float64)
        for slot, samples in own.samples.items():
            counts[slot] = samples * speaks
        touched = torch.tensor(
            [float(name in self.held and self._sharding.has_gradient(name)) for name in self._names.trained],
            dtype=torch.float64,
        )
        control = torch.cat([torch.tensor(head, dtype=torch.float64), counts, touched])
        self.axes.everybody.all_reduce_(control)
        loss, weight, stop, save, has_counted, has_parts, *parts = control[: len(head)].tolist()
        if has_parts:
            learn_names(self._replica.loss_parts, self.axes.everybody)
        found = control[len(head) + len(counts) :] > 0
        names = [name for name, is_touched in zip(self._names.trained, found.tolist(), strict=True) if is_touched]
        return Agreement(
            sums=Sums(loss, weight, parts=tuple(parts)),
            stop=bool(stop),
            save=bool(save),
            counted=bool(has_counted),
            counts=[int(count) for count in control[len(head) :][: len(counts)].tolist()],
            touched=frozenset(names),
        )

    def _sum_gradients(self, agreed: Agreement) -> list[torch.Tensor]:
        """Over stages that share a parameter, over the workers that share the state, over copies."""
        touched = [name for name in self.held if name in agreed.touched]
        for name in self._names.trained:
            stages = self._line.stages.get(name, ())
            if name in agreed.touched and len(stages) > 1 and name in self.held:
                add_over_stages(self._sharding.gradient(name), stages, self.axes.pipeline)
        self._sharding.reduce(touched)
        gradients = [grad for name in touched if (grad := self.held[name].tensor.grad) is not None]
        self._copies.add_up(touched)
        return gradients

    def _are_fit(self, gradients: list[torch.Tensor], work: Work, weight: float) -> bool:
        """Whether the optimizer may take its step with them, which are made those of the mean."""
        named = ((held.name, held.tensor.grad) for held in self.held.values() if held.counts(self.axes))
        return self._update.scale_and_check(work, weight, gradients, named)

    def _clip(self) -> None:
        """By the norm of the whole model's gradient."""
        updated = [held for held in self._optimizer.held if held.tensor.grad is not None]
        counted = (held.tensor.grad for held in updated if held.counts(self.axes))
        self._update.clip([held.tensor for held in updated], (grad for grad in counted if grad is not None))

    def refresh(self) -> None:
        """What is held has new values, and the next pass finds them; all call this."""
        self._sharding.refresh()

    def infer(self, replica: Replica, inputs: Any) -> Any:
        return self._line.infer(inputs)

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.full(shape, torch.nan, dtype=torch.float64)
        with self._sharding.in_use():
            fill(table, self._lane)
        # Of those in a lane who have filled a row, the last stage speaks, and of its workers the first.
        is_filled = ~table[:, 0].isnan() & self.axes.tensor.is_first
        own = is_filled * (self.axes.pipeline.index + 1)
        speaks = is_filled & (own == self.axes.pipeline.max_(own.clone()))
        return self.axes.everybody.all_reduce_(table.where(speaks[:, None], 0.0))

    def model_stream(self, replica: Replica) -> TensorStream:
        wanted = self.wanted_values()
        tensors = gather((wanted[name] for name in sorted(wanted)), self.axes)
        return TensorStream(looks=self._names.looks, tensors=tensors, same=self._names.canonical)

    def wanted_values(self) -> dict[str, Wanted]:
        """By name: the model's parameters and buffers, as they may be gathered."""
        names = self._names
        return {
            name: self.want(name, names.canonical[name], self._values(names.canonical[name]))
            for name in names.looks
        }

    @property
    def trained_names(self) -> list[str]:
        """Of the whole model, wherever its parts are."""
        return self._names.trained

    def looks(self, name: str) -> TensorLooks:
        """Of a whole parameter or buffer."""
        return self._names.looks[name]

    def _values(self, name: str) -> torch.Tensor | None:
        held = self._find(name)
        return None if held is None else held.tensor

    def _find(self, name: str) -> Held | None:
        return self.held.get(name) or self.fixed.get(name)

    def want(
        self,
        path: str,
        name: str,
        value: torch.Tensor | None,
        looks: TensorLooks | None = None,
        *,
        is_cut: bool = True,
    ) -> Wanted:
        """Something that goes with a parameter or buffer, under a name of its own: `value` is what this process
        has of it. `looks`: where they are not those of the parameter."""
        return Wanted(
            name=path,
            looks=looks or self._names.looks[name],
            stage=self._line.stages[name][0],
            held=self._find(name),
            value=value,
            is_cut=is_cut,
        )

    def state_stream(self) -> TensorStream:
        wanted = self.wanted_state()
        looks = {path: one.looks for path, one in wanted.items()}
        return TensorStream(looks=looks, tensors=gather((wanted[path] for path in sorted(wanted)), self.axes))

    def wanted_state(self) -> dict[str, Wanted]:
        """By `parameter/key`: what the optimizer keeps, likewise; all call this."""
        optimizer = self._optimizer
        looks = optimizer.looks({name: self._names.looks[name].shape for name in self._names.trained})

        def want(path: str) -> Wanted:
            name, _, key = path.rpartition("/")
            held = self.held.get(name)
            value = None if held is None else optimizer.value(key, held)
            return self.want(path, name, value, looks[path], is_cut=optimizer.is_cut(key))

        return {path: want(path) for path in looks}

    def close(self) -> None:
        self._copies.close()
        self._sharding.close()
        if self._crew is None:
            self.axes.everybody.close()
