"""How checkpoints look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from shoal.observe.wording import near, number, plural

if TYPE_CHECKING:
    from shoal.checkpoint.comparing import TensorDifference
    from shoal.checkpoint.listing import Entry
    from shoal.checkpoint.manifest import Manifest

MOST_ROWS = 40
"""Differences that are listed; the others are counted."""


def entries_table(entries: Sequence[Entry]) -> Table:
    """A run's checkpoints, the oldest first."""
    table = _table("step>", "saved", "size>", "seconds>", "digest of the model")
    for entry in entries:
        if entry.problem:
            table.add_row(str(entry.step), Text("torn", "bold red"), "", "", "shoal checkpoint verify tells why")
            continue
        saved, size = _time(entry.saved_at), decimal(entry.nbytes)
        table.add_row(f"{entry.step:,}", saved, size, f"{entry.seconds:.2f}", Text(entry.digest))
    return table


def facts_table(entry: Entry, manifest: Manifest) -> RenderableType:
    """What a checkpoint is, and how much of what it holds."""
    facts = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    rows = {
        "step": f"{entry.step:,}",
        "saved": f"{_time(entry.saved_at)}, in {entry.seconds:.2f} s",
        "digest": entry.digest,
        "folder": near(str(entry.path)),
        **_job_rows(manifest),
    }
    for name, value in rows.items():
        # Not as markup: what stands in a checkpoint may be anybody's words.
        facts.add_row(name, Text(value))
    parts = _table("part", "tensors>", "values>", "size>")
    for part, file in manifest.files.items():
        # Tied weights are two names for the same values.
        unique = {location.offset: location for location in file.locations if location.nbytes}.values()
        values = sum(prod(location.shape) for location in unique)
        size = decimal(sum(location.nbytes for location in unique))
        parts.add_row(part, f"{len(file.locations):,}", f"{values:,}", size)
    return Group(facts, "", parts)


def tensors_table(manifest: Manifest) -> Table:
    """Every tensor."""
    table = _table("part", "tensor", "dtype", "shape", "size>")
    for part, file in manifest.files.items():
        for one in file.locations:
            table.add_row(part, Text(one.name), one.dtype, str(list(one.shape)), decimal(one.nbytes))
    return table


def verdict_line(path: Path, problem: str) -> Text:
    """Whether a checkpoint is whole."""
    if problem:
        return Text.assemble(("torn   ", "bold red"), problem)
    return Text.assemble(("whole  ", "green"), near(str(path)))


def differences_table(found: Sequence[TensorDifference], *, same_model: bool) -> RenderableType:
    """Which tensors differ and by how much, then a line that sums up."""
    table = _table("part", "tensor", "different in", "largest>")
    for item in found[:MOST_ROWS]:
        largest = "" if item.largest is None else number(item.largest)
        table.add_row(item.part, Text(item.name), Text(item.what), largest)
    more = f" ({MOST_ROWS} are shown)" if len(found) > MOST_ROWS else ""
    verdict = "the models are equal, the optimizers' states differ" if same_model else "they differ"
    return Group(table, Text(f"{verdict}: {plural(len(found), 'tensor')}{more}", "bold red"))


def _job_rows(manifest: Manifest) -> dict[str, str]:
    """What is known of the run; any of it may be missing in a checkpoint from elsewhere."""
    job = manifest.facts.get("job")
    rows = {}
    if isinstance(job, dict):
        cluster = job.get("cluster")
        workers = cluster.get("workers") if isinstance(cluster, dict) else None
        rows = {"task": job.get("target"), "strategy": job.get("strategy"), "workers": workers}
    rows |= {name: manifest.facts.get(name) for name in ("slots", "epoch", "samples")}
    return {name: _value(value) for name, value in rows.items() if value is not None}


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _table(*columns: str) -> Table:
    """Columns by title; those that end in `>` hold numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in columns:
        is_number = title.endswith(">")
        table.add_column(title.rstrip(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return table
