"""What a budget tells of what was spent."""

from shoal.observe.wording import spent_privacy
from shoal.privacy.accountant import NoiseRounds
from shoal.privacy.budget import Budget
from shoal.spec.privacy import Privacy

ROUNDS = NoiseRounds(noise=1.0, chosen=16, total=103, count=5)


def test_rounds_of_another_noise_are_told_apart():
    first = Budget.plan(Privacy(noise=1.0), ROUNDS, "samples")
    same = Budget.plan(Privacy(noise=1.0), ROUNDS, "samples", first.plain(3))
    other = Budget.plan(Privacy(noise=2.0), ROUNDS, "samples", same.plain(2))
    assert ": 3 rounds with noise 1 × clip 1" in spent_privacy(first.facts(3))
    assert ": 5 rounds with noise 1 × clip 1" in spent_privacy(same.facts(2))
    assert ": 9 rounds in all, the last 4 with noise 2 × clip 1" in spent_privacy(other.facts(4))
    assert ": 6 rounds in all, the last one with noise 2 × clip 1" in spent_privacy(other.facts(1))


def test_one_is_told_as_one():
    budget = Budget.plan(Privacy(noise=1.0), NoiseRounds(noise=1.0, chosen=1, total=1, count=1), "samples")
    assert budget.told() == (
        "privacy: noise 1 × clip 1 in one step, to which one sample belongs with a chance of 1"
    )
    assert ": 1 round with noise 1" in spent_privacy(budget.facts(1))
