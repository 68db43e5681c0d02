"""How numbers, events and the end of a run read: the same words on a terminal, in a log, in the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.observe.events import Event
from shoal.observe.summary import RunSummary

_FAULTS = {"kill": "killed", "hang": "stopped", "slow": "slowed down", "raise": "raised an error in"}


def number(value: float | None) -> str:
    """A loss or a metric, in four digits."""
    if value is None:
        return "–"
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    return f"{value:.4f}"[:6].rstrip(".") if plain and value >= 0 else f"{value:.3g}"


def rate(per_second: float | None) -> str:
    """Samples per second."""
    if per_second is None:
        return "–"
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2f}"


def duration(seconds: float | None) -> str:
    """Minutes and seconds, with hours where there are any."""
    if seconds is None:
        return "–:––"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def results(values: Mapping[str, float], part: str = "test") -> str:
    """`test loss 0.1234, accuracy 0.97`."""
    return ", ".join(f"{f'{part} ' if name == 'loss' else ''}{name} {number(v)}" for name, v in values.items())


def world(values: Mapping[str, Any]) -> str:
    """`4 workers, 1 spare, data`."""
    if values.get("text"):
        return str(values["text"])
    parts = [plural(values.get("workers", 1), "worker")]
    if values.get("spares"):
        parts.append(plural(values["spares"], "spare"))
    return ", ".join([*parts, str(values.get("strategy", "data"))])


def member(values: Mapping[str, Any]) -> str:
    """`server 1`: which process this is about."""
    role = values.get("role", "worker")
    # There is one coordinator at a time.
    return "the coordinator" if role == "coordinator" else f"{role} {values['rank']}"


def fault(values: Mapping[str, Any]) -> str:
    """`killed worker 1 at step 50`: one of the faults that the user asked for."""
    what, how = f"{member(values)} at step {values['step']:,}", ""
    if values["kind"] == "slow":
        how = f" by a factor of {values['factor']:g}"
    if values["seconds"] is not None:
        how += f" for {values['seconds']:g} s"
    return f"{_FAULTS[values['kind']]} {what}{how}"


def audit(values: Mapping[str, Any]) -> str:
    """What became of the data, in one line: of each sample, or of parts of it where shards were counted."""
    if "shards" not in values:
        once, twice, never = values["once"], values["more_than_once"], values["never"]
        expected = f"{values['samples']:,} samples expected"
        return f"{expected}: {once:,} committed once, {twice:,} more than once, {never:,} never"
    return f"{values['samples']:,} samples expected, in {_audit_of_cells(values)}"


def _audit_of_cells(values: Mapping[str, Any]) -> str:
    cells, shards = values["cells"], values["shards"]
    never, twice = max(row["never"] for row in shards), max(row["more_than_once"] for row in shards)
    if values["clean"] and never:
        return f"{cells:,} parts: {never:,} left out by the quorum, the others committed once"
    if values["clean"]:
        return f"{cells:,} parts: all committed once, on each of {plural(len(shards), 'shard')}"
    return f"{cells:,} parts: {twice:,} committed more than once, {never:,} never"


def precision(values: Mapping[str, Any]) -> str:
    """`fp16, losses scaled by 32,768, 1 step skipped`: what a model computed in."""
    parts = [str(values["precision"])]
    if "loss_scale" in values:
        parts.append(f"losses scaled by {values['loss_scale']:,.6g}")
        parts.append(f"{plural(values['skipped_steps'], 'step')} skipped")
    if values.get("float32_layers"):
        parts.append(f"in float32: {', '.join(values['float32_layers'])}")
    return ", ".join(parts)


def near(path: str) -> str:
    """A path as one would type it here: relative where it is below the current folder."""
    full, here = Path(path), Path.cwd()
    return str(full.relative_to(here) if full.is_relative_to(here) else full)


def plural(num: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{num} {noun}{'' if num == 1 else 's'}"


def line(event: Event) -> str | None:
    """The line that announces this event; None for those that only move the progress on."""
    values, who = event.values, "" if event.rank is None else f"worker {event.rank}"
    match event.kind:
        case "world":
            return world(values)
        case "evaluation":
            return f"step {values['step']:,}: {results(values['results'])}"
        case "line":
            return f"{who}: {values['text']}" if who else str(values["text"])
        case "warning":
            return f"warning: {values['text']}"
        case "fault":
            return f"fault: {fault(values)}"
        case "hung":
            where = f", in {values['where']}" if values["where"] else ""
            stacks = f"; all stacks are in {near(values['stacks'])}" if values["stacks"] else ""
            return f"{member(values)} hangs at step {values['step']:,}: {values['reason']}{where}{stacks}"
        case "lost":
            return f"{member(values)} was lost: {values['reason']}"
        case "replaced":
            successor = " by a spare" if "spare" in values else ""
            if "by" in values:
                return f"worker {values['by']} took over the work of {member(values)} in {values['seconds']:.2f} s"
            return f"{member(values)} was replaced{successor} in {values['seconds']:.2f} s"
        case "restarted":
            undone = f"{plural(values['undone'], 'step')} undone, {values['seconds']:.1f} s lost"
            return f"{_beginning(values['step'])}, {undone}: {values['reason']}"
        case "scaled":
            return f"{plural(values['workers'], 'worker')} in place of {values['before']}: {values['reason']}"
        case "checkpoint":
            size, stall = memory(values["nbytes"]), values["stall"]
            return (
                f"checkpoint of step {values['step']:,}: {size} in {values['seconds']:.2f} s, stall {stall:.3f} s"
            )
        case "decision":
            return None if values.get("routine") else f"coordinator: {values['text']}"
        case "failed":
            return f"{who or 'run'} failed: {values['message']}"
        case "stopped":
            return f"stopped: {values['reason']}"
    return None


def _beginning(step: int) -> str:
    return f"all begin again after step {step:,}" if step else "all begin again from the start"


def is_raised(event: Event) -> bool:
    """Whether this tells of a failure. Whoever started the run gets it as an error; a screen shows it once."""
    return event.kind == "failed" or (event.kind == "stopped" and event.values["reason"] == "failed")


def final_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The table at the end of a run: what came out, how fast, where it is."""
    ended = summary.outcome.values if summary.outcome else {}
    seconds = ended.get("seconds")
    rows = [(f"test {name}" if name == "loss" else name, number(value)) for name, value in summary.results.items()]
    if not rows and summary.loss is not None:
        rows.append(("training loss", number(summary.loss)))
    early = f" of {summary.total_steps:,}" if summary.step < summary.total_steps else ""
    rows.append(("steps", f"{summary.step:,}{early}"))
    rows.append(("samples", f"{summary.samples:,}"))
    rows.append(("samples/s", rate(ended.get("samples_per_s", summary.speed.samples_per_s))))
    if seconds is not None:
        rows.append(("seconds", f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"))
    if summary.world:
        rows.append(("world", world(summary.world)))
    if summary.faults:
        rows.append(("faults", ", ".join(f"{num} {kind}" for kind, num in sorted(summary.faults.items()))))
    if summary.replaced:
        rows.append(("replaced", ", ".join(plural(num, role) for role, num in sorted(summary.replaced.items()))))
    if summary.restarts:
        undone = plural(summary.undone_steps, "step")
        rows.append(("restarted", f"{plural(summary.restarts, 'time')}, {undone} undone"))
    if summary.skipped_seen:
        rows.append(("seen before", f"{summary.skipped_seen:,} samples were left out"))
    if summary.skipped_parts:
        what = f"{summary.skipped_parts:,} parts of batches with {summary.skipped_weight:,.0f} samples"
        rows.append(("learnt already", f"{what} were skipped"))
    if summary.precision:
        rows.append(("precision", precision(summary.precision)))
    if peaks := [worker.peak_rss for worker in summary.workers.values() if worker.peak_rss]:
        rows.append(("memory", f"{memory(max(peaks))} at most in a worker"))
    if summary.stalls:
        mean = sum(summary.stalls) / len(summary.stalls)
        rows.append(("checkpoints", f"{len(summary.stalls):,}, training stood still {mean:.3f} s for each"))
    if summary.audit:
        rows.append(("audit", audit(summary.audit)))
    if summary.saved:
        rows.append(("model", near(summary.saved["path"])))
        rows.append(("digest", str(summary.saved["digest"])))
    return rows
