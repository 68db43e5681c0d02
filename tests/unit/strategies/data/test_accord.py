"""How hosts go on together, by how far each had come."""

from __future__ import annotations

import pytest

from shoal.strategies.data.accord import Standing, agree

TWO_AND_ONE = [range(2), range(2, 3)]


def standings(*totals: int, tables: tuple[int, ...] = (0, 0, 0)) -> list[Standing]:
    return [Standing(totals=step, tables=table) for step, table in zip(totals, tables, strict=True)]


@pytest.mark.parametrize(
    ("totals", "step", "lacking"),
    [
        ((7, 7, 7), 7, ()),
        ((8, 7, 7), 7, ()),  # one worker's chunks alone: its host has not begun to take step 8
        ((8, 8, 7), 8, (1,)),
        ((7, 8, 8), 8, (0,)),
    ],
)
def test_a_step_is_taken_by_all_where_one_host_has_it_whole(
    totals: tuple[int, ...], step: int, lacking: tuple[int, ...]
) -> None:
    accord = agree(standings(*totals), TWO_AND_ONE)
    assert (accord.step, accord.lacking) == (step, lacking)
    assert accord.giver not in lacking


def test_a_table_comes_from_one_that_has_it() -> None:
    accord = agree(standings(7, 7, 7, tables=(2, 3, 2)), TWO_AND_ONE)
    assert (accord.table, accord.table_giver, accord.without_table) == (3, 1, (0, 2))


def test_who_has_just_come_neither_gives_nor_decides() -> None:
    new = Standing(totals=0, tables=0, is_guest=True)
    accord = agree([new, new, *standings(7, 8, 8, tables=(1, 1, 1))], [range(2), range(2, 3), range(3, 5)])
    assert (accord.step, accord.giver, accord.lacking, accord.guests) == (8, 2, (1,), (0,))
    assert accord.without_table == ()


def torn(totals: int, taken: int, tables: int = 0) -> Standing:
    return Standing(totals=totals, taken=taken, tables=tables, is_torn=True)


def test_a_host_whose_worker_died_gets_everything_from_another() -> None:
    accord = agree([torn(8, 7), torn(0, 7), *standings(8, 8, 7)], [range(2), range(2, 4), range(4, 5)])
    assert (accord.step, accord.giver, accord.lacking, accord.guests) == (8, 1, (2,), (0,))


def test_what_such_a_host_alone_has_taken_is_what_others_get() -> None:
    """Its sums went with the worker, and no worker of this host may take a step twice."""
    accord = agree([*standings(7, 8, 8), torn(8, 8), torn(8, 8)], [range(2), range(2, 3), range(3, 5)])
    assert (accord.step, accord.giver, accord.lacking, accord.guests) == (8, 1, (0,), (2,))
    accord = agree([*standings(7, 8, 7), torn(9, 8), torn(0, 8)], [range(3), range(3, 5)])
    assert (accord.step, accord.giver, accord.lacking, accord.guests) == (8, 1, (), (0,))


def test_those_that_are_left_there_may_have_the_last_table() -> None:
    accord = agree([torn(7, 7, 3), torn(7, 7, 2), *standings(7, 7, 7, tables=(2, 2, 2))], [range(2), range(2, 5)])
    assert (accord.table, accord.table_giver, accord.without_table) == (3, 0, (1, 2, 3, 4))
