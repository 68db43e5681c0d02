"""What a coordinator is told about a job."""

from __future__ import annotations

from pathlib import Path

from shoal.roles.coordinator import describe_decision, make_plan
from shoal.spec import Cluster, Job, World

DIGITS = Path(__file__).parents[3] / "examples" / "digits.py"


def plan(strategy: str):
    return make_plan(Job(target=str(DIGITS), strategy=strategy, cluster=Cluster(workers=2)), World())


def test_a_long_evaluation_is_no_death():
    assert plan("ps:sync=asp").silent_after_s >= 300


def test_in_lockstep_nothing_is_adjusted():
    assert plan("ps").adjust == () and plan("ps").num_cells == 230
    assert plan("ps:sync=asp").adjust == ("divergence",)
    assert plan("ps:sync=ssp:3,shares=speed,adjust=bound").adjust == ("bound", "divergence", "shares")


def test_stopping_means_no_rollback():
    assert plan("ps:sync=asp,diverging=stop").max_rollbacks == 0
    assert plan("ps:sync=asp,diverging=ignore").adjust == ()


def test_decisions_read_as_sentences():
    scaled = {"kind": "decision", "what": "scale", "why": "asked for", "workers": 4, "before": 2}
    assert describe_decision(scaled) == "from 2 to 4 workers, as asked for"
    shares = {"kind": "decision", "what": "shares", "why": "speeds differ", "shares": {0: 1.5, 1: 0.5}}
    assert describe_decision(shares) == "shares of the data: worker 0 1.50, worker 1 0.50, because speeds differ"
