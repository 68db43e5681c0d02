"""Makes `docs/compatibility.md` from the facts: run it as a script, and write there what it prints."""

from __future__ import annotations

from typing import Any

from shoal.spec import Cluster, parse_strategy
from shoal.spec.conduct import Conduct
from shoal.spec.features import GATHER, JOB_FEATURES, TASK_FEATURES, Feature

SHOWN = (
    "data",
    "data:via=ring",
    "data:batchnorm=sync",
    "data:partition=relay",
    "average",
    "average:inside=sharded,groups=2",
    "ps",
    "ps:sync=asp",
    "sharded",
    "tensor",
    "pipeline",
    "pipeline:schedule=zero-bubble",
    "layer",
    "layer:decoupled=on",
    "layer:phases=2",
)
"""What differs in what it can do. A mesh can what all of its axes can."""

_COLUMNS = ("a worker holds", "servers", "slots of 2 workers", "pace", "claim", "`Trainer`")
_PAGE = """\
# What goes with what

Each strategy states facts about how a job under it behaves (`spec/conduct.py`); each feature states the facts that
it takes (`spec/features.py`). This page is made from both; what it denies is refused in a sentence that says why.

## Features

{features}

## Facts

{facts}
"""


def page() -> str:
    """The page as Markdown."""
    conducts = {written: parse_strategy(written).conduct(Cluster(workers=2)) for written in SHOWN}
    features: list[Feature[Any]] = [*JOB_FEATURES, *TASK_FEATURES, GATHER]
    able = {written: [_tick(_is_possible(feature, c)) for feature in features] for written, c in conducts.items()}
    facts = {written: _facts(written, conduct) for written, conduct in conducts.items()}
    return _PAGE.format(
        features=_table([f"`{feature.name}`" for feature in features], able),
        facts=_table(list(_COLUMNS), facts),
    )


def _facts(written: str, conduct: Conduct) -> list[str]:
    pace = "lockstep" if conduct.is_lockstep else "its own"
    claim = parse_strategy(written).claim(workers=2).value
    holds = "a part of the model" if conduct.is_cut else "the whole model"
    doors = "`fit`, `step`" if conduct.takes_batches and not conduct.servers else "`fit`"
    return [holds, str(conduct.servers or "–"), str(conduct.slots), pace, claim, doors]


def _table(columns: list[str], rows: dict[str, list[str]]) -> str:
    lines = [["strategy", *columns], ["---"] * (1 + len(columns))]
    lines += [[f"`{written}`", *marks] for written, marks in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_possible(feature: Feature[Any], conduct: Conduct) -> bool:
    # Where a batch is not cut, there is nothing to be gathered.
    return feature.is_possible(conduct) or (feature is GATHER and not conduct.cuts_batches)


def _tick(is_possible: bool) -> str:
    return "yes" if is_possible else "–"


if __name__ == "__main__":
    print(page(), end="")
