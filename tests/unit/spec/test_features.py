"""Features name the facts that they take; what cannot be follows from the two, for strategies of any kind."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster, Conduct, Job, features
from shoal.spec.features import JOB_FEATURES, TASK_FEATURES, Feature


def test_every_feature_names_facts_that_there_are_words_for() -> None:
    facts = {field.name for field in fields(Conduct)}
    for feature in (*JOB_FEATURES, *TASK_FEATURES):
        assert set(feature.needs) <= facts & features._LACKS.keys(), feature.name


def test_a_new_feature_needs_no_word_in_any_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    punctual: Feature[Job] = Feature(
        name="diary",
        asked=lambda job: "diary=on" if job.options.get("diary") else "",
        does="writes down what all do at the same time",
        needs=("is_lockstep",),
    )
    monkeypatch.setattr(features, "JOB_FEATURES", (*JOB_FEATURES, punctual))
    monkeypatch.setitem(features._LACKS, "is_lockstep", "under strategy={strategy} each does it at its own time")
    for strategy in ("data", "ps", "pipeline", "layer:phases=2"):
        Job(target="a.py", strategy=strategy, cluster=Cluster(workers=2), options={"diary": True})
    Job(target="a.py", strategy="ps:sync=asp")
    with pytest.raises(SpecError) as refused:
        Job(target="a.py", strategy="ps:sync=asp", options={"diary": True})
    assert str(refused.value) == (
        "Job: diary=on writes down what all do at the same time, but under strategy=ps:sync=asp each does it at "
        "its own time; leave it out."
    )


@pytest.mark.parametrize("strategy", ["data:via=ring", "ps:via=ring", "sharded", "layer", "layer:phases=2"])
@pytest.mark.parametrize(
    "asked",
    [{"on_failure": "shrink"}, {"cluster": Cluster(workers="1:2")}, {"cluster": Cluster(workers=2, spares=1)}],
)
def test_refusals_are_one_sentence_with_what_to_do(strategy: str, asked: dict) -> None:
    with pytest.raises(SpecError) as refused:
        Job(**{"target": "a.py", "strategy": strategy, "cluster": Cluster(workers=2), **asked})
    text = str(refused.value)
    assert text.startswith("Job: ") and text.endswith(".") and ", but " in text and "; " in text
    assert text.count(". ") == 0 and "{" not in text
