"""A run that failed leaves no model that looks finished."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.commands import SMALL_TASK

DIVERGING = Path(__file__).with_name("diverging_task.py")
TRAIN = ("train", str(SMALL_TASK), "--workers", "2", "--name", "mine")


def test_a_failed_run_with_servers_leaves_no_model(shoal, tmp_path):
    # Over tcp nobody else has what a lost server held.
    words = ("--epochs", "100000", "--strategy", "ps:servers=2,sync=asp,wire=tcp,replicas=0")
    failed = shoal(tmp_path, *TRAIN, *words, "--chaos", "kill server:0 at step 50")
    assert failed.status not in (0, None), failed.text
    run = tmp_path / "runs/mine"
    assert not (run / "model.safetensors").exists() and not (run / "result.json").exists()
    assert "nobody else has all of shard" in failed.text and "plateau" not in failed.text
    assert shoal(tmp_path, "evaluate", "mine").status == 1


def test_a_run_that_its_coordinator_gave_up_leaves_no_model(shoal, tmp_path):
    """All servers and workers are well, so that worker 0 could fetch shards of different moments and save them."""
    words = ("--workers", "2", "--name", "mine", "--strategy", "ps:servers=2,sync=asp,diverging=stop")
    failed = shoal(tmp_path, "train", str(DIVERGING), *words)
    assert failed.status == 1 and "The run diverges" in failed.text
    left = {path.name for path in (tmp_path / "runs/mine").iterdir()}
    assert not left & {"model.safetensors", "model.partial.safetensors", "result.json"}, left


def test_a_run_that_failed_after_it_was_resumed_has_a_partial_model(shoal, tmp_path):
    assert shoal(tmp_path, *TRAIN, "--checkpoint", "every=10").status == 0
    run = tmp_path / "runs/mine"
    words = ("--epochs", "1000", "--on-failure", "stop", "--chaos", "raise worker:1 at step 200")
    failed = shoal(tmp_path, "train", "--resume", "mine", *words)
    assert failed.status == 1 and "Go on after step" in failed.text
    assert not (run / "model.safetensors").exists() and (run / "model.partial.safetensors").is_file()
    refused = shoal(tmp_path, "evaluate", "mine")
    assert refused.status == 1 and "has not come to its end, and its model is a partial one" in refused.text
    assert shoal(tmp_path, "evaluate", "runs/mine/model.partial.safetensors").status == 0
    # The fault strikes once the supervisor has heard of step 200: by then a checkpoint more may have been saved.
    newest = re.search(r"Go on after step (\d+)", failed.text).group(1)
    assert shoal(tmp_path, "evaluate", f"mine@{newest}").status == 0
    done = shoal(tmp_path, "train", "--resume", "mine", "--epochs", "60", "--on-failure", "stop")
    assert done.status == 0, done.text
    assert (run / "model.safetensors").is_file() and not (run / "model.partial.safetensors").exists()


def test_a_refused_resume_leaves_the_model_as_it_is(shoal, tmp_path):
    assert shoal(tmp_path, *TRAIN, "--checkpoint", "every=10").status == 0
    refused = shoal(tmp_path, "train", "--resume", "mine")
    assert refused.status != 0 and "none is left" in refused.text
    assert (tmp_path / "runs/mine/model.safetensors").is_file()


def test_a_run_whose_model_could_not_be_saved_is_resumed_to_its_end(shoal, disk, tmp_path):
    disk.watch(tmp_path, contains="model.safetensors", operations="write")
    disk.fail(1, 1 << 40)
    failed = shoal(tmp_path, *TRAIN, "--checkpoint", "every=10")
    assert disk.fired > 0
    assert failed.status == 1 and "the disk is full" in failed.text, failed.text
    assert "All steps are taken" in failed.text and not (tmp_path / "runs/mine/result.json").exists()
    disk.relent()
    again = shoal(tmp_path, "train", "--resume", "mine")
    assert again.status == 0 and (tmp_path / "runs/mine/model.safetensors").is_file(), again.text
