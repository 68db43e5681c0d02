"""Sets of cells behave as sets of numbers do, and stay small: a late cell costs one gap, not a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ProtocolError
from shoal.ledger.cells import CellSet

CELLS = st.lists(st.integers(0, 40), max_size=60)


@given(added=CELLS, removed=CELLS, below=st.integers(0, 20))
def test_it_is_a_set_of_numbers(added, removed, below):
    cells, plain = CellSet(added, below=below), {*range(below), *added}
    for cell in removed:
        cells.remove(cell)
        plain.discard(cell)
    assert list(cells) == sorted(plain) and len(cells) == len(plain)
    assert all((cell in cells) == (cell in plain) for cell in range(-2, 45))
    assert list(cells.missing(30)) == [cell for cell in range(30) if cell not in plain]
    assert cells.end == max(plain, default=-1) + 1
    assert cells.below == next(cell for cell in range(99) if cell not in plain)
    assert CellSet.from_plain(cells.to_plain()) == cells == cells.copy() == CellSet(plain)


@given(st.lists(CELLS, min_size=1, max_size=4))
def test_what_several_share_and_what_they_are_together(lists):
    sets = [CellSet(cells) for cells in lists]
    assert CellSet.in_at_least(len(sets), sets) == CellSet(set.intersection(*map(set, lists)))
    assert CellSet.in_at_least(1, sets) == CellSet(set().union(*lists))


def test_a_late_cell_costs_one_gap():
    cells = CellSet(cell for cell in range(1_000_000) if cell != 5)
    assert cells.to_plain() == [0, 5, 6, 1_000_000]
    cells.add(5)
    assert cells.to_plain() == [0, 1_000_000]


def test_the_first_runs_are_all_that_fits():
    cells = CellSet(range(0, 100, 2))
    assert list(cells.first_runs(3)) == [0, 2, 4]
    assert cells.first_runs(50) is cells


@pytest.mark.parametrize(
    "plain", [None, "ab", b"ab", [1], [3, 3], [4, 2], [0, 5, 5, 7], [-1, 2], [0.0, 2.0], [False, 1]]
)
def test_what_is_no_set_is_refused(plain):
    with pytest.raises(ProtocolError, match="rising"):
        CellSet.from_plain(plain)
