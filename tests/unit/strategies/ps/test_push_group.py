"""Who pushes together: every worker belongs to one group of neighbours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.strategies.ps.group import ranks_of_group


@given(workers=st.integers(1, 40), data=st.data())
def test_groups_divide_the_workers_evenly(workers: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, workers))
    found = [ranks_of_group(rank, workers, groups) for rank in range(workers)]
    assert all(rank in ranks for rank, ranks in enumerate(found))
    distinct = sorted(set(found), key=lambda ranks: ranks.start)
    assert len(distinct) == groups
    assert [rank for ranks in distinct for rank in ranks] == list(range(workers))
    assert max(map(len, distinct)) - min(map(len, distinct)) <= 1
