"""`report.md`: a run on one page, made from what it left in its folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from shoal.errors import SpecError
from shoal.observe import wording
from shoal.observe.chart import draw_chart
from shoal.observe.disk import write_whole
from shoal.observe.events import Event
from shoal.observe.happenings import (
    Decided,
    Failed,
    FaultInjected,
    Happening,
    HostGone,
    Hung,
    Lost,
    Replaced,
    Restarted,
    Scaled,
    StepsTaken,
    Stopped,
    Warned,
)
from shoal.observe.jsonl import read_events
from shoal.observe.run_folder import RunFolder
from shoal.observe.summary import UNDOING, RunSummary, Worker
from shoal.spec import Job
from shoal.spec.vocabulary import Purpose

_MOST_EVALUATIONS = 12
_MOST_LINES = 20
_MOST_CLIENTS = 20


def write_report(run_dir: Path | str) -> Path:
    """Write `report.md`, and `loss.png` where matplotlib is installed; returns the report's path."""
    folder = RunFolder.open(run_dir)
    job, events = folder.read_job(), read_events(folder.path)
    summary = RunSummary()
    for event in events:
        summary.add(event)
    sections = [
        [f"# {folder.name}", "", _headline(events, summary)],
        _section("Job", _job_table(job, summary)),
        _section("Results", _table(("", ""), wording.final_rows(summary))),
        _section("Loss", [_picture(folder, events, summary)]),
        _section("Evaluations", _evaluations(summary)),
        _section("Clients", _clients(summary)),
        _section("Memory", _memory(summary)),
        _section("Faults that were asked for", _story(events, FaultInjected)),
        _section("What went wrong", _story(events, Warned, Hung, HostGone, Lost, Replaced, Restarted, Failed)),
        _section("Workers that came and went", _story(events, Scaled)),
        _section("What the coordinator decided", _story(events, Decided)),
        _section("Repeat it", ["```", command(job), "```"]),
    ]
    write_whole(folder.report, "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")
    return folder.report


def command(job: Job) -> str:
    """The command line that asks for this job again."""
    cluster = job.cluster
    words = ["shoal", "run" if job.purpose == Purpose.SCRIPT else job.purpose, job.target]
    words += ["--workers", cluster.written_workers]
    if job.purpose == Purpose.TRAIN:
        words += ["--strategy", job.strategy]
    flags = {
        "spares": cluster.spares or None,
        "slots": job.slots,
        "threads": cluster.threads,
        "device": cluster.device if cluster.device != "cpu" else None,
        "port": cluster.port,
        "memory": cluster.memory or None,
        "on": cluster.on if cluster.is_remote and cluster.engine != "ranks" else None,
        "interface": cluster.interface or None,
        "ports": cluster.ports or None,
        "link": cluster.link or None,
        "store": cluster.store or None,
        "chaos": job.chaos or None,
        "on_failure": job.on_failure if job.on_failure != "auto" else None,
        "max_failures": job.max_failures if job.max_failures != 10 else None,
        "precision": job.precision if job.precision != "fp32" else None,
        "privacy": job.protection.told if job.protection is not None else None,
        "memory_format": job.memory_format if job.memory_format != "contiguous" else None,
        "products": job.products if job.products != "torch" else None,
        "convolutions": job.convolutions if job.convolutions != "torch" else None,
        "offload": job.offload if job.offload != "none" else None,
        "checkpoint": job.checkpoint if job.checkpoint != "none" else None,
        "from": job.options.get("from"),
        **job.overrides,
    }
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("recompute", "compile", "graph", "loss_in_pieces", "flat_update", "fast", "sync_device"):
        if getattr(job, name):
            words.append(f"--{name.replace('_', '-')}")
    if cluster.trusted_network:
        words.append("--trusted-network")
    if job.options.get("skip_seen"):
        words.append("--skip-seen")
    for name, value in job.args.items():
        words += ["--arg", f"{name}={value}"]
    for logger in job.options.get("log", ()):
        words += ["--log", logger]
    return shlex.join(words)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines] if lines else []


def _headline(events: Sequence[Event], summary: RunSummary) -> str:
    when = f"{datetime.fromtimestamp(events[0].time):%Y-%m-%d %H:%M}" if events else "at an unknown time"
    done = f"{summary.step:,} steps on {summary.samples:,} samples"
    if summary.outcome is None:
        return f"Started {when}; {done}, and no end: it was killed, or is still running."
    if isinstance(summary.outcome, Stopped):
        return f"Started {when}, stopped after {done}: {summary.outcome.reason}."
    return f"Started {when}, finished after {done}: {wording.results(summary.results)}."


def _job_table(job: Job, summary: RunSummary) -> list[str]:
    rows = [("task", f"`{job.target}`")]
    rows += [(f"`{name}`", f"{value}") for name, value in (*job.args.items(), *job.overrides.items())]
    rows.append(("strategy", f"`{job.strategy}`, {wording.plural(job.num_slots, 'slot')}"))
    spares = f", {wording.plural(job.cluster.spares, 'spare')}" if job.cluster.spares else ""
    told = summary.world.threads if summary.world is not None else None
    threads = wording.plural(job.cluster.threads_per_worker if told is None else told, "thread")
    workers = wording.plural(job.cluster.workers, "worker")
    rows.append(("where", f"{job.cluster.on}: {workers} with {threads} each{spares}"))
    return _table(("", ""), rows)


def _picture(folder: RunFolder, events: Sequence[Event], summary: RunSummary) -> str:
    try:
        losses, parts = counted_losses(events), counted_parts(events)
        draw_chart(folder.chart, folder.name, losses, summary.evaluations, parts)
    except SpecError as error:
        return f"_{error}_"
    return f"![Loss over the steps]({folder.chart.name})"


def counted_losses(events: Iterable[Event]) -> list[tuple[int, float]]:
    """By step, the losses that led to the model as it is: none of steps that were undone and not taken again."""
    losses: dict[int, float] = {}
    for event in events:
        if isinstance(event.what, UNDOING):
            last = event.what.step
            losses = {step: loss for step, loss in losses.items() if step <= last}
        elif isinstance(event.what, StepsTaken):
            losses.update((step, loss) for step, loss in event.what.steps)
    return sorted(losses.items())


def counted_parts(events: Iterable[Event]) -> dict[str, list[tuple[int, float]]]:
    """By name, the same of the numbers that losses are told with."""
    by_step: dict[int, dict[str, float]] = {}
    for event in events:
        if isinstance(event.what, UNDOING):
            last = event.what.step
            by_step = {step: parts for step, parts in by_step.items() if step <= last}
        elif isinstance(event.what, StepsTaken):
            by_step.update((step, parts) for step, parts in event.what.parts or ())
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, parts in sorted(by_step.items()):
        for name, value in parts.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def _evaluations(summary: RunSummary) -> list[str]:
    """Every evaluation, or so many of them evenly spread that the page stays a page."""
    found = summary.evaluations
    if len(found) > _MOST_EVALUATIONS:
        spread = (len(found) - 1) / (_MOST_EVALUATIONS - 1)
        found = [found[round(at * spread)] for at in range(_MOST_EVALUATIONS)]
    if not found:
        return []
    names = list(found[-1][1])
    rows = [(f"{step:,}", *(wording.number(values.get(name)) for name in names)) for step, values in found]
    lines = _table(("step", *(f"test {name}" if name == "loss" else name for name in names)), rows)
    if len(found) < len(summary.evaluations):
        lines += ["", f"{len(found)} of {len(summary.evaluations)} evaluations; all are in `events.jsonl`."]
    return lines


def _clients(summary: RunSummary) -> list[str]:
    """How each fares at the end; of many, those with the highest loss."""
    columns = summary.by_client
    rows = sorted(zip(*columns.values(), strict=True), key=lambda row: -row[2])[:_MOST_CLIENTS] if columns else []
    if not rows:
        return []
    found = [(str(client), f"{weight:g}", *map(wording.number, values)) for client, weight, *values in rows]
    lines = _table(("client", "held back", *list(columns)[2:]), found)
    if (count := len(columns["client"])) > len(rows):
        lines += ["", f"{len(rows)} of {count} clients, by their loss; all are in `events.jsonl`."]
    return lines


def _memory(summary: RunSummary) -> list[str]:
    has_gpus = any(worker.peak_gpu for worker in summary.workers.values())
    rows = [
        (str(rank), wording.memory(worker.peak_rss), *_gpu_cells(worker) * has_gpus)
        for rank, worker in sorted(summary.workers.items())
        if worker.peak_rss
    ]
    columns = ("of its GPU", "taken from the driver", "unused of that")
    lines = _table(("worker", "most memory held", *columns * has_gpus), rows) if rows else []
    if lines and (offloaded := summary.ends.values.get("offloaded_bytes")):
        lines += [
            "",
            f"The host has {wording.memory(offloaded)} of what the optimizer keeps that a GPU would hold.",
        ]
    if lines and has_gpus and (settings := os.environ.get("PYTORCH_CUDA_ALLOC_CONF")):
        lines += ["", f"Settings of the allocator: `{settings}`."]
    return lines


def _gpu_cells(worker: Worker) -> tuple[str, ...]:
    """The most that was used, the most that was taken for it, and what of that lay in pieces that nobody used."""
    if not worker.peak_gpu_taken:
        return wording.memory(worker.peak_gpu), "", ""
    unused = 1 - worker.peak_gpu / worker.peak_gpu_taken
    return wording.memory(worker.peak_gpu), wording.memory(worker.peak_gpu_taken), f"{unused:.0%}"


def _story(events: Iterable[Event], *kinds: type[Happening]) -> list[str]:
    """What these kinds of events tell, one line each."""
    lines = [
        f"- {datetime.fromtimestamp(event.time):%H:%M:%S} {text}"
        for event in events
        if isinstance(event.what, kinds) and (text := wording.line(event)) is not None
    ]
    if len(lines) > _MOST_LINES:
        more = len(lines) - _MOST_LINES
        lines = [*lines[:_MOST_LINES], f"- and {more} more, in `events.jsonl`"]
    return lines


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |" for texts in lines]
