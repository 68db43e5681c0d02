"""At the end of every run it is told what became of every sample, counted where it was used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.training import Train
from shoal.checkpoint.listing import read_manifest
from shoal.ledger.book import Book
from shoal.observe.checkpoint_names import find_checkpoint

STEPS = 30
SAMPLES = 3 * 201 + 3 * 24
"""Nine steps are an epoch of 201 samples, whose last batch has 9."""
CLEAN = {"samples": SAMPLES, "once": SAMPLES, "more_than_once": 0, "never": 0, "clean": True}


@pytest.mark.parametrize(
    ("strategy", "workers", "slots"),
    [
        ("data", 1, 1),
        ("data:via=arena", 2, 3),
        ("data:via=arena,shares=1+3", 2, 4),
        ("data:via=ring", 2, 3),
        ("data:via=backend", 2, 2),
    ],
)
def test_every_way_to_train_counts_what_it_uses(train: Train, strategy: str, workers: int, slots: int) -> None:
    found = train("mlp", workers=workers, slots=slots, strategy=strategy, steps=STEPS, checkpoint="every=20")
    assert found.told("audit") == [CLEAN] == [found.results["audit"]]
    assert found.results["samples"] == SAMPLES
    book = Book.from_plain(read_manifest(find_checkpoint(f"{found.job.run_dir}@20")).facts["book"])
    assert (book.rows[0].first, book.rows[-1].last) == (1, 20)
    assert all(len(row.counts) == slots for row in book.rows)
    assert [sum(row.counts) for row in book.rows] == [24, 9, 24, 9, 24]


def test_workers_that_take_turns_count_as_well(train: Train) -> None:
    found = train("mlp", workers=2, strategy="data:partition=relay", steps=STEPS)
    assert found.told("audit") == [CLEAN] == [found.results["audit"]]


def test_what_is_skipped_or_counts_nothing_was_looked_at_all_the_same(train: Train) -> None:
    found = train("mlp", workers=2, steps=STEPS, overrides={"skip_loss_below": 2.0, "accumulate": 2})
    assert any("skipped" in told for told in found.told("steps"))
    assert found.results["audit"]["clean"]


def test_a_successor_knows_what_was_used_before_it_came(train: Train) -> None:
    chaos = "kill worker:0 at step 9; kill worker:1 at step 14; kill worker:0 at step 20"
    found = train("mlp", workers=2, spares=1, steps=STEPS, chaos=chaos)
    assert len(found.told("lost")) == 3
    assert [audit["once"] for audit in found.told("audit")] == [SAMPLES] and found.results["audit"]["clean"]


def test_a_resumed_run_answers_for_the_whole_run(train: Train) -> None:
    first = train("mlp", workers=2, steps=STEPS, checkpoint="every=12")
    again = train.resume(first, 12, cluster={"workers": 3})
    assert again.results["audit"]["once"] == SAMPLES and again.results["audit"]["clean"]


def test_what_servers_have_applied_is_in_the_book_of_who_goes_on(train: Train) -> None:
    served = train("mlp", workers=2, strategy="ps", steps=STEPS, checkpoint="every=9,keep=9")
    assert served.results["audit"]["samples"] == SAMPLES
    again = train.resume(served, 9, strategy="data")
    assert again.results["audit"]["once"] == SAMPLES and again.results["audit"]["clean"]


def test_a_checkpoint_without_a_book_is_answered_for_from_there_on(train: Train) -> None:
    """A quorum leaves parts out, and which ones no checkpoint says."""
    many = 10 * STEPS  # a checkpoint may come late: workers that wait for nobody take some steps meanwhile
    served = train("mlp", workers=2, strategy="ps:sync=quorum:2/2", steps=many, checkpoint="every=9,keep=99")
    again = train.resume(served, served.told("checkpoint")[0]["step"], strategy="data")
    audit = again.results["audit"]
    assert audit["once"] == audit["samples"] < served.results["samples"] and audit["clean"]


def test_a_quiet_run_keeps_no_book_and_says_little(train: Train) -> None:
    loud = train("mlp", workers=2, steps=STEPS)
    quiet = train.run(replace(loud.job, options={"quiet": True}))
    assert quiet.digests() == loud.digests()
    assert {event.kind for event in loud.events} > {event.kind for event in quiet.events}
    assert not quiet.told("beat") and not quiet.told("steps") and "audit" not in quiet.results
    assert quiet.results["steps"] == STEPS
