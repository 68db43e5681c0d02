"""A placement in words: a row per server, and how well it is balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.layout.lines import Parcel
from shoal.layout.placement import Placement

WIDTH = 80
CUT_MARK = "*"
_GAP = "  "
_INDENT = " " * 8
_WIDEST_LIST = 16
"""Characters that a list of shards may take for a line to fit the width."""


@dataclass(frozen=True, kw_only=True)
class ServerRow:
    """What one server holds."""

    server: int
    shards: tuple[int, ...]
    num_bytes: int
    share: float
    """Its part of the model's bytes, from 0 to 1."""
    params: tuple[str, ...]
    """Parameters of which it holds anything, in the model's order."""
    cut: frozenset[str]
    """Those of them that it holds only a part of."""
    backup_of: tuple[int, ...]
    """Shards of other servers that it keeps a copy of."""


def explain(placement: Placement, parcels: Sequence[Parcel]) -> list[ServerRow]:
    """A row per server, in the order of their numbers."""
    return [_row(placement, parcels, server) for server in range(len(placement.capacities))]


def render(placement: Placement, parcels: Sequence[Parcel]) -> str:
    """A table of plain text: two lines per server, then the balance in a sentence."""
    rows = explain(placement, parcels)
    columns = [
        _column("server", [str(row.server) for row in rows]),
        _column("shards", [_ranges(row.shards) for row in rows]),
        _column("size", [binary_size(row.num_bytes) for row in rows]),
        _column("share", [f"{row.share:.1%}" for row in rows]),
        _column("parameters", [str(len(row.params)) for row in rows]),
        _column("cut", [str(len(row.cut)) for row in rows]),
        _column("backup of", [_ranges(row.backup_of) for row in rows]),
    ]
    heading, *figures = (_GAP.join(texts) for texts in zip(*columns, strict=True))
    lines = [heading]
    for row, figure in zip(rows, figures, strict=True):
        lines += [figure, _INDENT + _names(row)] if row.params else [figure]
    if any(row.cut for row in rows):
        lines.append(f"{CUT_MARK} cut: other servers hold the rest")
    lines.append(f"The largest server carries {placement.imbalance:.2%} more than its fair share.")
    return "\n".join(lines)


def _row(placement: Placement, parcels: Sequence[Parcel], server: int) -> ServerRow:
    held: dict[int, int] = {}
    shards = placement.shards_of(server)
    for span in sorted(span for shard in shards for span in placement.shards[shard]):
        held[span.param] = held.get(span.param, 0) + span.stop - span.start
    num_bytes = placement.server_bytes[server]
    return ServerRow(
        server=server,
        shards=tuple(shards),
        num_bytes=num_bytes,
        share=num_bytes / sum(placement.shard_bytes),
        params=tuple(parcels[param].name for param in held),
        cut=frozenset(parcels[param].name for param, numel in held.items() if numel < parcels[param].numel),
        backup_of=tuple(shard for shard, backup in enumerate(placement.backups) if backup == server),
    )


def _column(heading: str, texts: Sequence[str]) -> list[str]:
    """The heading and the texts, aligned to the right."""
    width = max(map(len, [heading, *texts]))
    return [text.rjust(width) for text in [heading, *texts]]


def _names(row: ServerRow) -> str:
    """The first parameters, as many as fit on the line."""
    room = WIDTH - len(_INDENT)
    names = [f"{name}{CUT_MARK}" if name in row.cut else name for name in row.params]
    if len(text := ", ".join(names)) <= room:
        return text
    while names and len(text := ", ".join([*names, "…"])) > room:
        names.pop()
    return text if names else f"{row.params[0][: room - 4]}…, …"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7; cut short where that is long."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "–"
    return text if len(text) <= _WIDEST_LIST else f"{text[: _WIDEST_LIST - 1]}…"


def binary_size(num_bytes: int) -> str:
    """Bytes in the unit that fits."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
