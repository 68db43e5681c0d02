"""Strategies in their two forms: written and dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.spec import Claim, Cluster, Conduct, Data, Job, StrategySpec, parse_strategy
from shoal.spec import strategy as module
from shoal.spec.conduct import even_fills

shares = st.just("even") | st.lists(st.integers(1, 40), min_size=1, max_size=5).map(
    lambda n: "+".join(map(str, n))
)
ways = st.tuples(st.sampled_from(Data.VIA), st.sampled_from(["local", "sync"])).filter(
    lambda way: way != ("chain", "sync")
)
specs = st.builds(
    lambda way, **more: Data(via=way[0], batchnorm=way[1], **more), ways, shares=shares, journal=st.booleans()
).filter(lambda spec: spec.journal or spec.shares_memory)


@given(specs)
def test_both_forms_are_one_thing(spec: Data) -> None:
    assert parse_strategy(str(spec)) == spec
    assert parse_strategy(spec) is spec


def test_only_what_differs_from_the_default_is_written() -> None:
    assert str(Data()) == "data"
    assert str(Data(journal=False, via="ring")) == "data:via=ring,journal=off"
    assert parse_strategy("data:") == parse_strategy("data") == Data()


@pytest.mark.parametrize("word", ["on", "yes", "True", "1"])
def test_switches_take_the_usual_words(word: str) -> None:
    assert parse_strategy(f"data:journal={word}") == Data()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("dta", ["'dta'", "Did you mean 'data'?", "Choose one of: average, data"]),
        (
            "data:vai=ring",
            ["key 'vai'", "Did you mean 'via'?", "batchnorm, between, journal, partition, shares, via"],
        ),
        ("data:via=rings", ["via 'rings'", "Did you mean 'ring'?", "allgather, arena, auto"]),
        ("data:via", ["write via=value, found 'via'"]),
        ("data:journal=perhaps", ["journal must be on or off, found 'perhaps'"]),
        ("data:shares=0+4", ["as in 1+3, found '0+4'"]),
        ("data:shares=", ["found ''"]),
        ("data:shares=speed,via=ring", ["which via=ring does not use; use via=arena"]),
        ("data:shares=speed,partition=relay", ["which partition=relay does not use"]),
        ("data:batchnorm=frozen", ["local, sync"]),
        ("sharded:via=ring", ["via 'ring'", "auto, backend, memory"]),
    ],
)
def test_a_wrong_word_is_told_the_right_ones(text: str, found: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        parse_strategy(text)
    for part in found:
        assert part in str(refused.value)


def test_values_may_hold_commas_and_numbers_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REGISTRY", dict(module._REGISTRY))

    @dataclass(frozen=True, kw_only=True)
    class Listed(StrategySpec):
        name: ClassVar[str] = "listed"
        hosts: str = ""
        count: int = 1
        factor: float = 1.0

        def conduct(self, cluster: Cluster, slots: int | None = None) -> Conduct:
            return Conduct(fills=even_fills(slots or cluster.places, cluster.places))

        def claim(self, workers: int, optimizer: str = "SGD") -> Claim:
            return Claim.SUMS

    spec = Listed(hosts="a,b=2,c", count=3, factor=0.5)
    # `b=` looks like a key, so such a value cannot be written; plain commas can.
    with pytest.raises(SpecError, match="key 'b'"):
        parse_strategy(str(spec))
    spec = Listed(hosts="a,b,c", count=3, factor=0.5)
    assert parse_strategy(str(spec)) == spec
    with pytest.raises(SpecError, match="count must be a number, found 'three'"):
        parse_strategy("listed:count=three")


def counts_of(spec: StrategySpec, slots: int, workers: int) -> tuple[int, ...]:
    """How many slots each worker fills."""
    return spec.conduct(Cluster(workers=workers), slots).slots_per_worker


@given(st.integers(1, 50).flatmap(lambda workers: st.tuples(st.just(workers), st.integers(workers, 200))))
def test_even_shares_add_up_and_differ_by_one_at_most(sizes: tuple[int, int]) -> None:
    workers, slots = sizes
    counts = counts_of(Data(), slots, workers)
    assert len(counts) == workers and sum(counts) == slots
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1


def test_shares_by_speed_begin_even() -> None:
    assert counts_of(Data(shares="speed"), 5, 2) == counts_of(Data(), 5, 2) == (2, 3)
    assert not Data(shares="speed").counts and str(Data(shares="speed")) == "data:shares=speed"


def test_named_shares_must_fit_the_job() -> None:
    assert counts_of(Data(shares="1+3"), 4, 2) == (1, 3)
    for slots, workers in ((5, 2), (4, 3)):
        with pytest.raises(SpecError, match=f"but the job has {workers} workers and {slots} slots"):
            counts_of(Data(shares="1+3"), slots, workers)


@pytest.mark.parametrize("written", ["sharded", "tensor", "pipeline", "mesh:data=2"])
def test_the_hosts_memory_is_not_a_gpus(written: str) -> None:
    mark = "," if ":" in written else ":"
    with pytest.raises(SpecError, match="via=memory shares the host's memory, but device=cuda; leave it out"):
        Job(target="a.py", strategy=f"{written}{mark}via=memory", cluster=Cluster(workers=2, device="cuda"))
    assert Job(target="a.py", strategy=f"{written}{mark}via=backend", cluster=Cluster(workers=2, device="cuda"))


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("average:compress=int9", "compress 'int9' is not known.*int8, none"),
        ("data:between=int9", "between 'int9' is not known.*exact, fp16"),
        ("data:between=topk", "^between=topk needs the fraction"),
        ("data:between=powersgd:0", "^between=powersgd needs a rank"),
        ("data:between=bf16:3", "^between=bf16 takes no argument.*write between=bf16"),
    ],
)
def test_a_compression_is_refused_under_the_key_that_it_was_written_with(written: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse_strategy(written)
