"""How a batch is cut for GPUs and processors, and when the processors are left out."""

from __future__ import annotations

import pytest

from shoal.launch.mixing import job_by_times
from shoal.layout.device_shares import DeviceTimes, cut_by_devices
from shoal.layout.gpu_need import GpuHeld, GpuRemedies, told_of
from shoal.spec import Cluster, Job

GIB = 1 << 30


def times(**other: float) -> DeviceTimes:
    usual = {"gpus": 1, "whole_s": 0.064, "half_s": 0.032, "sample_s": 0.004, "sum_s": 0.0}
    return DeviceTimes(**{**usual, **other})  # type: ignore[arg-type]


def test_all_are_done_together() -> None:
    found = cut_by_devices(64, 3, times())
    assert found.sizes == (44, 10, 10) or found.sizes == (42, 11, 11)
    assert found.pays and found.alone_s / found.together_s > 1.4 and "parts of" in found.text
    assert found.share == pytest.approx(0.25)


def test_a_step_of_nothing_but_launches_gains_nothing() -> None:
    found = cut_by_devices(64, 2, times(half_s=0.064))
    assert found.together_s == pytest.approx(0.064) and not found.pays


def test_what_sums_cost_decides_too() -> None:
    assert cut_by_devices(64, 2, times()).pays
    assert not cut_by_devices(64, 2, times(sum_s=0.1)).pays


def test_a_slow_processor_gets_a_sample_and_does_not_pay() -> None:
    found = cut_by_devices(32, 2, times(sample_s=3.0, sum_s=0.2))
    assert found.sizes == (31, 1) and found.together_s == pytest.approx(3.2)
    assert "does not pay, and is left out" in found.text and "3.2e+03 ms or more, not 64" in found.text


def test_the_job_says_what_was_found() -> None:
    asked = Job(target="a.py", strategy="data:shares=speed", cluster=Cluster(device="cuda+cpu", workers=3))
    assert asked.conduct.is_measured_first
    cut, text = job_by_times(asked, 64, times())
    assert cut.strategy == "data:via=backend" and cut.cluster == asked.cluster and "parts of" in text
    assert sum(cut.options["cuts"][0][1]) == 64 and not cut.conduct.is_measured_first
    left, text = job_by_times(asked, 64, times(sample_s=9.0))
    assert (left.strategy, left.cluster.device, left.cluster.places) == ("data", "cuda", 1) and "left out" in text
    all_gpus, _ = job_by_times(asked, 64, times(gpus=3))
    assert (all_gpus.cluster.device, all_gpus.cluster.places) == ("cuda", 3)


def held(**other: int) -> GpuHeld:
    usual = {"total": 80 * GIB, "free": GIB, "peak": 70 * GIB, "reserved": 78 * GIB}
    usual |= {"parameters": 4 * GIB, "gradients": 4 * GIB, "state": 8 * GIB}
    return GpuHeld(name="GPU 0", **{**usual, **other})  # type: ignore[arg-type]


def test_what_held_a_gpus_memory_decides_what_helps() -> None:
    text = told_of(held(), asked="2 GiB more", remedies=GpuRemedies())
    assert "activations and all else 54.0 GiB" in text and "in pieces, 8.0 GiB" in text
    assert text.endswith(
        "use accumulate=2 or more, or precision=bf16, or recompute, or offload=optimizer, or a smaller batch_size."
    )
    much = told_of(held(peak=72 * GIB, state=50 * GIB), asked="2 GiB more", remedies=GpuRemedies(recompute=False))
    assert "; use offload=optimizer, or sharded on several GPUs, or accumulate=2" in much
    others = told_of(held(peak=10 * GIB, reserved=10 * GIB), asked="2 GiB more", remedies=GpuRemedies())
    assert "other processes 69.0 GiB; end what else is on this GPU" in others
