"""Consistency: the rules as written, and what they promise under every interleaving of a small model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.ps.consistency import Consistency, Mode, parse_sync


@pytest.mark.parametrize("text", ["bsp", "asp", "ssp:3", "alternate:2", "quorum:2/3"])
def test_rules_read_as_they_are_written(text):
    assert str(parse_sync(text)) == text


@pytest.mark.parametrize("text", ["ssp:0", "alternate:0"])
def test_a_bound_of_nothing_is_synchronous(text):
    assert parse_sync(text) == parse_sync("bsp")


@pytest.mark.parametrize(
    "text", ["", "BSP", "ssp", "ssp:-1", "ssp:x", "bsp:1", "quorum:3", "quorum:0/2", "quorum:4/3"]
)
def test_anything_else_is_refused_with_the_right_ones(text):
    with pytest.raises(SpecError, match="quorum:k/n"):
        parse_sync(text)


def test_a_quorum_of_other_slots_is_refused():
    assert parse_sync("quorum:2/3").needed(3) == 2
    with pytest.raises(SpecError, match="4"):
        parse_sync("quorum:2/3").needed(4)


def test_only_ssp_has_a_bound_to_adjust():
    assert parse_sync("ssp:3").with_bound(5) == Consistency(mode=Mode.SSP, bound=5)
    assert parse_sync("alternate:3").with_bound(5) == parse_sync("alternate:3")


def test_alternate_gathers_every_so_many_clocks():
    assert [clock for clock in range(1, 10) if parse_sync("alternate:2").gathers(clock)] == [3, 6, 9]
    assert parse_sync("alternate:2").next_gathered(3) == 6
    assert parse_sync("bsp").next_gathered(3) == 4
    assert parse_sync("asp").next_gathered(3) is None


class Model:
    """Ranks that step in any order, one slot each, and one value that is simply a version."""

    def __init__(self, rule: Consistency, ranks: int) -> None:
        self.rule = rule
        self.clocks = [0] * ranks
        self.version = 0
        self.rounds = 0
        self.computing: dict[int, int] = {}
        """By rank: the version that its gradient is computed from."""
        self.gathered: list[tuple[int, int]] = []
        self.updates: list[list[tuple[int, int, int]]] = []
        """For each update the (rank, clock, version read) of its gradients."""
        self.late: list[tuple[int, int]] = []

    def may_start(self, rank: int) -> bool:
        clock = self.clocks[rank] + 1
        return rank not in self.computing and self.rule.may_start(
            clock, floor=min(self.clocks), rounds=self.rounds
        )

    def move(self, rank: int) -> bool:
        """Let a rank begin, or finish what it began; whether it could."""
        if rank in self.computing:
            self._push(rank, self.computing.pop(rank))
            return True
        if not self.may_start(rank):
            return False
        self.computing[rank] = self.version
        return True

    def _push(self, rank: int, read: int) -> None:
        self.clocks[rank] += 1
        clock = self.clocks[rank]
        if not self.rule.gathers(clock):
            self._update([(rank, clock, read)])
        elif clock <= self.rounds:
            self.late.append((rank, clock))
        else:
            self.gathered.append((rank, read))
            if len(self.gathered) >= self.rule.needed(len(self.clocks)):
                self._update([(r, clock, v) for r, v in sorted(self.gathered)])
                self.gathered, self.rounds = [], clock

    def _update(self, gradients: list[tuple[int, int, int]]) -> None:
        self.updates.append(gradients)
        self.version += 1


def played(text: str, moves: list[int], ranks: int = 3) -> Model:
    model = Model(parse_sync(text), ranks)
    for move in moves:
        model.move(move % ranks)
    return model


interleavings = st.lists(st.integers(0, 2), max_size=90)


@settings(deadline=None, max_examples=50)
@given(moves=interleavings, bound=st.integers(1, 4))
def test_ssp_never_lets_the_fastest_run_away(moves, bound):
    model = Model(parse_sync(f"ssp:{bound}"), 3)
    for rank in moves:
        begins = rank not in model.computing
        if model.move(rank) and begins:
            assert model.clocks[rank] - min(model.clocks) <= bound
        assert max(model.clocks) - min(model.clocks) <= bound + 1
    fastest = max(range(3), key=lambda rank: model.clocks[rank])
    if fastest not in model.computing and model.clocks[fastest] - min(model.clocks) > bound:
        assert not model.may_start(fastest)


@settings(deadline=None, max_examples=50)
@given(moves=interleavings)
def test_asp_never_waits(moves):
    model = Model(parse_sync("asp"), 3)
    assert all(model.move(rank) for rank in moves)
    assert all(len(update) == 1 for update in model.updates)


@settings(deadline=None, max_examples=50)
@given(moves=interleavings)
def test_bsp_is_synchronous_sgd(moves):
    model = played("bsp", moves)
    for step, update in enumerate(model.updates, start=1):
        assert update == [(rank, step, step - 1) for rank in range(3)]
    assert played("ssp:0", moves).updates == model.updates


@settings(deadline=None, max_examples=50)
@given(moves=interleavings)
def test_quorum_drops_the_late_and_says_so(moves):
    model = played("quorum:2/3", moves)
    assert all(len(update) == 2 and len({v for _, _, v in update}) == 1 for update in model.updates)
    pushed = {(rank, clock) for rank in range(3) for clock in range(1, model.clocks[rank] + 1)}
    applied = {(rank, clock) for update in model.updates for rank, clock, _ in update}
    waiting = {(rank, model.rounds + 1) for rank, _ in model.gathered}
    assert applied | set(model.late) | waiting == pushed
    assert len(applied) + len(model.late) + len(waiting) == len(pushed)


@settings(deadline=None, max_examples=50)
@given(moves=interleavings, asynchronous=st.integers(1, 3))
def test_alternate_computes_its_synchronous_steps_at_one_version(moves, asynchronous):
    model = played(f"alternate:{asynchronous}", moves)
    for update in model.updates:
        clock = update[0][1]
        if clock % (asynchronous + 1):
            assert len(update) == 1
        else:
            assert [rank for rank, _, _ in update] == [0, 1, 2]
            assert len({version for _, _, version in update}) == 1


@pytest.mark.parametrize("text", ["bsp", "asp", "ssp:2", "alternate:2", "quorum:2/3"])
def test_nobody_waits_for_ever(text):
    model = played(text, [rank for _ in range(40) for rank in range(3)])
    assert min(model.clocks) >= 15
