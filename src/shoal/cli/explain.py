"""`shoal train --explain`: the plan of a run, in place of the run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.json_output import print_json
from shoal.cli.plan import Plan, make_plan
from shoal.cli.plan.parts import GridPoint
from shoal.errors import SpecError
from shoal.launch.engines import engine_for
from shoal.launch.supervisor import inspect_task
from shoal.layout import binary_size
from shoal.spec import Job
from shoal.spec.footprint import Flow, Stay, told_of
from shoal.spec.host_facts import HostFacts

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.launch.owner import ZygoteProcess


def explain(job: Job, zygote: ZygoteProcess | None, *, as_json: bool) -> None:
    """Print what training this job would mean, or why it cannot be. The model is built once, in a process of its
    own."""
    facts = _inspect(job, zygote)
    if facts["refusal"]:
        raise SpecError(facts["refusal"])
    plan = make_plan(job, facts, _hosts_of(job))
    if as_json:
        print_json(plan.to_dict())
    else:
        _show(plan)


def _hosts_of(job: Job) -> list[HostFacts]:
    """What hosts of a network have to give: they are asked to join, and sent away. None where it is this one."""
    if not job.cluster.is_remote:
        return []
    hosts = engine_for(job.cluster, None, tell=lambda text: print(text, file=sys.stderr)).reserve(job)
    for host in hosts:
        host.close()
    return [host.facts for host in hosts]


def _inspect(job: Job, zygote: ZygoteProcess | None) -> dict[str, Any]:
    """What the job's task is made of."""
    options = {"probe": False, "slots": job.num_slots, "workers": job.cluster.places, "job": job.to_json()}
    with tempfile.TemporaryDirectory(prefix="shoal-explain-") as folder:
        return inspect_task(job, Path(folder), zygote, {**options, **_width(job)})


def _width(job: Job) -> dict[str, Any]:
    """What to ask where layers are cut by width: how, and over how many workers."""
    if (width := job.conduct.width) is None:
        return {}
    saves_memory = job.cluster.memory_bytes is not None or job.recompute or job.cluster.device != "cpu"
    return {"width": {**asdict(width), "saves_memory": saves_memory}}


def _show(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from shoal.observe.wording import near

    manner = plan.manner
    page = Table.grid(padding=(0, 2))
    page.add_column(style="bold", no_wrap=True)
    page.add_column()
    page.add_row("task", near(plan.target))
    page.add_row("model", f"{sum(p.numel for p in plan.parcels):,} trained parameters, {plan.optimizer}")
    page.add_row("world", plan.world)
    if plan.hosts:
        page.add_row("hosts", "\n".join(plan.hosts))
    page.add_row("strategy", f"{plan.strategy}\n{manner.meaning}")
    page.add_row("data", plan.data)
    page.add_row("on failure", manner.on_failure)
    page.add_row("memory", _memory(plan))
    if flows := [flow for flow in plan.footprint.flows if flow.num_bytes]:
        page.add_row("each step", _traffic(flows))
    if manner.width:
        page.add_row("layers", "\n".join(manner.width))
    if manner.grid:
        page.add_row("grid", _grid(manner.grid))
    console = Console(highlight=False)
    console.print(page)
    if plan.placement_table:
        console.print("\n[bold]placement[/bold]")
        print(plan.placement_table)


def _grid(points: Sequence[GridPoint]) -> Table:
    """Who stands where."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    axes = list(points[0].coordinates)
    for title in ("worker", *axes, "lane"):
        table.add_column(title, justify="right")
    for point in points:
        table.add_row(str(point.worker), *(str(point.coordinates[axis]) for axis in axes), str(point.lane))
    return table


def _memory(plan: Plan) -> Table:
    """What is laid out where, and what that comes to."""
    from rich.table import Table

    found = plan.footprint
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    parts = {
        "shared by all": told_of(found.shared),
        "each worker": told_of(found.worker),
        "each server": told_of(found.server),
    }
    for title, holdings in parts.items():
        if any(holding.total for holding in holdings):
            table.add_row(f"[bold]{title}[/bold]", "", "")
        for holding in holdings:
            if holding.total:
                times = f"{holding.times} x {binary_size(holding.num_bytes)}" if holding.times > 1 else ""
                table.add_row(f"  {holding.what}{_WHEN[holding.stay]}", times, binary_size(holding.total))
    table.add_row("[bold]a worker needs, as --memory[/bold]", "", binary_size(plan.limited.worker_bytes))
    each = binary_size(plan.process_bytes)
    table.add_row(f"all together, with {each} for each process", "", binary_size(plan.memory_bytes))
    if found.unused_bytes:
        table.add_row("mapped besides, for what follows a death", "", binary_size(found.unused_bytes))
    return table


_WHEN = {Stay.ALWAYS: "", Stay.TRAINING: "", Stay.OPENING: " (at first)"}


def _traffic(flows: Sequence[Flow]) -> Table:
    """What each worker sends or reads in a step, and through what."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for flow in flows:
        table.add_row(flow.what, binary_size(flow.num_bytes), flow.medium)
    return table
