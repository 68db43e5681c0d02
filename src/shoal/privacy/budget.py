"""A run's budget: the noise of its rounds, how many of them it may take, and what it has spent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from shoal.errors import ProtocolError, SpecError
from shoal.privacy.accountant import NoiseRounds, accountant_of, epsilon_of, noise_for, rounds_within
from shoal.spec.privacy import Privacy


@dataclass(frozen=True)
class Budget:
    """What may be spent, from a run's beginning on; a resumed run goes on with that of its checkpoint."""

    privacy: Privacy
    past: tuple[NoiseRounds, ...]
    """What earlier attempts have spent, up to the checkpoint that this one goes on from."""
    coming: NoiseRounds
    """The rounds that are left, with the noise that they have."""
    unit: str
    """Whose privacy it is: `samples` or `clients`."""
    wanted: int
    """NoiseRounds that the run would take if it could."""

    @classmethod
    def plan(cls, privacy: Privacy, rounds: NoiseRounds, unit: str, saved: Any = None) -> Budget:
        """Find the noise for these rounds, and how many of them can be afforded. `saved`: the checkpoint's budget,
        whose noise stays as it is unless another is asked for."""
        past, found = _read(saved) if saved is not None else ((), None)
        noise = privacy.noise or found
        if noise is None:
            assert privacy.epsilon is not None
            noise = noise_for(privacy.epsilon, privacy.delta, past, rounds)
        coming = replace(rounds, noise=noise)
        if privacy.epsilon is not None:
            count = rounds_within(privacy.epsilon, privacy.delta, past, coming)
            if not count and rounds.count:
                raise SpecError(
                    f"privacy: one more round with noise={noise:g} would spend more than "
                    f"epsilon={privacy.epsilon:g} at delta={privacy.delta:g}; ask for more "
                    "noise, or a larger epsilon."
                )
            coming = replace(coming, count=count)
        return cls(privacy, past, coming, unit, rounds.count)

    @property
    def is_short(self) -> bool:
        """Whether the run ends before it would otherwise."""
        return self.coming.count < self.wanted

    def plain(self, taken: int) -> dict[str, Any]:
        """What a checkpoint keeps after so many of the coming rounds."""
        return {"noise": self.coming.noise, "spent": [each.plain() for each in self._spent(taken)]}

    def facts(self, taken: int) -> dict[str, Any]:
        """What a run's results say of it."""
        spent = self._spent(taken)
        return {
            "epsilon": epsilon_of(spent, self.privacy.delta),
            "delta": self.privacy.delta,
            "noise": self.coming.noise,
            "clip": self.privacy.clip,
            "unit": self.unit,
            "sampling": self.coming.sampling,
            "rate": self.coming.rate,
            "rounds": sum(each.count for each in spent),
            "rounds_alike": self._alike(spent),
            "budget": self.privacy.epsilon,
            "accountant": accountant_of(spent),
        }

    def _spent(self, taken: int) -> tuple[NoiseRounds, ...]:
        return (*self.past, replace(self.coming, count=taken))

    def _alike(self, spent: tuple[NoiseRounds, ...]) -> int:
        """How many rounds, the last of them all, had this noise and these chances: those before a resume may have
        had others."""
        like = takewhile(lambda each: replace(each, count=self.coming.count) == self.coming, reversed(spent))
        return sum(each.count for each in like)

    def told(self) -> str:
        """One line for the beginning of a run."""
        coming, turn = self.coming, "step" if self.unit == "samples" else "round"
        text = (
            f"privacy: noise {coming.noise:.4g} × clip {self.privacy.clip:g} in {_each_of(coming.count, turn)}, "
            f"to which {_each_of(coming.total, self.unit[:-1])} belongs with a chance of {coming.rate:.4g}"
        )
        if self.is_short:
            text += f"; epsilon={self.privacy.epsilon:g} is spent then, and the run of {self.wanted:,} ends there"
        return text


def _each_of(num: int, noun: str) -> str:
    return f"each of {num:,} {noun}s" if num != 1 else f"one {noun}"


def _read(saved: Any) -> tuple[tuple[NoiseRounds, ...], float]:
    match saved:
        case {"noise": int(noise) | float(noise), "spent": list(spent)} if noise > 0:
            return tuple(NoiseRounds.from_plain(each) for each in spent), noise
    raise ProtocolError("What should be a budget of privacy has no noise and no rounds that were spent.")
