"""Placement: every element in one shard, cuts aligned, servers balanced, whatever the model."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.nets import gpt, parcels_of, resnet
from shoal.errors import SpecError
from shoal.layout import ALIGN_BYTES, POLICIES, Parcel, Placement, Span, place_shards, spread_backups

KIB = 1024
KINDS = ("Linear", "Conv2d", "LayerNorm", "Embedding")
BALANCED = 0.05
parcels_drawn = st.builds(
    lambda kind, numel, itemsize: Parcel(name="p", kind=kind, numel=numel, itemsize=itemsize),
    st.sampled_from(KINDS),
    st.integers(0, 40) | st.integers(0, 20_000) | st.sampled_from([0, 1, 16, 1024]),
    st.sampled_from([1, 2, 4, 8, 16]),
)
models = st.lists(parcels_drawn, max_size=30)


def parcel(numel: int, kind: str = "Linear", itemsize: int = 4) -> Parcel:
    return Parcel(name=f"{kind}{numel}", kind=kind, numel=numel, itemsize=itemsize)


def filled_up(parcels: list[Parcel], least_bytes: int) -> list[Parcel]:
    """The model with one more parameter that brings it to this many bytes."""
    missing = max(0, least_bytes - sum(each.num_bytes for each in parcels))
    return [*parcels, parcel(-(-missing // 4))]


@given(models, st.sampled_from(POLICIES), st.integers(1, 5), st.none() | st.integers(5, 20))
def test_every_element_is_in_one_shard_and_cuts_are_aligned(
    parcels: list[Parcel], policy: str, servers: int, shards: int | None
) -> None:
    parcels = [*parcels, *[parcel(1024)] * 20]  # Enough of everything for each policy's shards.
    placement = place_shards(parcels, servers=servers, policy=policy, shards=shards)
    runs: dict[int, list[Span]] = defaultdict(list)
    for shard in placement.shards:
        assert shard, "no shard is empty"
        assert list(shard) == sorted(shard)
        for span in shard:
            runs[span.param].append(span)
            assert span.start * parcels[span.param].itemsize % ALIGN_BYTES == 0
    for param, each in enumerate(parcels):
        end = 0
        for span in runs[param]:
            assert span.start == end < span.stop
            end = span.stop
        assert end == each.numel
    assert sum(placement.shard_bytes) == sum(each.num_bytes for each in parcels)
    assert sum(placement.server_bytes) == sum(placement.shard_bytes)
    assert set(placement.owners) == set(range(servers))
    assert shards is None or len(placement.shards) == shards


@given(models, st.sampled_from(["size", "layer"]), st.integers(1, 6), st.none() | st.integers(6, 20))
def test_servers_are_balanced_by_bytes(
    parcels: list[Parcel], policy: str, servers: int, shards: int | None
) -> None:
    placement = place_shards(filled_up(parcels, servers * 64 * KIB), servers=servers, policy=policy, shards=shards)
    assert placement.imbalance <= BALANCED


@given(models, st.lists(st.floats(1, 4), min_size=1, max_size=6), st.none() | st.integers(6, 20))
def test_servers_are_balanced_by_capacity(
    parcels: list[Parcel], capacities: list[float], shards: int | None
) -> None:
    smallest_share = min(capacities) / sum(capacities)
    parcels = filled_up(parcels, int(64 * KIB / smallest_share) + 1)
    placement = place_shards(
        parcels, servers=len(capacities), capacities=capacities, policy="capacity", shards=shards
    )
    assert placement.imbalance <= BALANCED
    owned = [capacities[owner] for owner in placement.owners]
    assert owned == sorted(owned, reverse=True), "the largest server has the first shards"


@given(models, st.integers(1, 6), st.floats(0.1, 1e9))
def test_equal_capacities_place_by_size(parcels: list[Parcel], servers: int, capacity: float) -> None:
    parcels = filled_up(parcels, 64 * KIB)
    by_size = place_shards(parcels, servers=servers)
    by_capacity = place_shards(parcels, servers=servers, capacities=[capacity] * servers, policy="capacity")
    assert (by_size.shards, by_size.owners) == (by_capacity.shards, by_capacity.owners)


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("policy", ["size", "layer", "capacity"])
@pytest.mark.parametrize("model", [gpt, resnet])
def test_real_models_are_balanced(model, policy, servers):
    parcels = parcels_of(model())
    capacities = [1.0, 3.0, 2.0, 1.5][:servers] if policy == "capacity" else ()
    placement = place_shards(parcels, servers=servers, policy=policy, capacities=capacities)
    assert len(placement.shards) == 12
    assert placement.imbalance < 0.001


@pytest.mark.parametrize("model", [gpt, resnet])
def test_by_layer_every_server_has_its_part_of_each_kind(model):
    parcels = parcels_of(model())
    placement = place_shards(parcels, servers=3, policy="layer")
    by_kind: dict[str, Counter[int]] = defaultdict(Counter)
    for owner, shard in zip(placement.owners, placement.shards, strict=True):
        for span in shard:
            num_bytes = (span.stop - span.start) * parcels[span.param].itemsize
            by_kind[parcels[span.param].kind][owner] += num_bytes
    assert len(by_kind) == 3
    for parts in by_kind.values():
        fair = parts.total() / 3
        assert all(abs(parts[server] - fair) <= 4 * ALIGN_BYTES for server in range(3))


def test_size_cuts_runs_of_equal_bytes_in_parameter_order():
    placement = place_shards([parcel(64), parcel(32), parcel(0), parcel(96)], servers=3, shards=3)
    assert placement.shards == (
        (Span(0, 0, 64),),
        (Span(1, 0, 32), Span(3, 0, 32)),
        (Span(3, 32, 96),),
    )
    assert placement.shard_bytes == (256, 256, 256)
    assert placement.owners == (0, 1, 2)
    assert placement.imbalance == 0


def test_a_cut_goes_to_the_nearest_permitted_place():
    # Half of 100 floats is 200 bytes: 192 is nearer than 256.
    assert place_shards([parcel(100)], servers=2).shards == ((Span(0, 0, 48),), (Span(0, 48, 100),))
    # Half of 38 floats is 76 bytes: the first parameter's end, at 80, is nearer than 64.
    assert place_shards([parcel(20), parcel(18)], servers=2).shards == ((Span(0, 0, 20),), (Span(1, 0, 18),))


def test_count_gives_each_shard_as_many_whole_parameters():
    placement = place_shards([parcel(10_000), *[parcel(5)] * 5], servers=2, shards=3, policy="count")
    whole = [[span.param for span in shard] for shard in placement.shards]
    assert whole == [[0, 1], [2, 3], [4, 5]]
    assert placement.shard_bytes == (40_020, 40, 40)
    assert placement.owners == (0, 0, 1)


def test_layer_spreads_each_kind():
    parcels = [parcel(64, "Linear"), parcel(32, "LayerNorm"), parcel(64, "Linear")]
    placement = place_shards(parcels, servers=2, policy="layer")
    assert placement.shards == (
        (Span(0, 0, 64), Span(1, 0, 16)),
        (Span(1, 16, 32), Span(2, 0, 64)),
    )


def test_many_small_kinds_make_up_for_each_other():
    kinds = [parcel(16, f"Kind{number}") for number in range(30)]
    placement = place_shards([*kinds, parcel(96)], servers=3, policy="layer", shards=3)
    assert max(placement.shard_bytes) - min(placement.shard_bytes) <= ALIGN_BYTES


def test_capacity_sizes_shards_and_puts_the_largest_server_first():
    placement = place_shards([parcel(4 * 64)], servers=2, capacities=[1, 3], policy="capacity", shards=4)
    assert placement.owners == (1, 1, 0, 0)
    assert placement.shard_bytes == (384, 384, 128, 128)
    assert placement.server_bytes == (256, 768)
    assert placement.imbalance == 0


def test_imbalance_is_measured_against_capacity():
    placement = place_shards([parcel(4 * 64)], servers=2, capacities=[1, 3], policy="size")
    assert placement.imbalance == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kib", "servers", "shards"),
    [
        (1, 1, 1),
        (1, 3, 3),
        (511, 1, 1),
        (512, 1, 2),
        (5 * 256, 2, 4),
        (5 * 256, 3, 3),
        *[(100 * KIB, servers, 12) for servers in (1, 2, 3, 4, 6)],
        (100 * KIB, 5, 10),
        (100 * KIB, 7, 7),
        (100 * KIB, 20, 20),
    ],
)
def test_the_number_of_shards_follows_the_size(kib, servers, shards):
    placement = place_shards([parcel(kib * KIB // 4)], servers=servers)
    assert len(placement.shards) == shards
    assert set(Counter(placement.owners).values()) == {shards // servers}


def test_backups_go_round_the_other_servers():
    parcels = [parcel(1024 * KIB)]
    assert place_shards(parcels, servers=3, replicas=1).backups == (1, 2, 1, 2, 2, 0, 2, 0, 0, 1, 0, 1)
    assert place_shards(parcels, servers=2, replicas=1).backups == (1,) * 6 + (0,) * 6
    assert place_shards(parcels, servers=2).backups == (None,) * 12
    assert spread_backups([5, 5, 9, 7], [9, 5, 7]) == (7, 9, 5, 9)
    assert spread_backups([4, 4], [4]) == (None, None)


@given(st.integers(2, 6), st.integers(1, 4))
def test_no_server_carries_all_of_anothers_backups(servers: int, shards_each: int) -> None:
    placement = place_shards([parcel(4096)], servers=servers, shards=servers * shards_each, replicas=1)
    for server in range(servers):
        backups = Counter(placement.backups[shard] for shard in placement.shards_of(server))
        assert server not in backups and None not in backups
        assert len(backups) == min(shards_each, servers - 1)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"policy": "sise"}, "policy 'sise' is not known. Did you mean 'size'"),
        ({"servers": 0}, "servers must be a whole number of at least 1, found 0"),
        ({"capacities": [1.0]}, "one number per server, found 1 for 2 servers"),
        ({"capacities": [1.0, 0.0]}, "positive numbers, found 0.0"),
        ({"capacities": [1.0, float("nan")]}, "positive numbers, found nan"),
        ({"capacities": [1.0, float("inf")]}, "positive numbers, found inf"),
        ({"shards": 1}, "shards=1 is fewer than the 2 servers"),
        ({"shards": 65}, "at most 64 shards .* 64 pieces of 64 bytes, but 65 are needed; use fewer shards"),
        ({"servers": 65}, "at most 64 shards .* use fewer servers"),
        ({"policy": "count"}, "policy=count can make at most 1 shards .* 1 parameters"),
        ({"replicas": -1}, "replicas must be a whole number of at least 0"),
        ({"replicas": 2}, "replicas must be 0 or 1"),
        ({"servers": 1, "replicas": 1}, "replicas=1 needs a second server"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(wrong, sentence):
    settings: dict[str, Any] = {"servers": 2, **wrong}
    with pytest.raises(SpecError, match=sentence):
        place_shards([parcel(1024)], **settings)


def test_models_that_cannot_be_placed_are_refused():
    with pytest.raises(SpecError, match="no parameters"):
        place_shards([parcel(0)], servers=1)
    with pytest.raises(SpecError, match="in its largest layer kind"):
        place_shards([parcel(16, "Linear"), parcel(16, "Conv2d")], servers=2, policy="layer")
    with pytest.raises(SpecError, match="itemsize must divide 64"):
        parcel(8, itemsize=3)


def test_the_same_model_is_placed_the_same_way_again():
    def placed() -> Placement:
        return place_shards(parcels_of(gpt()), servers=3, policy="layer", replicas=1)

    assert placed() == placed()
