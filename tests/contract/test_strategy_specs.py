"""One suite for what every strategy says of itself: its facts fit together, and its written form is all of it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from importlib import import_module

import pytest

from helpers.compatibility_page import SHOWN
from shoal.errors import SpecError
from shoal.spec import Claim, Cluster, Conduct, Job, StrategySpec, parse_strategy
from shoal.spec.features import JOB_FEATURES, TASK_FEATURES

WRITTEN = [
    *SHOWN,
    "data:via=backend",
    "data:journal=off",
    "ps:sync=quorum:1/2",
    "ps:push=parameters,every=4",
    "ps:servers=host",
    "sharded:stage=1,policy=layer",
    "mesh:data=2",
    "mesh:shard=2,batchnorm=sync",
    "mesh:pipeline=2,schedule=gpipe",
]
WORKERS = 2


@pytest.fixture(params=WRITTEN)
def spec(request: pytest.FixtureRequest) -> StrategySpec:
    return parse_strategy(request.param)


@pytest.fixture
def conduct(spec: StrategySpec) -> Conduct:
    return spec.conduct(Cluster(workers=WORKERS))


def test_all_that_is_registered_is_here() -> None:
    own = {cls for cls in _subclasses(StrategySpec) if cls.name and cls.__module__.startswith("shoal.")}
    assert {type(parse_strategy(written)) for written in WRITTEN} == own


def _subclasses(cls: type[StrategySpec]) -> set[type[StrategySpec]]:
    return {cls, *(found for each in cls.__subclasses__() for found in _subclasses(each))}


def test_the_written_form_is_all_of_it(spec: StrategySpec) -> None:
    assert parse_strategy(str(spec)) == spec
    assert str(spec).startswith(spec.name)
    with pytest.raises(FrozenInstanceError):
        spec.name = "another"  # type: ignore[misc]
    assert all(field.default is not None for field in fields(spec)), "None cannot be written"


def test_what_it_is_made_by_exists(spec: StrategySpec) -> None:
    module, _, function = spec.made_by.partition(":")
    if function:  # the parameter server's processes are made by their roles
        assert callable(getattr(import_module(module), function))


def test_every_slot_is_filled(conduct: Conduct) -> None:
    assert len(conduct.fills) == WORKERS
    assert {slot for filled in conduct.fills for slot in filled} == set(range(conduct.slots))
    assert conduct.slots_per_worker == tuple(map(len, conduct.fills))
    assert 1 <= conduct.lanes(WORKERS) <= WORKERS


def test_facts_fit_together(conduct: Conduct) -> None:
    if conduct.has_places:
        assert not conduct.is_cut and not conduct.servers, "a place is taken in memory that all share"
    if conduct.is_cut:
        assert conduct.gathers, "nobody has all of it by itself"
    if conduct.frees_parameters:
        assert conduct.is_cut
    if conduct.is_relay or conduct.has_places:
        assert conduct.is_lockstep
    assert conduct.microbatches >= 1 and conduct.servers >= 0 and conduct.preprocess >= 0


def test_slots_are_the_users_choice_where_they_are_free(spec: StrategySpec) -> None:
    if spec.conduct(Cluster(workers=WORKERS)).slots_are_free:
        assert spec.conduct(Cluster(workers=WORKERS), 6).slots == 6
        Job(target="a.py", strategy=str(spec), cluster=Cluster(workers=WORKERS), slots=6)
    else:
        with pytest.raises(SpecError, match="slots=7"):
            Job(target="a.py", strategy=str(spec), cluster=Cluster(workers=WORKERS), slots=7)


def test_reasons_are_given_for_facts_and_features_alone(conduct: Conduct) -> None:
    names = {field.name for field in fields(Conduct)}
    names |= {feature.name for feature in (*JOB_FEATURES, *TASK_FEATURES)}
    assert set(conduct.why) <= names
    assert not any(words.endswith(".") or words[0].isupper() for words in conduct.why.values()), (
        "parts of sentences"
    )


def test_a_claim_is_made_for_any_number_of_workers(spec: StrategySpec) -> None:
    claims = [spec.claim(workers, optimizer) for workers in (1, 2) for optimizer in ("SGD", "AdamW")]
    assert all(isinstance(claim, Claim) for claim in claims)


def test_a_trial_is_of_the_same_strategy(spec: StrategySpec) -> None:
    assert type(spec.for_trial(5)) is type(spec)
    trial = spec.synchronised() if spec.conduct(Cluster(workers=WORKERS)).synchronises else spec
    assert type(trial) is type(spec) and parse_strategy(str(trial)) == trial


def test_a_job_can_have_it(spec: StrategySpec) -> None:
    job = Job(target="a.py", strategy=str(spec), cluster=Cluster(workers=WORKERS))
    assert Job.from_json(job.to_json()) == job and job.spec == spec
