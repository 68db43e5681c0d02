"""Loggers are found by their names, those of other packages, too; what cannot be is refused at once."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from helpers.logged import read_csv, sink_of
from shoal.errors import SpecError
from shoal.observe import Event, Logger, RunFolder
from shoal.observe.happenings import Finished, Resumed, StepsTaken
from shoal.observe.loggers import find_loggers, logger_sinks, named, several
from shoal.observe.loggers.csv_files import CsvLogger
from shoal.spec import Cluster, Job


class Foreign(Logger):
    def __init__(self, setting: str) -> None:
        self.setting = setting


def test_each_is_there_once_and_the_second_of_a_kind_has_a_folder_of_its_own() -> None:
    mine = Foreign("")
    assert several("csv") == ["csv"] and several(mine) == [mine]
    assert several(["csv", "tensorboard", "csv"]) == ["csv", "tensorboard"]
    found = find_loggers(["csv", "csv:/elsewhere", mine])
    assert list(found) == ["csv", "csv-2", "Foreign"] and found["Foreign"] is mine


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(SpecError, match=r"logger 'tensorbord' is not known. Did you mean 'tensorboard'\?"):
        find_loggers(["tensorbord"])


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SpecError, match=rf"not installed: pip install shoal\[{name}\]"):
        find_loggers([name])


def test_other_packages_bring_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = EntryPoints([EntryPoint("foreign", f"{__name__}:Foreign", "shoal.loggers")])
    monkeypatch.setattr(named, "entry_points", lambda **by: brought.select(**by))
    found = find_loggers(["foreign:sqlite:///here"])["foreign"]
    assert isinstance(found, Foreign) and found.setting == "sqlite:///here"
    with pytest.raises(SpecError, match="Choose one of: csv, foreign, mlflow, tensorboard, wandb"):
        find_loggers(["nobody"])


def test_settings_are_those_of_the_job(tmp_path: Path) -> None:
    job = Job(
        target="digits.py:task",
        args={"width": 8},
        cluster=Cluster(workers=2),
        overrides={"epochs": 3},
        privacy="noise=1,key=987654321",
        run_dir="/elsewhere",
    )
    folder = RunFolder(tmp_path)
    (told,) = logger_sinks({"csv": CsvLogger()}, folder, job)
    told.handle(Event(StepsTaken(steps=[[1, 0.5]]), 0))
    told.close()
    settings = read_csv(folder.logged / "csv").settings
    expected = {"target": "digits.py:task", "args.width": "8", "cluster.workers": "2", "overrides.epochs": "3"}
    assert expected.items() <= settings.items()
    assert settings["privacy"] == "delta=1e-05,clip=1,noise=1", "who reads a log cannot take the noise off"
    assert not {"run_dir", "options", "slots"} & settings.keys(), "neither what is ours, nor what was not said"


def test_what_a_crash_tore_from_a_table_is_not_glued_to_the_next_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    metrics = folder.logged / "csv" / "metrics.csv"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("step,name,value,time\n1,train/loss,0.5,17.0\n2,train/lo")
    told = sink_of("csv", CsvLogger(), folder)
    for event in (Event(Resumed(step=1)), Event(StepsTaken(steps=[[2, 0.25]]), 0), Event(Finished())):
        told.handle(event)
    told.close()
    assert read_csv(metrics.parent).scalars == {"train/loss": [(1, 0.5), (2, 0.25)]}
