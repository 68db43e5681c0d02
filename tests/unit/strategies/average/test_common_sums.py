"""Sums of which some workers have the result when others are lost."""

from __future__ import annotations

import torch

from shoal.comm.group.threads import ThreadGroup, together
from shoal.strategies.average.common_sums import CommonSums
from shoal.strategies.base import Company


def test_who_lacks_the_last_sum_is_given_it() -> None:
    """With what those had brought who are not there any more; nothing is summed up again."""

    def meet(group: ThreadGroup) -> list[float]:
        sums = CommonSums(group, Company())
        assert sums.sum(1, "words", [torch.ones(2)])[0].tolist() == [3.0, 3.0]
        if group.index:  # these have it; the first was left in the middle
            sums._keep(2, "agreement", [torch.full((2,), 7.0), torch.tensor(5)])
        sums.go_on_in(group)
        assert sums.kept(1, "words") is None, "that was another step"
        found, count = sums.sum(2, "agreement", [torch.zeros(2), torch.tensor(0)])
        assert int(count) == 5
        (table,) = sums.sum(2, "table 1", [torch.ones(1)])
        return [*found.tolist(), *table.tolist()]

    assert together(3, meet) == [[7.0, 7.0, 3.0]] * 3


def test_a_sum_that_nobody_has_is_made_again() -> None:
    def meet(group: ThreadGroup) -> float:
        sums = CommonSums(group, Company())
        sums.sum(1, "words", [torch.ones(1)])
        sums.go_on_in(group)
        return float(sums.sum(2, "words", [torch.tensor([group.index + 1.0])])[0])

    assert together(2, meet) == [3.0, 3.0]
