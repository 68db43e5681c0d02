"""The equivalence table: every strategy that claims it computes what one process computes.

Not here are those that train in another way, and are judged by their results over seeds: `ps` where timing decides
(`tests/integration/test_verify_served.py`) and `layer:decoupled=on`.
"""

from __future__ import annotations

import re

import pytest
from cut_references import TASKS, References, check, check_half

from helpers.training import Train, Trained
from shoal.launch.owner import ZygoteProcess

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
DATA = [f"data:via={via}" for via in ("arena", "ring", "tree", "central", "allgather", "backend")]
SERVED = [
    "ps:servers=2",
    "ps:servers=2,wire=tcp",
    "ps:sync=ssp:0",
    "ps:via=ring",
    "ps:via=router:2",
    "ps:servers=host",
]
TURNS = "layer:phases=2,every=2"
PLACES = {
    ("mlp", 2): "0@0+4@1",
    ("gpt", 2): "tokens@0+blocks.2@1",
    ("conv", 2): "0@0+5@1",
    ("mlp", 4): "0@0+2@1+4@2+8@3",
    ("gpt", 4): "tokens@0+blocks.1@1+blocks.2@2+blocks.3@3",
    ("conv", 4): "0@0+3@1+5@2+9@3",
}
COLUMNS = ["mlp", "gpt", "conv, frozen", "conv, synchronised"]
REPRESENTATIVE = [
    ("sharded:stage=3", 2, "conv, synchronised", "momentum"),
    ("tensor", 2, "gpt", "adamw"),
    ("pipeline:schedule=1f1b", 2, "gpt", "momentum"),
]
Row = tuple[str, int, str]
"""Strategy, workers, column."""


def has_synchronised_form(strategy: str) -> bool:
    """A pipeline's micro-batches pass a layer one after the other, so no layer sees the whole batch; with servers,
    and where layers take turns, each worker normalises by itself."""
    return not strategy.startswith(("ps", TURNS)) and "pipeline" not in strategy


def rows_of(strategies: list[str], *counts: int) -> list[Row]:
    """The strategies with so many workers each, and every column that there is for them."""
    return [
        (strategy, workers, column)
        for strategy in strategies
        for workers in counts
        for column in COLUMNS
        if column != "conv, synchronised" or has_synchronised_form(strategy)
    ]


PLACED: list[Row] = [
    (f"layer:place={PLACES[column.partition(',')[0], workers]}", workers, column)
    for workers in (2, 4)
    for column in COLUMNS
]
TABLE = [
    *rows_of([*DATA, *SERVED, *SHARDED, "tensor", *PIPELINES, TURNS], 2, 4),
    *rows_of(["data:partition=relay", "mesh:data=2"], 2),
    *PLACED,
    *rows_of(PAIRS, 4),
    *rows_of(TRIPLES, 8),
]
HALF_TABLE = [row for row in TABLE if row[1] == 2 or row[0].startswith(("tensor", "mesh"))]
"""More workers round no more than two do, but along the width of layers."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> References:
    return References(Train(TASKS, tmp_path_factory.mktemp("references"), zygote))


def shown(value: object) -> str:
    """A value that can be chosen by `pytest -k`."""
    return re.sub(r"\W+", "_", str(value))


def written(strategy: str, column: str) -> tuple[str, str, dict[str, bool]]:
    """Strategy, factory and arguments of a row."""
    factory, _, norm = column.partition(", ")
    # Where every worker has the whole batch there is nothing to be synchronised.
    if norm == "synchronised" and not strategy.startswith(("tensor", "layer", "data:partition")):
        strategy += (",", ":")[":" not in strategy] + "batchnorm=sync"
    return strategy, factory, {"frozen": norm == "frozen"} if norm else {}


def run_row(references: References, strategy: str, workers: int, column: str, optimizer: str) -> None:
    strategy, factory, args = written(strategy, column)
    check(references, factory, strategy, workers, optimizer=optimizer, **args)


def run_half(references: References, strategy: str, workers: int, column: str, optimizer: str) -> Trained:
    strategy, factory, args = written(strategy, column)
    return check_half(references, factory, strategy, workers, optimizer=optimizer, **args)


@pytest.mark.parametrize(("strategy", "workers", "column", "optimizer"), REPRESENTATIVE)
def test_representative_rows(
    references: References, strategy: str, workers: int, column: str, optimizer: str
) -> None:
    run_row(references, strategy, workers, column, optimizer)


def test_layers_are_cut_by_width_in_bf16_too(references: References) -> None:
    ran = run_half(references, "tensor", 2, "gpt", "adamw")
    assert any("qkv by column, mix by row" in line["text"] for line in ran.told("line"))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(("strategy", "workers", "column"), TABLE, ids=shown)
def test_the_whole_table(references: References, strategy: str, workers: int, column: str, optimizer: str) -> None:
    run_row(references, strategy, workers, column, optimizer)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "workers", "column"), HALF_TABLE, ids=shown)
def test_the_table_in_bf16(references: References, strategy: str, workers: int, column: str) -> None:
    run_half(references, strategy, workers, column, "momentum")
