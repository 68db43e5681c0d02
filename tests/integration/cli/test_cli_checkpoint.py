"""`shoal checkpoint`: list, show, verify, export, compare; and models that are read from checkpoints."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from small_task import NUM_TEST, task

from helpers.checkpoint_states import state
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.store import CheckpointStore
from shoal.cli.app import run as run_command
from shoal.observe import RunFolder
from shoal.spec import Job

STEPS = (100, 200)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A run with two checkpoints, named from the folder above `runs`."""
    folder = RunFolder.create(tmp_path / "runs", "demo")
    folder.write_job(Job(target="digits.py:task"))
    store = CheckpointStore(folder.checkpoints)
    for step in STEPS:
        store.save(state(step))
    monkeypatch.chdir(tmp_path)
    return store


@pytest.fixture
def say(capsys):
    """Run a command here; its exit status, standard output and standard error."""

    def run(*words):
        status = run_command(["checkpoint", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def damage(store, step=200, name="optimizer.bin"):
    path = store.folder / f"step-{step:09d}" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_ls(saved, say):
    status, out, _ = say("ls", "demo")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "100", "200"]
    assert all(entry.digest in out for entry in saved.entries())
    found = json.loads(say("ls", "runs/demo", "--json")[1])["checkpoints"]
    assert [(item["step"], item["nbytes"]) for item in found] == [
        (entry.step, entry.nbytes) for entry in saved.entries()
    ]


def test_ls_shows_what_is_torn_and_what_is_not_there(saved, say):
    damage(saved, name="manifest.json")
    assert "torn" in say("ls", "demo")[1].splitlines()[2]
    shutil.rmtree(saved.folder)
    assert "has no checkpoints" in say("ls", "demo")[1]
    status, _, err = say("show", "demo")
    assert status == 2 and "Run 'demo' has no checkpoints" in err


@pytest.mark.parametrize("which", ["demo@200", "demo", "runs/demo/checkpoints/step-000000200"])
def test_show(saved, say, which):
    status, out, _ = say("show", which, "--tensors")
    assert status == 0
    for part in ("digits.py:task", saved.entries()[-1].digest, "tokens/momentum_buffer", "bfloat16", "[700, 8]"):
        assert part in out
    found = json.loads(say("show", which, "--json")[1])
    assert found["step"] == 200 and found["facts"] == {"slots": 2, "job": {"target": "digits.py:task"}}
    assert {place["name"] for place in found["tensors"] if place["part"] == "model"} == set(state(200).model)


def test_a_checkpoint_that_is_not_there(saved, say):
    status, _, err = say("show", "demo@150")
    assert status == 2 and "Run 'demo' has no checkpoint of step 150; there are those of steps 100, 200." in err
    status, _, err = say("show", "other@150")
    assert status == 2 and "Run 'other' is not a run's path, nor its name under runs" in err


def test_verify(saved, say):
    status, out, _ = say("verify", "demo")
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == ["whole", "whole"]
    damage(saved)
    status, out, _ = say("verify", "demo")
    assert status == 1 and [line.split()[0] for line in out.splitlines()] == ["whole", "torn"]
    assert "optimizer.bin: chunk 1 of 1 does not have its checksum" in out
    status, out, _ = say("verify", "demo@200", "--json")
    found = json.loads(out)
    assert status == 1 and found["whole"] is False
    assert "optimizer.bin" in found["problems"][str(saved.folder / "step-000000200")]
    assert say("verify", "demo@100")[0] == 0


def test_export(saved, say, tmp_path):
    status, out, _ = say("export", "demo@100", "model.safetensors")
    model = load_tensors(tmp_path / "model.safetensors")
    assert status == 0 and digest(model) == digest(state(100).model) and digest(model) in out
    say("export", "demo@100", "all.safetensors", "--optimizer")
    everything = load_tensors(tmp_path / "all.safetensors")
    assert everything.keys() - model.keys() == {"optimizer/tokens/momentum_buffer", "optimizer/tokens/step"}
    kept = everything["optimizer/tokens/momentum_buffer"]
    assert torch.equal(kept, state(100).optimizer["tokens/momentum_buffer"])


@pytest.mark.parametrize("out", ["model.bin", "nowhere/model.safetensors"])
def test_export_refuses_other_places(saved, say, out):
    status, _, err = say("export", "demo@100", out)
    assert status == 2 and "must be NAME.safetensors in a folder that exists" in err


def test_nothing_is_exported_from_a_torn_checkpoint(saved, say, tmp_path):
    damage(saved, name="model.bin")
    status, _, err = say("export", "demo", "model.safetensors")
    assert status == 1 and "model.bin: chunk 1 of 1 does not have its checksum" in err
    assert os.listdir(tmp_path) == ["runs"]


def test_diff_of_equals(saved, say):
    status, out, _ = say("diff", "demo@200", "demo")
    assert status == 0 and out.startswith("equal: ") and saved.entries()[-1].digest in out
    assert json.loads(say("diff", "demo", "demo", "--json")[1])["equal"] is True


def test_diff_names_every_difference(saved, say):
    base = state(300)
    weight = base.model["columns"].clone()
    weight[0, 0] += 0.5
    model = {**base.model, "columns": weight, "count": torch.tensor(3.0), "flags": torch.ones(1), "new": weight}
    del model["empty"]
    saved.save(base)
    saved.save(Snapshot(step=301, model=model, optimizer={}, losses=base.losses, rng={}, facts={}))
    status, out, _ = say("diff", "demo@300", "demo@301", "--json")
    found = json.loads(out)
    assert status == 1 and not found["equal"]
    assert {item["name"]: (item["what"], item["largest"]) for item in found["differences"]} == {
        "columns": ("values", pytest.approx(0.5)),
        "count": ("dtypes int64 and float32", None),
        "empty": ("only in the first", None),
        "flags": ("shapes (3,) and (1,)", None),
        "new": ("only in the second", None),
        "tokens/momentum_buffer": ("only in the first", None),
        "tokens/step": ("only in the first", None),
    }
    status, out, _ = say("diff", "demo@300", "demo@301")
    assert status == 1 and "they differ: 7 tensors" in out and "0.5" in out


def test_diff_of_optimizers_alone(saved, say):
    base = state(300)
    saved.save(base)
    other = {name: tensor + 1 for name, tensor in base.optimizer.items()}
    saved.save(Snapshot(step=301, model=base.model, optimizer=other, losses=base.losses, rng={}, facts={}))
    status, out, _ = say("diff", "demo@300", "demo@301")
    assert status == 1 and "the models are equal, the optimizers' states differ: 2 tensors" in out


def test_evaluate_and_predict_read_checkpoints(shoal, trained, tmp_path):
    run = tmp_path / "runs" / "copy"
    shutil.copytree(trained, run)
    torch.manual_seed(1)
    other = task().model().state_dict()
    losses = torch.zeros(7, dtype=torch.float64)
    final = load_tensors(run / "model.safetensors")
    store = CheckpointStore(RunFolder(run).checkpoints)
    for step, model in ((7, other), (9, final)):
        store.save(Snapshot(step=step, model=model, optimizer={}, losses=losses, rng={}, facts={}))
    results = json.loads((run / "result.json").read_text())["results"]
    found = {}
    for which in ("copy@9", "copy@7"):
        answer = shoal("evaluate", which, "--json")
        assert answer.returncode == 0, answer.stderr
        found[which] = json.loads(answer.stdout)
        assert found[which]["samples"] == NUM_TEST
    assert found["copy@9"]["results"] == results != found["copy@7"]["results"]
    save_tensors(run / "model.safetensors", other)
    for which, out in (("copy", "run.npy"), ("runs/copy/checkpoints/step-000000007", "checkpoint.npy")):
        answer = shoal("predict", which, "--out", out)
        assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "run.npy").read_bytes() == (tmp_path / "checkpoint.npy").read_bytes()
    answer = shoal("evaluate", "copy@8")
    assert answer.returncode == 2 and "there are those of steps 7, 9" in answer.stderr
