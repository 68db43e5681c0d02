"""Teams over which a model is cut: who is in which, who holds the same part, and which slots each worker fills."""

from __future__ import annotations

import pytest

from shoal.spec import Average, Cluster
from shoal.spec.averaging_inside import CutTeams


@pytest.mark.parametrize(
    ("inside", "workers", "parts", "slots"),
    [
        ("mesh:data:2,shard:2", 8, 2, 8),
        ("mesh:shard:2,tensor:2", 8, 4, 4),
        ("mesh:data:2,pipeline:2,tensor:2", 16, 4, 4),
        ("mesh:data:2", 6, 1, 6),
    ],
)
def test_every_part_of_the_model_has_its_peers_in_all_teams(
    inside: str, workers: int, parts: int, slots: int
) -> None:
    average = Average(every=4, inside=inside)
    teams = CutTeams.of(average, workers)
    assert teams is not None and teams.num_parts == parts
    rows, peers = teams.rows(), teams.peers()
    for several in (rows, peers):
        assert sorted(rank for row in several for rank in row) == list(range(workers))
    for ranks in peers:
        assert {len(set(ranks) & set(row)) for row in rows} == {teams.mesh.data}, "as many as there are copies"
        # Who counts is the first of each team.
        assert sum(rank % teams.size < parts for rank in ranks) == teams.count
    conduct = average.conduct(Cluster(workers=workers))
    assert conduct.slots == slots and len(conduct.fills) == workers
    for number, row in enumerate(rows):
        own = {slot for rank in row for slot in conduct.fills[rank]}
        assert own == set(range(number * teams.mesh.lanes, (number + 1) * teams.mesh.lanes))


def test_facts_are_those_of_what_is_inside_but_for_what_averaging_is() -> None:
    cluster = Cluster(workers=4)
    staged = Average(every=8, inside="pipeline:schedule:zero-bubble", groups=2).conduct(cluster)
    assert (staged.microbatches, staged.calls_model, staged.repeats_passes) == (4, False, False)
    assert (staged.open_commits, staged.has_one_state, staged.puts_aside) == (8, False, "replica")
    wide = Average(inside="tensor", groups=2).conduct(cluster)
    assert wide.width is not None and wide.width.count == 2 and wide.draws_otherwise and not wide.meets
    assert Average(inside="data", groups=2).conduct(cluster).is_cut is False
