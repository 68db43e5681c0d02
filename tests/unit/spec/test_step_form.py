"""Forms of a step as a job names them, and what does not go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.observe.report import command
from shoal.spec import Cluster, Job, StepForm
from shoal.spec.vocabulary import Purpose


def job(**asked: Any) -> Job:
    return Job(target="a.py", **asked)


PATCHES = {"memory_format": "channels_last", "convolutions": "patches"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"memory_format": "rows"}, "memory_format 'rows' is not known"),
    ({"precision": "auto"}, "precision=auto lets fast choose"),
    ({"graph": True}, "captures a step on a GPU, but device=cpu"),
    ({"sync_device": True}, "lets a GPU do one thing after the other, but device=cpu"),
    ({"graph": True, "cluster": Cluster(device="cuda", workers=2)}, "others to wait for"),
    ({"graph": True, "cluster": Cluster(device="cuda"), "precision": "adaptive"}, "use fp16 or bf16"),
    ({"graph": True, "cluster": Cluster(device="cuda"), "strategy": "ps"}, "servers make that"),
    ({"compile": True, "strategy": "pipeline", "cluster": Cluster(workers=2)}, "compile changes how"),
    ({"fast": True, "strategy": "tensor", "cluster": Cluster(workers=2)}, "use data or ps"),
    ({"compile": True, "strategy": "data:batchnorm=sync", "cluster": Cluster(workers=2)}, "batchnorm=local"),
    ({"products": "mkl"}, "products 'mkl' is not known"),
    ({"products": "onednn", "cluster": Cluster(device="cuda")}, "in float32 on a CPU, but device=cuda"),
    ({"products": "onednn", "precision": "bf16"}, "precision=bf16; leave it out"),
    ({"products": "onednn", "privacy": "epsilon=8,delta=1e-5"}, "sample by sample"),
    ({"products": "onednn", "strategy": "tensor", "cluster": Cluster(workers=2)}, "use data or ps"),
    ({"convolutions": "rows"}, "convolutions 'rows' is not known"),
    ({"convolutions": "patches"}, "memory_format=contiguous; add memory_format=channels_last"),
    ({**PATCHES, "cluster": Cluster(device="cuda")}, "about a CPU, but device=cuda; leave it out"),
    ({**PATCHES, "privacy": "epsilon=8,delta=1e-5"}, "sample by sample"),
    ({**PATCHES, "strategy": "pipeline", "cluster": Cluster(workers=2)}, "use data or ps"),
    ({"offload": "weights"}, "offload 'weights' is not known"),
    ({"offload": "optimizer"}, "memory of a GPU, but device=cpu"),
    ({"offload": "optimizer", "cluster": Cluster(device="cuda", workers=2)}, "whole model to itself"),
    ({"offload": "optimizer", "cluster": Cluster(device="cuda"), "strategy": "data:via=backend"}, "strategy=data"),
    ({"offload": "optimizer", "cluster": Cluster(device="cuda"), "graph": True}, "use one of both"),
    ({"flat_update": True, "cluster": Cluster(device="cuda")}, "add precision=bf16"),
    ({"flat_update": True, "cluster": Cluster(device="cuda"), "strategy": "ps"}, "strategy=data"),
    (
        {"flat_update": True, "cluster": Cluster(device="cuda"), "precision": "bf16", "offload": "optimizer"},
        "use one of both",
    ),
]


@pytest.mark.parametrize(("asked", "why"), REFUSED)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        job(**asked)


def test_a_form_is_written_as_it_is_read() -> None:
    asked = job(compile=True, memory_format="channels_last", loss_in_pieces=True)
    assert asked.form == StepForm(compile=True, memory_format="channels_last", loss_in_pieces=True)
    assert str(asked.form) == "compile + channels_last + loss in pieces" and str(StepForm()) == "plain"
    assert Job.from_json(asked.to_json()) == asked
    own = job(flat_update=True, precision="bf16", cluster=Cluster(device="cuda"))
    assert own.form.flat_update and "--flat-update" in command(own) and str(own.form) == "flat update"
    kept = job(offload="optimizer", cluster=Cluster(device="cuda"))
    assert "--offload optimizer" in command(kept) and str(kept.form) == "optimizer offloaded"
    own = job(products="onednn")
    assert "--products onednn" in command(own) and str(own.form) == "onednn"
    own = job(**PATCHES)
    assert "--convolutions patches" in command(own) and str(own.form) == "channels_last + patches"
    words = command(asked)
    assert "--compile" in words and "--memory-format channels_last" in words and "--loss-in-pieces" in words


def test_what_was_trained_in_a_form_can_be_used_anywhere() -> None:
    trained = job(graph=True, compile=True, cluster=Cluster(device="cuda"))
    used = replace(trained, purpose=Purpose.EVALUATE, strategy="tensor", cluster=Cluster(workers=2))
    assert used.form == trained.form


def test_one_worker_runs_ahead_of_its_gpu() -> None:
    assert job().conduct.open_commits == 1
    assert job(cluster=Cluster(device="cuda")).conduct.open_commits > 1
    assert job(cluster=Cluster(device="cuda", workers=2)).conduct.open_commits == 1
