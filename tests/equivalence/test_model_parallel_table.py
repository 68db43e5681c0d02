"""The equivalence table of the strategies that cut a model: each computes what one process computes."""

from __future__ import annotations

import re

import pytest
from cut_references import TASKS, References, check

from helpers.training import Train
from shoal.launch import ZygoteProcess

SHARDED = [f"sharded:stage={stage}" for stage in (1, 2, 3)]
PIPELINES = [f"pipeline:schedule={name}" for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")]
PAIRS = [
    "mesh:data=2,shard=2",
    "mesh:data=2,tensor=2",
    "mesh:data=2,pipeline=2",
    "mesh:shard=2,tensor=2",
    "mesh:shard=2,pipeline=2",
    "mesh:pipeline=2,tensor=2",
]
TRIPLES = ["mesh:data=2,pipeline=2,tensor=2", "mesh:shard=2,pipeline=2,tensor=2", "mesh:data=2,shard=2,tensor=2"]
ROWS = [
    *((strategy, workers) for strategy in [*SHARDED, "tensor", *PIPELINES] for workers in (2, 4)),
    ("mesh:data=2", 2),
    *((strategy, 4) for strategy in PAIRS),
    *((strategy, 8) for strategy in TRIPLES),
]
COLUMNS = ["mlp", "gpt", "conv, frozen", "conv, synchronised"]
REPRESENTATIVE = [
    ("sharded:stage=3", 2, "conv, synchronised", "momentum"),
    ("tensor", 2, "gpt", "adamw"),
    ("pipeline:schedule=1f1b", 2, "gpt", "momentum"),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> References:
    return References(Train(TASKS, tmp_path_factory.mktemp("references"), zygote))


def shown(value: object) -> str:
    """A value that can be chosen by `pytest -k`."""
    return re.sub(r"\W+", "_", str(value))


def has_synchronised_form(strategy: str) -> bool:
    """A pipeline's micro-batches pass a layer one after the other, so no layer sees the whole batch."""
    return "pipeline" not in strategy


def run_row(references: References, strategy: str, workers: int, column: str, optimizer: str) -> None:
    factory, _, norm = column.partition(", ")
    args = {"frozen": norm == "frozen"} if norm else {}
    if norm == "synchronised" and strategy != "tensor":  # with it every worker has the whole batch
        strategy += (",", ":")[":" not in strategy] + "batchnorm=sync"
    check(references, factory, strategy, workers, optimizer=optimizer, **args)


@pytest.mark.parametrize(("strategy", "workers", "column", "optimizer"), REPRESENTATIVE)
def test_representative_rows(
    references: References, strategy: str, workers: int, column: str, optimizer: str
) -> None:
    run_row(references, strategy, workers, column, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("strategy", "workers", "column"),
    [
        (strategy, workers, column)
        for strategy, workers in ROWS
        for column in COLUMNS
        if column != "conv, synchronised" or has_synchronised_form(strategy)
    ],
    ids=shown,
)
def test_the_whole_table(references: References, strategy: str, workers: int, column: str, optimizer: str) -> None:
    run_row(references, strategy, workers, column, optimizer)
