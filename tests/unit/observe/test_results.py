"""What a run came to is folded from what its workers say when they are done."""

from __future__ import annotations

from shoal.observe.happenings import Done
from shoal.observe.results import RunResults


def test_the_first_worker_speaks_for_all() -> None:
    results = RunResults()
    results.note(1, Done(results={"rank": 1, "loss": 9.0}))
    assert results.values == {}
    results.note(0, Done(results={"rank": 0, "loss": 0.5}))
    assert results.values == {"rank": 0, "loss": 0.5}


def test_everybodys_memory_is_kept() -> None:
    results = RunResults()
    for rank in (10, 2, 0):
        results.note(rank, Done(results={}, memory={"host": 100 + rank, "gpu": rank, "tape": 3}))
    assert results.values == {
        "peak_memory": {"0": 100, "2": 102, "10": 110},
        "peak_gpu_memory": {"0": 0, "2": 2, "10": 10},
    }


def test_scales_apart_are_told_as_one() -> None:
    results = RunResults()
    for rank, scale in ((1, 64.0), (0, 128.0), (2, 256.0)):
        told = {
            "scales_apart": True,
            "loss_scale": scale,
            "skipped_steps": rank,
            "float32_layers": [f"layer{rank}"],
        }
        results.note(rank, Done(results=told))
    assert results.values["loss_scale"] == 64.0 and results.values["skipped_steps"] == 3
    assert results.values["float32_layers"] == ["layer0", "layer1", "layer2"]


def test_what_an_attempt_before_came_to_does_not_count() -> None:
    results = RunResults()
    results.note(0, Done(results={"digest": "a", "audit": {}}, memory={"host": 5}))
    results.begin_again()
    assert results.values == {}
    results.note(0, Done(results={"digest": "b"}))
    assert results.values == {"digest": "b", "restarts": 1, "peak_memory": {"0": 5}}
