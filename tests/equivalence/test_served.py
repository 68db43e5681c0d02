"""A served model in lockstep is trained as by the `data` strategy, bit for bit."""

from __future__ import annotations

from itertools import product

import pytest

from helpers.training import Train, largest_difference

IN_LOCKSTEP = [("gpt", 3, "adamw"), ("conv", 1, "momentum")]
MORE_IN_LOCKSTEP = [
    row for row in product(("mlp", "gpt", "conv"), (1, 3), ("momentum", "adamw")) if row not in IN_LOCKSTEP
]


@pytest.mark.parametrize(
    ("model", "servers", "optimizer"),
    [*IN_LOCKSTEP, *(pytest.param(*row, marks=pytest.mark.long) for row in MORE_IN_LOCKSTEP)],
)
def test_bsp_is_data_bit_for_bit(train: Train, model: str, servers: int, optimizer: str) -> None:
    data = train.once(model, workers=2, optimizer=optimizer)
    served = train(model, workers=2, strategy=f"ps:servers={servers}", optimizer=optimizer)
    assert served.results["steps"] == 20
    assert served.digests() == data.digests()
    assert served.results["loss"] == data.results["loss"]
    assert served.results["results"] == data.results["results"]
    assert served.results["audit"]["clean"]


def test_ssp_without_slack_is_bsp(train: Train) -> None:
    """Which is `data`, too."""
    data = train.once("conv", workers=2, optimizer="adamw")
    ssp = train("conv", workers=2, strategy="ps:servers=2,sync=ssp:0", optimizer="adamw")
    assert ssp.digests() == data.digests()


@pytest.mark.parametrize(
    "model", ["conv", *(pytest.param(more, marks=pytest.mark.long) for more in ("mlp", "gpt"))]
)
def test_asp_with_one_worker_is_one_process(train: Train, model: str) -> None:
    alone = train(model, workers=1, strategy="data:via=arena", optimizer="adamw")
    served = train(model, workers=1, strategy="ps:servers=2,sync=asp", optimizer="adamw")
    assert served.digests() == alone.digests()
    assert served.results["results"] == alone.results["results"]


@pytest.mark.parametrize(
    ("wire", "overlaps"),
    [
        ("tcp", ["on"]),  # "off" is how all other tests fetch
        pytest.param("tcp", ["off"], marks=pytest.mark.long),
        pytest.param("memory", ["off", "on"], marks=pytest.mark.long),
    ],
)
def test_a_large_model_is_fetched_part_by_part(train: Train, wire: str, overlaps: list[str]) -> None:
    data = train("mlp", workers=2, width=700, optimizer="adamw", steps=8)
    for overlap in overlaps:
        strategy = f"ps:servers=2,shards=5,wire={wire},overlap={overlap}"
        served = train("mlp", workers=2, width=700, strategy=strategy, optimizer="adamw", steps=8)
        assert served.digests() == data.digests(), overlap
    alone = train("mlp", workers=1, width=700, optimizer="adamw", steps=8)
    strategy = f"ps:sync=asp,shards=5,wire={wire},overlap=on"
    pushed = train("mlp", workers=1, width=700, strategy=strategy, optimizer="adamw", steps=8)
    assert pushed.digests() == alone.digests()


def test_tcp_brings_the_same_bits(train: Train) -> None:
    data = train.once("conv", workers=2, optimizer="adamw")
    served = train("conv", workers=2, strategy="ps:servers=2,wire=tcp", optimizer="adamw")
    assert served.digests() == data.digests()


@pytest.mark.parametrize("wire", ["memory", pytest.param("tcp", marks=pytest.mark.long)])
def test_clipping_goes_by_the_norm_of_the_whole_gradient(train: Train, wire: str) -> None:
    data = train.once("mlp", workers=2, optimizer="adamw", clip=0.1)
    served = train("mlp", workers=2, strategy=f"ps:servers=2,shards=3,wire={wire}", optimizer="adamw", clip=0.1)
    assert served.digests() == data.digests()


def test_a_lone_asynchronous_worker_clips_as_one_process(train: Train) -> None:
    alone = train("mlp", workers=1, strategy="data:via=arena", clip=0.1)
    served = train("mlp", workers=1, strategy="ps:servers=2,sync=asp", clip=0.1)
    assert served.digests() == alone.digests()
    assert served.digests() != train("mlp", workers=1, strategy="data:via=arena").digests()


def test_awkward_models_and_more_slots_than_workers(train: Train) -> None:
    data = train("awkward", workers=2, slots=4, optimizer="adamw")
    served = train("awkward", workers=2, slots=4, strategy="ps:servers=2", optimizer="adamw")
    assert served.digests() == data.digests()
    assert largest_difference(served.model, data.model) == 0.0


def test_an_optimizer_of_whole_matrices_keeps_its_bits(train: Train) -> None:
    data = train("mlp", workers=2, optimizer="muon_like")
    served = train("mlp", workers=2, strategy="ps:servers=2", optimizer="muon_like")
    assert served.model.keys() == data.model.keys()
    assert all(served.model[name].equal(data.model[name]) for name in data.model)


@pytest.mark.parametrize(
    ("compress", "ratio"),
    [
        ("zstd", 1.0),
        pytest.param("powersgd:4", 0.2, marks=pytest.mark.long),
        pytest.param("int8", 0.26, marks=pytest.mark.long),
        pytest.param("bf16", 0.5, marks=pytest.mark.long),
        pytest.param("topk:0.1", 0.21, marks=pytest.mark.long),
    ],
)
def test_compression_states_its_ratio(train: Train, compress: str, ratio: float) -> None:
    plain = train.once("mlp", workers=2, strategy="ps:wire=tcp")
    packed = train("mlp", workers=2, strategy=f"ps:wire=tcp,compress={compress}")
    assert packed.results["wire"]["ratio"] <= ratio * 1.05
    told = [
        [line["text"] for line in run.told("line") if "on the wire" in line["text"]] for run in (plain, packed)
    ]
    assert not told[0] and len(told[1]) == 1, "what is not compressed has no ratio"
    if compress == "zstd":
        assert packed.digests() == plain.digests()
    else:
        assert packed.results["results"]["loss"] == pytest.approx(plain.results["results"]["loss"], rel=0.1)
