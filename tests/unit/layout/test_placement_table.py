"""A placement in words: what the rows say, and that they fit a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.nets import gpt, parcels_of, resnet
from shoal.layout import POLICIES, Parcel, explain, place_shards, render

PARCELS = [
    Parcel(name="embedding.weight", kind="Embedding", numel=512, itemsize=4),
    Parcel(name="head.weight", kind="Linear", numel=1024, itemsize=4),
    Parcel(name="head.bias", kind="Linear", numel=16, itemsize=4),
]


def test_rows_say_who_holds_what():
    placement = place_shards(PARCELS, servers=2, shards=4, replicas=1)
    first, second = explain(placement, PARCELS)
    assert (first.shards, second.shards) == ((0, 1), (2, 3))
    assert (first.backup_of, second.backup_of) == ((2, 3), (0, 1))
    assert first.params == ("embedding.weight", "head.weight")
    assert second.params == ("head.weight", "head.bias")
    assert first.cut == second.cut == {"head.weight"}
    assert (first.num_bytes, second.num_bytes) == placement.server_bytes
    assert first.share + second.share == 1


def test_a_parameter_cut_between_shards_of_one_server_is_whole_there():
    placement = place_shards(PARCELS, servers=1, shards=4)
    (row,) = explain(placement, PARCELS)
    assert not row.cut
    assert "*" not in render(placement, PARCELS)


def test_the_table_reads_well():
    assert render(place_shards(PARCELS, servers=2, shards=4, replicas=1), PARCELS).splitlines() == [
        "server  shards     size  share  parameters  cut  backup of",
        "     0     0-1  3.0 KiB  49.5%           2    1        2-3",
        "        embedding.weight, head.weight*",
        "     1     2-3  3.1 KiB  50.5%           2    1        0-1",
        "        head.weight*, head.bias",
        "* cut: other servers hold the rest",
        "The largest server carries 1.03% more than its fair share.",
    ]


def test_a_server_that_has_left_holds_nothing():
    placement = place_shards(PARCELS, servers=2, shards=4)
    alone = replace(placement, owners=(1, 1, 1, 1), capacities=(0.0, 1.0))
    assert alone.server_bytes == (0, sum(placement.shard_bytes))
    assert render(alone, PARCELS).splitlines()[1].split() == ["0", "–", "0", "B", "0.0%", "0", "0", "–"]
    assert alone.imbalance == 0


@pytest.mark.parametrize("servers", [1, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [gpt, resnet])
def test_real_models_fit_80_columns(model, policy, servers):
    parcels = parcels_of(model())
    placement = place_shards(parcels, servers=servers, policy=policy, replicas=min(1, servers - 1))
    text = render(placement, parcels)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1].startswith("The largest server carries ")


def test_the_longest_names_and_lists_fit_80_columns():
    parcels = [
        Parcel(name=f"deep.{'er.' * 40}{n}", kind="Linear", numel=4_000_000, itemsize=4) for n in range(200)
    ]
    placement = place_shards(parcels, servers=2, shards=200)
    scattered = replace(placement, owners=(0, 1) * 100, backups=(1, 0) * 100)
    lines = render(scattered, parcels).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[1] == "0,2,4,6,8,10,12…"
