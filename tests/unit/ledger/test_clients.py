"""Whose samples are whose, and who trains when, where clients are simulated in turn."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.ledger.clients import ClientOrder, hold_back, split_by_label, split_evenly
from shoal.spec.clients import ClientRounds

LABELS = np.arange(300) % 5


def entropy(labels: np.ndarray) -> float:
    shares = np.bincount(labels, minlength=5) / len(labels)
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


@pytest.mark.parametrize("clients", [1, 7, 120])
def test_every_sample_is_one_clients(clients: int) -> None:
    for parts in (split_evenly(300, clients, 3), split_by_label(LABELS, clients, 0.2, 3)):
        assert len(parts) == clients and all(len(part) for part in parts)
        assert sorted(np.concatenate(parts)) == list(range(300))


def test_a_small_alpha_leaves_clients_few_labels() -> None:
    skewed, alike = (
        np.mean([entropy(LABELS[part]) for part in split_by_label(LABELS, 10, alpha, 1)]) for alpha in (0.1, 100.0)
    )
    assert skewed < 1.0 < 1.5 < alike <= np.log(5)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.25, 0.99])
def test_what_is_held_back_is_not_trained_on(share: float) -> None:
    parts = [*split_by_label(LABELS[:299], 9, 0.3, 2), np.array([299])]
    trained, held = hold_back(parts, share, 7)
    for part, kept, back in zip(parts, trained, held, strict=True):
        assert sorted([*kept, *back]) == list(part) and len(kept)
        assert bool(len(back)) == (share > 0 and len(part) > 1)
        assert abs(len(back) - share * len(part)) <= 1


def test_a_slot_takes_samples_of_its_client_alone() -> None:
    rounds = ClientRounds.of(count=10, share=0.4, partition="own", every=3, workers=2)
    parts = split_evenly(300, 10, 0)
    order = ClientOrder(parts, rounds, batch_size=20, slots=2, seed=5)
    assert (rounds.per_worker, rounds.steps, order.length) == (2, 6, 300)
    for step in range(24):
        epoch, at = divmod(step * 20, 300)
        whole = order.samples(epoch, at, at + 20)
        for slot in (0, 1):
            client = order.roster.client(step, slot)
            assert client in order.roster.chosen(step // 6)
            own = order.samples(epoch, at + 10 * slot, at + 10 * slot + 10)
            assert set(own) <= set(parts[client]) and len(set(own)) == 10
            assert list(whole[10 * slot : 10 * slot + 10]) == list(own)
    taken = np.concatenate([order.samples(0, at, at + 10) for at in (0, 20, 40)])
    assert sorted(taken) == sorted(parts[order.roster.client(0, 0)]), "three steps of ten are all of its thirty"
    assert len({tuple(order.roster.chosen(number)) for number in range(5)}) == 5
