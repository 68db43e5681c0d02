"""Cuts a model by width: makes the plan, puts each worker's parts in place, and looks whether all is well."""

from __future__ import annotations

import gc
import zlib

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.errors import SpecError, TaskError
from shoal.layout.tensor_plan import LayerCut, TensorPlan, Wishes
from shoal.model.replica import Replica
from shoal.spec import Mesh
from shoal.strategies.base import Setting
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.building import Parts
from shoal.strategies.mesh.tensor.planning import make_plan
from shoal.strategies.mesh.tensor.probing import CutProbe
from shoal.strategies.mesh.tensor.recording import record
from shoal.strategies.mesh.tensor.residual import with_streams
from shoal.strategies.mesh.tensor.surgery import Surgery


def cut_width(module: nn.Module, mesh: Mesh, axis: Group, replica: Replica, setting: Setting) -> dict[str, Split]:
    """Replace layers of `module`, which is the replica's model or a part of it, by this worker's parts of them.

    Returns, by name in the task's model, how parameters and buffers are cut. Everybody in the row calls this.
    """
    wishes = Wishes.parse(mesh.plan)
    saves_memory = setting.memory_bytes is not None or replica.recomputes or replica.device != "cpu"
    made = _planned(replica, mesh.plan, mesh.norms, axis.size, saves_memory=saves_memory)
    _agree(made, axis)
    # Part of a model cannot be asked for its loss; the trials of its blocks must do.
    before = CutProbe.of(replica) if module is replica.module else None
    for attempt in (made, *made.retreats()):
        splits = _cut(module, attempt, axis, replica, before)
        if splits is not None:
            break
        if wishes is not None:
            raise SpecError(
                f"plan={mesh.plan}: cut like this, the model gives another loss or other gradients than whole; "
                "leave out layers whose weights are used past them, or use plan=auto."
            )
    assert splits is not None, "a whole model agrees with itself"
    if setting.world.is_first:
        for line in attempt.lines():
            setting.company.report(f"tensor={axis.size}: {line}")
    gc.collect()  # trials that failed leave cycles, by which whole tensors would be kept
    return splits


def explain_width(replica: Replica, plan: str, norms: str, count: int, *, saves_memory: bool) -> list[str]:
    """What `cut_width` would do with the replica's model, told in lines; nobody else is needed for it."""
    return _planned(replica, plan, norms, count, saves_memory=saves_memory).lines()


def _planned(replica: Replica, plan: str, norms: str, count: int, *, saves_memory: bool) -> TensorPlan:
    recording, wishes = record(replica), Wishes.parse(plan)
    made = make_plan(replica.module, recording, count, wishes)
    return with_streams(made, replica.module, recording, wishes, norms, saves_memory=saves_memory)


def _agree(plan: TensorPlan, axis: Group) -> None:
    """Workers who cut by different plans would wait for each other for ever."""
    own = float(zlib.crc32("\n".join(plan.lines()).encode()))
    bounds = axis.max_(torch.tensor([own, -own], dtype=torch.float64))
    if bounds[0] != -bounds[1]:
        raise TaskError(
            f"tensor={axis.size}: the model calls other layers in one worker than in another; they cannot "
            "agree how to cut it. Let its forward depend on its inputs alone."
        )


def _cut(
    module: nn.Module, plan: TensorPlan, axis: Group, replica: Replica, before: CutProbe | None
) -> dict[str, Split] | None:
    """Carry a plan out; None, and the model whole again, where it does not compute what it did before."""
    names = _names_of(replica.module)
    parts = Parts(axis)
    surgery = Surgery(module, dict(replica.module.named_modules(remove_duplicate=False)), parts)
    _carry_out(plan, surgery)
    if plan.streams:
        surgery.end_streams([module] if module is replica.module else module.children())
    splits = {names[key]: split for key, split in parts.splits().items()}
    is_whole = not splits and not plan.streams  # as it was: whatever its own code says now, no cut is to blame
    if before is None or is_whole or before.agrees(replica, splits, axis):
        return splits
    surgery.undo()
    return None


def _names_of(module: nn.Module) -> dict[int, str]:
    """By identity, names of parameters and buffers; of tied ones that of `named_parameters`."""
    state = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}
    return state | {id(param): name for name, param in module.named_parameters()}


def _carry_out(plan: TensorPlan, surgery: Surgery) -> None:
    """Cut what is here. Layers that belong together but are not all here (the rest is in another stage of a
    pipeline, or a traced model has no such module any more) are cut each for itself."""
    here = {id(each) for each in surgery.root.modules()}

    def is_here(name: str) -> bool:
        return id(surgery.named[name]) in here

    alone: list[LayerCut] = list(plan.singles)
    for region in plan.regions:
        needed = [cut.layer for cut in region.cuts] + [name for name, _ in region.divided]
        needed += [region.block] if region.narrowed else []
        if all(map(is_here, needed)):
            surgery.cut_region(region)
        else:
            alone += region.apart()
    surgery.cut(cut for cut in alone if is_here(cut.layer))
    for stream in plan.streams:
        if is_here(stream.block):
            surgery.cut_stream(stream)
