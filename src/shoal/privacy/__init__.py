"""Pure decisions about privacy: how much noise a run needs, what it has spent, and when it must end."""

from shoal.privacy.accountant import NoiseRounds, epsilon_of, noise_for, rounds_within
from shoal.privacy.budget import Budget

__all__ = ["Budget", "NoiseRounds", "epsilon_of", "noise_for", "rounds_within"]
