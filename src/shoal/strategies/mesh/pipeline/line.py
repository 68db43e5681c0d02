"""A lane whose workers have consecutive stages of the model each."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.errors import SpecError
from shoal.feed.parts import LoadedBatch, Part
from shoal.layout.schedules import schedule_of
from shoal.layout.stage_memory import StageDemand
from shoal.ledger.order import mix
from shoal.model.optimizer.kinds import state_schema
from shoal.model.recompute import compute_once, recompute_whole
from shoal.model.replica import Replica
from shoal.spec import Mesh
from shoal.step.compute import Backward, Sums, ToldLoss, check_finite, seed_slot
from shoal.step.objective import inputs_of, loss_from
from shoal.step.work import Work
from shoal.strategies.base import Setting
from shoal.strategies.cut.executor import Executor, Microbatch
from shoal.strategies.cut.stage_run import StageRun
from shoal.strategies.cut.tracing import bind
from shoal.strategies.mesh.axes import Axes
from shoal.strategies.mesh.lines import LaneSums
from shoal.strategies.mesh.pipeline.block_chain import find_links
from shoal.strategies.mesh.pipeline.chain import parse_split
from shoal.strategies.mesh.pipeline.costs import balanced_split
from shoal.strategies.mesh.pipeline.links import ModelLinks
from shoal.strategies.mesh.splits import Split


class PipelineLine:
    """Each worker has the stages that the schedule gives it; a step's pieces follow each other through them."""

    def __init__(self, replica: Replica, mesh: Mesh, axes: Axes, setting: Setting) -> None:
        self._replica = replica
        self._schedule = schedule = schedule_of(mesh)
        self._worker = axes.pipeline.index
        if replica.recomputes:
            compute_once(replica.module)  # its blocks are taken apart; stages are computed again as a whole
        stages = self._cut(mesh, axes, setting)
        gc.collect()  # tracing leaves cycles that would keep the whole model
        self._note_names(replica.module, stages)
        own = {number: stages[number] for number in schedule.stages_of(self._worker)}
        self.module: nn.Module = nn.ModuleDict({f"stage{number}": stage for number, stage in own.items()})
        self.splits: Mapping[str, Split] = {}
        if mesh.tensor > 1:
            from shoal.strategies.mesh.tensor.cutting import cut_width

            self.splits = cut_width(self.module, mesh, axes.tensor, replica, setting)
        has_output = schedule.worker_of(schedule.num_stages - 1) == self._worker
        self._speaks = has_output and axes.tensor.is_first
        if replica.recomputes:
            for stage in own.values():
                recompute_whole(stage)
        runs = {number: StageRun(stage, stage.parameters) for number, stage in own.items()}
        self._executor = Executor(runs, schedule, axes.pipeline, device=replica.device)

    def _cut(self, mesh: Mesh, axes: Axes, setting: Setting) -> Sequence[nn.Module]:
        """As the first worker finds best: what one measures, others may not. Grids of one run are cut alike."""
        if setting.supply is None:
            raise SpecError(
                f"strategy={mesh} must see the model run before it cuts it, but finds no sample of the data here; "
                "use shoal.train, or data."
            )
        replica = self._replica
        inputs = inputs_of(replica.task, setting.supply.sample())
        # Layers that are cut by width together must stay together.
        chain = find_links(replica.module, inputs, opens_layers=mesh.tensor == 1, device=replica.device)
        self._signature, self._besides = chain.signature, chain.besides
        counts = torch.zeros(mesh.num_stages, dtype=torch.int64)
        if mesh.split != "auto":
            counts = torch.tensor(parse_split(chain, mesh.split, mesh.num_stages))
        elif axes.alike.is_first:
            demand, given = self._demand(mesh, setting), self._given(inputs)
            counts = torch.tensor(balanced_split(chain, given, demand, trained=replica.trained))
        axes.alike.broadcast_(counts)
        if axes.alike.is_first:
            setting.company.report(_describe(chain, counts.tolist()))
        return chain.stages(counts.tolist())

    def _given(self, inputs: Any) -> dict[str, Any]:
        """What the model is given, by name."""
        return {**self._besides, **bind(self._signature, inputs)}

    def _demand(self, mesh: Mesh, setting: Setting) -> StageDemand:
        schema = state_schema(self._replica.optimizer)
        return StageDemand(
            mesh=mesh,
            microbatches=setting.extent.accumulate,
            kept=0 if schema is None else len(schema.mirrored),
            recomputes=self._replica.recomputes,
            limit=setting.memory_bytes,
        )

    def _note_names(self, whole: nn.Module, stages: Sequence[nn.Module]) -> None:
        canonical = {id(p): name for name, p in whole.named_parameters()}
        names: dict[str, str] = {}
        holders: dict[str, set[int]] = {}
        for number, stage in enumerate(stages):
            worker = self._schedule.worker_of(number)
            for name, tensor in stage.state_dict(keep_vars=True).items():
                known = canonical.get(id(tensor), name)
                holders.setdefault(known, set()).add(worker)
                if worker == self._worker:
                    names[f"stage{number}.{name}"] = known
        self.names: Mapping[str, str] = names
        self.stages: Mapping[str, tuple[int, ...]] = {name: tuple(sorted(at)) for name, at in holders.items()}

    def backward(self, work: Work, run: Backward) -> LaneSums:
        by_slot = {part.slot: self._backward_part(work, part) for part in work.parts}
        return LaneSums(
            sums=sum(by_slot.values(), start=Sums()),
            samples={slot: int(own.samples) for slot, own in by_slot.items()},
            speaks=self._speaks,
        )

    def _backward_part(self, work: Work, part: Part) -> Sums:
        seed_slot(work, part.slot, self._replica.device)  # for what is drawn while samples are read
        pieces = list(part.load())
        counted = [piece for piece in pieces if piece[1]]  # padding alone has no mean
        losses: list[ToldLoss] = []
        if counted:
            microbatches = [
                self._microbatch(work, part, number, piece, losses) for number, piece in enumerate(counted)
            ]
            self._executor.run(self._schedule.actions(len(counted))[self._worker], microbatches)
        weights = [weight for _, weight, _ in counted]
        # Only the last stage has losses; to all others the weights are known alone.
        found = sum(
            (told.weighted(weight) for told, weight in zip(losses, weights, strict=False)),
            start=Sums(samples=sum(samples for _, _, samples in pieces)),
        )
        return replace(found, weight=sum(weights))

    def _microbatch(
        self, work: Work, part: Part, number: int, piece: LoadedBatch, losses: list[ToldLoss]
    ) -> Microbatch:
        batch, weight, _ = piece
        share = weight if part.total_weight is None else weight / part.total_weight
        key = mix(work.seed, work.step, part.slot, number) >> 1  # of what an objective draws, at every stage
        precision, given = self._replica.precision, self._given(inputs_of(self._replica.task, batch, key))
        return Microbatch(
            given=given,
            finish=partial(self._loss, work, part, batch, key, losses),
            share=share * precision.scale,
            forward_in=partial(precision.autocast, work.step),
            shape=self._shape(given, precision.numbers(work.step), goes_back=True),
            seed=lambda stage: _seed(
                mix(work.seed, work.step, part.slot, stage, number) >> 1, self._replica.device
            ),
        )

    def _loss(
        self, work: Work, part: Part, batch: Any, key: int, losses: list[ToldLoss], output: Any
    ) -> torch.Tensor:
        told = loss_from(self._replica, output, batch, key)
        check_finite(told.loss.item(), work, part)
        losses.append(ToldLoss(told.loss.detach(), told.parts))
        return told.loss

    def infer(self, inputs: Any) -> Any:
        precision, given = self._replica.precision, self._given(inputs)
        with precision.autocast():
            output = self._executor.infer(given, self._shape(given, precision.numbers(), goes_back=False))
        return precision.widened(output)

    def _shape(self, given: Mapping[str, Any], numbers: Hashable, *, goes_back: bool) -> Hashable:
        """What decides the form of all messages; the same at every worker of the pipeline."""
        shapes = tuple(
            (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf in tree_leaves(dict(given))
        )
        return goes_back, self.module.training, numbers, shapes


def _seed(key: int, device: str) -> None:
    torch.default_generator.manual_seed(key)
    if device != "cpu":
        torch.cuda.manual_seed(key)


def _describe(chain: ModelLinks, counts: Sequence[int]) -> str:
    parts: list[str] = []
    first = 0
    for number, count in enumerate(counts):
        links = [name for name, _ in chain.links[first : first + count]]
        parts.append(f"{number}: {links[0]} to {links[-1]}" if count > 1 else f"{number}: {links[0]}")
        first += count
    return f"Pipeline of {len(counts)} stages: {'; '.join(parts)}."
