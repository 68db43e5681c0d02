"""Runs on executors of Spark: those of a local cluster, started once for all tests here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import LaunchError, SpecError
from shoal.launch.engines import starter_of
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.remote.gathering import AgentEngine
from shoal.launch.runs import train
from shoal.spec import Cluster, Job

pyspark = pytest.importorskip("pyspark", reason="Spark is not installed: pip install shoal[spark]")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java (openjdk-17-jre-headless)", allow_module_level=True)

TASKS = Path(__file__).parents[2] / "equivalence" / "small_tasks.py"
MASTER = "local-cluster[2,1,1024]"


@pytest.fixture(scope="module")
def spark_work() -> Iterator[None]:
    """A local cluster leaves the folders of its executors where Spark is installed."""
    folder = Path(pyspark.__file__).parent / "work"
    before = set(folder.glob("*"))
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        yield
    for left in set(folder.glob("*")) - before:
        assert not list(left.glob("*/.shoal-*")), "a task has left its secret behind"
        shutil.rmtree(left)


def settings_of(on: str, folder: Path) -> dict[str, Any]:
    cluster = {"workers": 2, "threads": 1, "on": on}
    return {"strategy": "data", "args": {"steps": 6}, "runs": folder, "cluster": cluster, "progress": False}


@pytest.mark.long
def test_the_bits_are_those_of_one_host(
    spark_work: None, tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)
    spread = train(f"{TASKS}:mlp", **settings_of(f"spark:{MASTER}", tmp_path))
    told = (spread.folder / "events.jsonl").read_text()
    assert "on 2 hosts (127.0.0.1:" in told and spread.results["audit"]["clean"]
    here = train(f"{TASKS}:mlp", **settings_of("local", tmp_path))
    assert spread.digest == here.digest


def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(workers=2, on="spark://127.0.0.1:1")
    with pytest.raises(LaunchError, match=r"Nobody listens for Spark at spark://127\.0\.0\.1:1"):
        AgentEngine(starter_of(cluster, print)).reserve(Job(target="toy.py", strategy="ps", cluster=cluster))
    with pytest.raises(SpecError, match="the session of this Python process, which has none"):
        starter_of(Cluster(workers=2, on="spark"), print)


@pytest.mark.long
def test_a_session_of_ones_own(
    spark_work: None, tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: what Java starts in one stays there."""
    script = tmp_path / "own.py"
    script.write_text(
        "from pyspark.sql import SparkSession\nimport shoal\n"
        "if __name__ == '__main__':\n"
        f"    session = SparkSession.builder.master('{MASTER}').getOrCreate()\n"
        f"    run = shoal.train('{TASKS}:mlp', strategy='ps', args={{'steps': 3}}, runs='{tmp_path}',\n"
        "                      progress=False, cluster={'workers': 2, 'threads': 1, 'on': 'spark'})\n"
        "    rows = session.range(30).selectExpr('double(id) as a', 'id % 2 as y').repartition(3)\n"
        f"    table = shoal.datasets.from_spark(rows, '{tmp_path}/table', features=['a'], target='y')\n"
        f"    again = shoal.datasets.from_spark(rows.rdd, '{tmp_path}/again', features=['a'], target='y')\n"
        "    assert len(table.files) == 3 and table.sizes == again.sizes and sum(table.sizes) == 30\n"
        "    assert sorted(x.item() for x, y in table) == [float(n) for n in range(30)]\n"
        "    print('clean', run.results['audit']['clean'], session.range(7).count())\n"
        "    session.stop()\n"
    )
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, ZYGOTE_VARIABLE: zygote.name}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=280)
    assert "clean True 7" in done.stdout, done.stderr[-3000:]
