"""Metrics: by hand-counted cases, and that each is a mean."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, r2_score, roc_auc_score

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


def in_batches(metric, output, target, size=3):
    """As an evaluation does: what it keeps of every batch, then all of it at once."""
    found = metrics.over_all(metric)
    return found.value([found.keep(o, t) for o, t in zip(output.split(size), target.split(size), strict=True)])


def scores_of(classes, count=40, seed=1):
    chance = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, (count,), generator=chance)
    output = torch.randn(count, classes, generator=chance) + torch.nn.functional.one_hot(target, classes)
    return output, target


def test_f1_over_all_is_that_of_scikit_learn_and_no_mean_of_batches():
    output, target = scores_of(4)
    expected = f1_score(target.numpy(), output.argmax(1).numpy(), average="macro")
    metric = metrics.whole(f1_score, average="macro")
    assert in_batches(metric, output, target) == pytest.approx(expected, abs=1e-12)
    assert metric(output, target) == pytest.approx(expected, abs=1e-12)
    batches = zip(output.split(3), target.split(3), strict=True)
    assert np.mean([metric(o, t) for o, t in batches]) != pytest.approx(expected, abs=1e-3)


def test_two_classes_are_ranked_by_how_much_the_second_is_ahead():
    output, target = scores_of(2)
    expected = roc_auc_score(target.numpy(), (output[:, 1] - output[:, 0]).numpy())
    assert in_batches(metrics.whole(roc_auc_score), output, target) == pytest.approx(expected, abs=1e-12)
    one_score = (output[:, 1] - output[:, 0]).unsqueeze(1)
    assert in_batches(metrics.whole(roc_auc_score), one_score, target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("made", ["scores", "probabilities"])
def test_more_classes_are_ranked_by_their_probabilities(made):
    output, target = scores_of(3)
    shares = output.double().softmax(1)
    metric = metrics.whole(roc_auc_score, multi_class="ovr")
    expected = roc_auc_score(target.numpy(), shares.numpy(), multi_class="ovr")
    found = in_batches(metric, shares if made == "probabilities" else output, target)
    assert found == pytest.approx(expected, abs=1e-12)
    expected = log_loss(target.numpy(), shares.numpy())
    assert in_batches(metrics.whole(log_loss), output, target) == pytest.approx(expected, abs=1e-12)


def test_a_regression_is_compared_as_it_is():
    target = torch.randn(20, 1)
    output = target + 0.1 * torch.randn(20, 1)
    expected = r2_score(target.numpy(), output.numpy())
    assert in_batches(metrics.whole(r2_score), output, target) == pytest.approx(expected, abs=1e-12)


def test_padding_is_left_out_and_texts_may_have_other_lengths_in_other_batches():
    texts = [scores_of(3, 8, seed=2), scores_of(3, 12, seed=3)]
    batches = [(output.reshape(2, -1, 3), target.reshape(2, -1)) for output, target in texts]
    batches[0][1][0, 1] = metrics.IGNORED_TARGET
    metric = metrics.whole(f1_score, average="micro")
    output, target = (torch.cat(both) for both in zip(*texts, strict=True))
    counted = target != metrics.IGNORED_TARGET
    expected = f1_score(target[counted].numpy(), output.argmax(1)[counted].numpy(), average="micro")
    assert metric.value([metric.keep(*batch) for batch in batches]) == pytest.approx(expected, abs=1e-12)


def test_a_function_of_ones_own_gets_all_outputs_and_targets_as_they_are():
    output, target = scores_of(3)
    seen = []
    metric = metrics.whole(lambda output, target, *, power: seen.append((output, target)) or 2.0**power, power=3)
    assert in_batches(metric, output, target) == 8.0
    assert torch.equal(seen[0][0], output) and torch.equal(seen[0][1], target)


def test_reads_says_what_the_names_of_arguments_do_not():
    output, target = scores_of(3)
    metric = metrics.whole(lambda output, target: float((output == target).double().mean()), reads="classes")
    assert in_batches(metric, output, target) == pytest.approx(metrics.accuracy(output, target))
    with pytest.raises(SpecError, match="clases"):
        metrics.whole(f1_score, reads="clases")


class Slope:
    """As torchmetrics' objects are: shown batches, then asked. It depends on the order."""

    def reset(self):
        self.seen = []

    def update(self, output, target):
        self.seen.extend((output[:, 0] * target).tolist())

    def compute(self):
        return torch.tensor(sum(number * value for number, value in enumerate(self.seen)))


def test_an_object_that_is_shown_batches_sees_them_in_their_order():
    output, target = scores_of(3)
    expected = sum(number * value for number, value in enumerate((output[:, 0] * target).tolist()))
    metric = Slope()
    assert in_batches(metric, output, target) == pytest.approx(expected, rel=1e-6)
    assert in_batches(metric, output, target) == pytest.approx(expected, rel=1e-6), "it begins anew"
    assert metric.seen == [], "what it keeps may be large"


def test_what_comes_to_several_numbers_is_refused():
    with pytest.raises(TaskError, match="f1_score must come to one number, found ndarray"):
        in_batches(metrics.whole(f1_score, average=None), *scores_of(3))


def test_outputs_that_cannot_be_put_together_are_refused():
    metric = metrics.whole(lambda output, target: 0.0)
    with pytest.raises(TaskError, match=r"their rows have the shapes \(3,\), \(4,\)"):
        metric.value([(torch.zeros(2, 3), torch.zeros(2, 3)), (torch.zeros(2, 4), torch.zeros(2, 4))])


def test_means_are_means():
    assert metrics.over_all(metrics.accuracy) is None and metrics.over_all(metrics.top_k(2)) is None
