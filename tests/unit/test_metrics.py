"""Metrics: by hand-counted cases, and that each is a mean."""

import pytest
import torch

from shoal import metrics
from shoal.errors import SpecError, TaskError

SCORES = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5], [0.5, 0.4, 0.1]])
CLASSES = torch.tensor([1, 0, 0, 1])


def test_accuracy_counts_the_highest_scores():
    assert metrics.accuracy(SCORES, CLASSES) == 0.5


def test_accuracy_reads_classes_last_for_text_and_second_for_images():
    text = SCORES.reshape(2, 2, 3)
    assert metrics.accuracy(text, CLASSES.reshape(2, 2)) == 0.5
    image = torch.randn(2, 5, 4, 3)
    assert metrics.accuracy(image, image.argmax(1)) == 1.0


def test_accuracy_leaves_padding_out():
    padded = torch.tensor([1, 0, 0, metrics.IGNORED_TARGET])
    assert metrics.accuracy(SCORES, padded) == pytest.approx(2 / 3)
    assert metrics.accuracy(SCORES, torch.full((4,), metrics.IGNORED_TARGET)) == 0.0


def test_accuracy_refuses_shapes_that_do_not_fit():
    with pytest.raises(TaskError, match=r"\(4, 3\) and a target of shape \(3,\)"):
        metrics.accuracy(SCORES, torch.zeros(3, dtype=torch.int64))


def test_top_k_counts_targets_among_the_best():
    assert metrics.top_k(1)(SCORES, CLASSES) == metrics.accuracy(SCORES, CLASSES)
    assert metrics.top_k(2)(SCORES, CLASSES) == 0.75
    assert metrics.top_k(3)(SCORES, CLASSES) == 1.0


def test_top_k_refuses_more_than_there_are_classes():
    with pytest.raises(TaskError, match="only 3 classes"):
        metrics.top_k(4)(SCORES, CLASSES)
    with pytest.raises(SpecError, match="at least 1"):
        metrics.top_k(0)


def test_mean_absolute_error():
    assert metrics.mean_absolute_error(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])) == 1.5
    with pytest.raises(TaskError, match="make them equal"):
        metrics.mean_absolute_error(torch.zeros(3, 1), torch.zeros(3))


def test_the_mean_over_halves_is_the_mean_over_all():
    halves = [metrics.accuracy(SCORES[:2], CLASSES[:2]), metrics.accuracy(SCORES[2:], CLASSES[2:])]
    assert sum(halves) / 2 == metrics.accuracy(SCORES, CLASSES)
