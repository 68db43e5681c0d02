"""How numbers, events and the end of a run read: the same words on a terminal, in a log, in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.observe.events import Event
from shoal.observe.happenings import (
    Audited,
    CheckpointWritten,
    Decided,
    Evaluated,
    Failed,
    FaultInjected,
    HostAdded,
    HostGone,
    Hung,
    LineSaid,
    Lost,
    Replaced,
    Restarted,
    Scaled,
    Stopped,
    Warned,
    WorldFormed,
)
from shoal.observe.summary import RunSummary
from shoal.spec.vocabulary import Role

FAILED = "failed"
"""Why a run was stopped that failed."""
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


def world(told: WorldFormed) -> str:
    """`4 workers, 1 spare, data`."""
    if told.text:
        return told.text
    parts = [plural(told.workers, "worker")]
    if told.spares:
        parts.append(plural(told.spares, "spare"))
    return ", ".join([*parts, told.strategy])


def member(told: FaultInjected | Hung | Lost | Replaced) -> str:
    """`server 1`: which process this is about."""
    # There is one coordinator at a time.
    return "the coordinator" if told.role == Role.COORDINATOR else f"{told.role or Role.WORKER} {told.rank}"


def fault(told: FaultInjected) -> str:
    """`killed worker 1 at step 50`: one of the faults that the user asked for."""
    what, how = f"{member(told)} at step {told.step:,}", ""
    if told.kind == "slow":
        how = f" by a factor of {told.factor:g}"
    if told.seconds is not None:
        how += f" for {told.seconds:g} s"
    return f"{_FAULTS[told.kind]} {what}{how}"


def audit(told: Audited) -> str:
    """What became of the data, in one line: of each sample, or of parts of it where shards were counted."""
    expected = f"{told.samples or 0:,} samples expected"
    if told.shards is not None:
        return f"{expected}, in {_audit_of_cells(told, told.shards)}"
    once, twice, never = told.once or 0, told.more_than_once or 0, told.never or 0
    return f"{expected}: {once:,} committed once, {twice:,} more than once, {never:,} never"


def _audit_of_cells(told: Audited, shards: Sequence[Mapping[str, Any]]) -> str:
    cells = f"{told.cells or 0:,} cells"
    never, twice = max(row["never"] for row in shards), max(row["more_than_once"] for row in shards)
    if told.clean and never:
        return f"{cells}: {never:,} left out by the quorum, the others committed once"
    if told.clean:
        return f"{cells}: all committed once, on each of {plural(len(shards), 'shard')}"
    return f"{cells}: {twice:,} committed more than once, {never:,} never"


def staleness(told: Audited) -> str:
    """By how many updates the model had moved on when gradients arrived; empty where it never had."""
    shards = told.shards or []
    if not (most := max((shard.get("delay_max", 0) for shard in shards), default=0)):
        return ""
    mean = sum(shard.get("delay_mean", 0.0) for shard in shards) / len(shards)
    return f"gradients arrived {mean:.2f} updates late on average, {most:,} at most"


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


def plural(num: int, noun: str, many: str = "") -> str:
    """`1 worker`, `2 workers`; `many`: where an s does not make it."""
    return f"{num} {noun}" if num == 1 else f"{num} {many or f'{noun}s'}"


def line(event: Event) -> str | None:
    """The line that announces this event; None for those that only move the progress on."""
    told, who = event.what, "" if event.rank is None else f"worker {event.rank}"
    match told:
        case WorldFormed():
            return world(told)
        case Evaluated():
            return f"step {told.step:,}: {results(told.results)}"
        case LineSaid():
            return f"{who}: {told.text}" if who else told.text
        case Warned():
            return f"warning: {told.text}"
        case FaultInjected():
            return f"fault: {fault(told)}"
        case Hung():
            where = f", in {told.where}" if told.where else ""
            stacks = f"; all stacks are in {near(told.stacks)}" if told.stacks else ""
            return f"{member(told)} hangs at step {told.step:,}: {told.reason}{where}{stacks}"
        case Lost():
            return f"{member(told)} was lost: {told.reason}"
        case HostGone():
            return (
                f"host {told.name} was lost, with {plural(told.processes, 'process', 'processes')}: {told.reason}"
            )
        case HostAdded():
            return f"host {told.name} takes part from now on"
        case Replaced():
            return _succession(told)
        case Restarted():
            undone = f"{plural(told.undone, 'step')} undone, {told.seconds:.1f} s lost"
            return f"{_beginning(told.step)}, {undone}: {told.reason}"
        case Scaled():
            return f"{plural(told.workers, 'worker')} in place of {told.before}: {told.reason}"
        case CheckpointWritten():
            took = f"{memory(told.nbytes)} in {told.seconds:.2f} s, stall {told.stall:.3f} s"
            return f"checkpoint of step {told.step:,}: {took}"
        case Decided():
            return None if told.routine else f"coordinator: {told.text}"
        case Failed():
            return f"{who or 'run'} failed: {told.message}"
        case Stopped():
            return f"stopped: {told.reason}"
    return None


def _succession(told: Replaced) -> str:
    if told.by is not None:
        return f"worker {told.by} took over the work of {member(told)} in {told.seconds:.2f} s"
    successor = "" if told.spare is None else " by a spare"
    return f"{member(told)} was replaced{successor} in {told.seconds:.2f} s"


def _beginning(step: int) -> str:
    return f"all begin again after step {step:,}" if step else "all begin again from the start"


def is_raised(event: Event) -> bool:
    """Whether this tells of a failure. Whoever started the run gets it as an error; a screen shows it once."""
    return isinstance(event.what, Failed) or (isinstance(event.what, Stopped) and event.what.reason == FAILED)


def spent_privacy(told: Mapping[str, Any]) -> str:
    """What a run has told of its data at most."""
    text = f"epsilon {told['epsilon']:.4g}"
    if told["budget"] is not None:
        text += f" of {told['budget']:g}"
    num = told["rounds"]
    text += f" at delta {told['delta']:g} spent on {told['unit']}: {num:,} {'round' if num == 1 else 'rounds'} "
    if (alike := told.get("rounds_alike", num)) < num:
        text += f"in all, {'the last one' if alike == 1 else f'the last {alike:,}'} "
    text += f"with noise {told['noise']:.4g} × clip {told['clip']:g}, {told['sampling']} sampling at a rate of "
    return f"{text}{told['rate']:.4g} ({told['accountant']})"


def final_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The table at the end of a run: what came out, how fast, where it is."""
    ended = summary.outcome
    seconds = None if ended is None else ended.seconds
    speed = summary.speed.samples_per_s if ended is None or ended.samples_per_s is None else ended.samples_per_s
    rows = [(f"test {name}" if name == "loss" else name, number(value)) for name, value in summary.results.items()]
    if not rows and summary.loss is not None:
        rows.append(("training loss", number(summary.loss)))
    if (earlier := summary.evaluated_before_its_end) is not None:
        rows.append(("evaluated", f"after step {earlier:,}"))
    if (best := summary.ends.values.get("best")) is not None:
        found = number(best["results"][best["by"]])
        rows.append(("best", f"{best['by']} {found} at step {best['step']:,}"))
    early = f" of {summary.total_steps:,}" if summary.step < summary.total_steps else ""
    rows.append(("steps", f"{summary.step:,}{early}"))
    rows.append(("samples", f"{summary.samples:,}"))
    rows.append(("samples/s", rate(speed)))
    if seconds is not None:
        rows.append(("seconds", f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"))
    if summary.world is not None:
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
    if (privacy := summary.ends.values.get("privacy")) is not None:
        rows.append(("privacy", spent_privacy(privacy)))
    if peaks := [worker.peak_rss for worker in summary.workers.values() if worker.peak_rss]:
        rows.append(("memory", f"{memory(max(peaks))} at most in a worker"))
    if summary.stalls:
        mean = sum(summary.stalls) / len(summary.stalls)
        rows.append(("checkpoints", f"{len(summary.stalls):,}, training stood still {mean:.3f} s for each"))
    if summary.audit is not None:
        rows.append(("audit", audit(summary.audit)))
        if late := staleness(summary.audit):
            rows.append(("staleness", late))
    if summary.saved is not None:
        rows.append(("model", near(summary.saved.path)))
        rows.append(("digest", summary.saved.digest))
    return rows
