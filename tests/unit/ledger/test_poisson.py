"""In a step every sample comes in by its own chance, whoever asks, and the audit knows who came."""

from __future__ import annotations

import numpy as np

from shoal.ledger.book import Book, audit
from shoal.ledger.poisson import PoissonOrder, PoissonSchedule

COUNT, BATCH, STEPS = 300, 30, 2000


def schedule(key: int = 5, slots: int = 4) -> PoissonSchedule:
    return PoissonSchedule(COUNT, BATCH, slots, 1000, STEPS, PoissonOrder(COUNT, BATCH, key))


def test_every_sample_comes_by_its_own_chance() -> None:
    order = PoissonOrder(COUNT, BATCH, 5)
    batches = [order.batch(step) for step in range(1, STEPS + 1)]
    taken = np.zeros((STEPS, COUNT))
    for row, batch in zip(taken, batches, strict=True):
        assert len(set(batch.tolist())) == len(batch)
        row[batch] = 1
    rate = BATCH / COUNT
    # Five standard deviations of a binomial distribution; sizes vary as those of independent draws do.
    assert np.abs(taken.mean(0) - rate).max() < 5 * np.sqrt(rate * (1 - rate) / STEPS)
    sizes = taken.sum(1)
    assert abs(sizes.mean() - BATCH) < 5 * np.sqrt(COUNT * rate * (1 - rate) / STEPS)
    assert np.isclose(sizes.var(), COUNT * rate * (1 - rate), rtol=0.2)
    together = np.corrcoef(taken[:, :40].T) - np.eye(40)
    assert np.abs(together).max() < 5 / np.sqrt(STEPS)


def test_all_find_the_same_and_another_key_finds_others() -> None:
    first, second, other = (PoissonOrder(COUNT, BATCH, key) for key in (5, 5, 6))
    steps = (11, 3, 40)
    assert all(np.array_equal(first.batch(step), second.batch(step)) for step in steps)
    assert not any(np.array_equal(first.batch(step), other.batch(step)) for step in steps)


def test_slots_have_the_batch_among_them_and_count_by_what_was_expected() -> None:
    planned = schedule()
    for step in (1, 2, 10, 11):
        cuts = list(planned.cuts(step, range(4)))
        assert np.array_equal(np.concatenate([cut.samples for cut in cuts]), planned.order.batch(step))
        assert {cut.batch_samples for cut in cuts} == {BATCH}
    assert planned.samples_after(25) == sum(planned.count(step) for step in range(1, 26))
    first = planned.order.samples(0, 3, planned.count(1) + 2)
    assert np.array_equal(first[: planned.count(1) - 3], planned.order.batch(1)[3:]) and len(first) == (
        planned.count(1) - 1
    )


def test_the_audit_counts_what_was_drawn() -> None:
    planned, book = schedule(), Book()
    for step in range(1, 31):
        book.commit(step, planned.sizes(step))
    assert audit(book, planned, 30)["clean"]
    wrong = Book()
    for step in range(1, 31):
        sizes = planned.sizes(step if step != 17 else 16)
        wrong.commit(step, sizes)
    assert planned.count(16) != planned.count(17)
    assert not audit(wrong, planned, 30)["clean"]
