"""Forty small models under all strategies that compute what one process does: each trains, and `shoal verify`
holds or explains."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import mean

import pytest
from zoo_data import BATCH, SAMPLES
from zoo_list import EXPLAINED, QUICK, REFUSED, STRATEGIES, VERIFIES, ZOO, ZooPair, pairs

from helpers.training import Train
from shoal.errors import ShoalError
from shoal.launch.owner import ZygoteProcess
from shoal.verification import Verdict, VerifyReport, verify

HERE = Path(__file__).parent
MODELS = 40
STEPS = 3


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id=pair.name, marks=() if pair.is_quick else pytest.mark.long) for pair in pairs()],
)
def test_it_trains_and_verifies(pair: ZooPair, tmp_path: Path, zygote: ZygoteProcess) -> None:
    if pair.file == "libraries":
        pytest.importorskip("transformers")
    strategy, workers = STRATEGIES[pair.strategy]
    train = Train(HERE / f"{pair.file}.py", tmp_path, zygote)
    if pair.outcome == REFUSED:
        with pytest.raises(ShoalError, match=re.escape(pair.words)):
            train(pair.model, workers=workers, strategy=strategy)
        return
    trained = train(pair.model, workers=workers, strategy=strategy)
    losses = list(trained.losses().values())
    assert len(losses) == trained.results["steps"] == 2 * SAMPLES / BATCH
    assert mean(losses[len(losses) // 2 :]) < mean(losses[: len(losses) // 2]), "it learns: two passes over all"
    assert trained.results.get("audit", {"clean": True})["clean"]
    report = verify(f"{train.tasks}:{pair.model}", workers=workers, strategy=strategy, steps=STEPS, zygote=zygote)
    assert isinstance(report, VerifyReport)
    judge(report, pair)


def judge(report: VerifyReport, pair: ZooPair) -> None:
    """What was found is what is listed."""
    said = [row.note for row in report.rows if row.verdict is Verdict.WARNING]
    if pair.outcome == VERIFIES:
        assert report.ok, report.mismatches
        assert not said
    else:
        assert pair.outcome == EXPLAINED
        assert any(pair.words in note for note in said), said
        assert all("whole batch" in row.comparison for row in report.mismatches), report.mismatches


def test_the_list_has_all_models_and_no_others() -> None:
    for file, listed in ZOO.items():
        assert makers_in(HERE / f"{file}.py") == set(listed)
    assert sum(map(len, ZOO.values())) == MODELS
    assert set(QUICK) <= {(pair.model, pair.strategy) for pair in pairs()}


def makers_in(file: Path) -> set[str]:
    """Names of the functions there that return a task."""
    found = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef) and node.returns
    ]
    makers = {node.name for node in found if node.returns and ast.unparse(node.returns) == "shoal.Task"}
    return {name for name in makers if not name.startswith("_")}
