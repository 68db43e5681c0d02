"""Steps in other forms, in real runs: the same results, the same bits for any workers, kept by resume, replay."""

from __future__ import annotations

import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.launch.live import Run
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import train
from shoal.observe import RunFolder
from shoal.spec import StepForm
from shoal.verification import replay_run, verify

TASKS = Path(__file__).parent / "form_tasks.py"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no C++ compiler")


def run(zygote: ZygoteProcess, folder: Path, name: str, task: str, workers: int = 2, **asked: Any) -> Run:
    cluster = {"workers": workers, "threads": 1}
    return train(
        f"{TASKS}:{task}", cluster=cluster, runs=folder, name=name, zygote=zygote, output=StringIO(), **asked
    )


def test_channels_last_gives_the_same_bits_on_any_workers(zygote: ZygoteProcess, tmp_path: Path) -> None:
    plain = run(zygote, tmp_path, "plain", "images")
    two = run(zygote, tmp_path, "two", "images", memory_format="channels_last")
    one = run(zygote, tmp_path, "one", "images", workers=1, slots=2, memory_format="channels_last")
    assert two.digest == one.digest
    assert two.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-3)


def test_onednn_gives_the_same_bits_on_any_workers(zygote: ZygoteProcess, tmp_path: Path) -> None:
    plain = run(zygote, tmp_path, "plain", "words")
    two = run(zygote, tmp_path, "two", "words", products="onednn", checkpoint="every=4")
    one = run(zygote, tmp_path, "one", "words", workers=1, slots=2, products="onednn")
    assert two.digest == one.digest
    assert two.digest != plain.digest, "products were rounded in another order"
    assert two.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-4)
    resumed = train(resume="two@4", runs=tmp_path, zygote=zygote, output=StringIO())
    assert resumed.digest == one.digest and RunFolder(resumed.folder).read_job().products == "onednn"


def test_patches_give_the_same_bits_on_any_workers(zygote: ZygoteProcess, tmp_path: Path) -> None:
    form: dict[str, Any] = {"memory_format": "channels_last", "convolutions": "patches"}
    plain = run(zygote, tmp_path, "plain", "small_images", memory_format="channels_last")
    two = run(zygote, tmp_path, "two", "small_images", checkpoint="every=4", **form)
    one = run(zygote, tmp_path, "one", "small_images", workers=1, slots=2, **form)
    assert two.digest == one.digest
    assert two.digest != plain.digest, "gradients were added up in another order"
    assert two.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-4)
    resumed = train(resume="two@4", runs=tmp_path, zygote=zygote, output=StringIO())
    assert resumed.digest == one.digest and RunFolder(resumed.folder).read_job().convolutions == "patches"
    with pytest.raises(ShoalError, match=r"of 128 channels or more, .* has none; leave it out"):
        run(zygote, tmp_path, "none", "images", workers=1, **form)


def test_images_are_asked_for(zygote: ZygoteProcess, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="has none; leave it out"):
        run(zygote, tmp_path, "none", "words", workers=1, memory_format="channels_last")


def test_a_loss_in_pieces_trains_the_same(zygote: ZygoteProcess, tmp_path: Path) -> None:
    plain = run(zygote, tmp_path, "plain", "words")
    found = run(zygote, tmp_path, "found", "words", loss_in_pieces=True)
    assert found.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-4)
    assert found.digest != plain.digest, "sums were made in another order"
    with pytest.raises(ShoalError, match="loss_in_pieces: no linear layer"):
        run(zygote, tmp_path, "none", "images", workers=1, loss_in_pieces=True)


@needs_compiler
def test_compiled_steps_train_the_same(zygote: ZygoteProcess, tmp_path: Path) -> None:
    plain = run(zygote, tmp_path, "plain", "words", args={"steps": 4})
    found = run(zygote, tmp_path, "found", "words", args={"steps": 4}, compile=True)
    assert found.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-4)
    assert RunFolder(found.folder).read_job().compile


@needs_compiler
@pytest.mark.long
# With 44 the last batch of an epoch is smaller, and so compiled by itself.
@pytest.mark.parametrize("samples", [48, 44])
def test_compiled_runs_resume_and_replay_with_the_same_bits(
    zygote: ZygoteProcess, tmp_path: Path, samples: int
) -> None:
    args = {"steps": 6, "samples": samples}
    found = run(zygote, tmp_path, "found", "images", args=args, compile=True, checkpoint="every=4")
    plain = run(zygote, tmp_path, "plain", "images", args=args)
    assert found.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-3)
    resumed = train(resume="found@4", runs=tmp_path, zygote=zygote, output=StringIO())
    assert resumed.digest == found.digest and RunFolder(resumed.folder).read_job().compile
    assert replay_run(tmp_path / "found", zygote=zygote).ok, "one process, the same slots, compiled as well"


def test_fast_chooses_records_and_says_so(zygote: ZygoteProcess, tmp_path: Path) -> None:
    found = run(zygote, tmp_path, "fast", "images", fast=True, checkpoint="every=4")
    job = RunFolder(found.folder).read_job()
    told = job.options["chosen_form"]
    assert not job.fast and not job.compile and "compile was not tried" in told["text"]
    assert told["ratio"] >= 1.0 and (told["ratio"] > 1.0) == (job.form != StepForm())
    resumed = train(resume="fast@4", runs=tmp_path, zygote=zygote, output=StringIO())
    assert RunFolder(resumed.folder).read_job().form == job.form and resumed.digest == found.digest


def test_servers_lay_out_a_model_as_workers_do(zygote: ZygoteProcess) -> None:
    form = StepForm(memory_format="channels_last")
    assert verify(f"{TASKS}:images", workers=2, strategy="ps", steps=4, form=form, zygote=zygote).ok


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "form"),
    [
        ("images", StepForm(compile=True)),
        ("images", StepForm(memory_format="channels_last")),
        ("small_images", StepForm(memory_format="channels_last", convolutions="patches")),
        ("words", StepForm(products="onednn")),
        ("words", StepForm(products="onednn", compile=True)),
    ],
)
@pytest.mark.parametrize("strategy", ["data", "ps"])
def test_other_forms_are_verified(zygote: ZygoteProcess, strategy: str, task: str, form: StepForm) -> None:
    report = verify(f"{TASKS}:{task}", workers=2, strategy=strategy, steps=6, form=form, zygote=zygote)
    assert report.ok


@needs_compiler
@pytest.mark.long
def test_pieces_and_compilation_go_together(zygote: ZygoteProcess, tmp_path: Path) -> None:
    plain = run(zygote, tmp_path, "plain", "words")
    both = run(zygote, tmp_path, "both", "words", loss_in_pieces=True, compile=True)
    assert both.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-3)


@needs_compiler
@pytest.mark.long
def test_a_killed_worker_of_a_compiled_run_costs_no_bit(zygote: ZygoteProcess, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"args": {"steps": 40}, "compile": True}
    calm = run(zygote, tmp_path, "calm", "images", **asked)
    killed = run(zygote, tmp_path, "killed", "images", chaos="kill worker:1 at step 20", **asked)
    assert killed.digest == calm.digest
