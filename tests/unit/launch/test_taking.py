"""A run's model as a module, and in the forms that other programs read."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import CheckpointError, SpecError
from shoal.launch.taking import export, load_module
from shoal.spec import Cluster, Job

TASKS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def task(lazy: bool = False) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Sequential(nn.LazyLinear(3) if lazy else nn.Linear(4, 3), nn.Dropout(0.5)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.Adam(params),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        train=TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)),
    )


def pretrained() -> shoal.Task:
    from transformers import BertConfig, BertForSequenceClassification

    small = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16,
    )
    return shoal.Task(
        model=lambda: BertForSequenceClassification(small),
        objective=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.Adam(params),
        train=[{"input_ids": torch.ones(4, dtype=torch.int64), "labels": 1}] * 4,
    )
"""


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`make_run(module, factory)`: the folder of a run that has left this module."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken_tasks.py").write_text(TASKS)

    def make(module: nn.Module, factory: str = "task", **job) -> Path:
        folder = tmp_path / "runs" / "demo"
        folder.mkdir(parents=True)
        save_tensors(folder / "model.safetensors", module.state_dict())
        target = f"{tmp_path / 'taken_tasks.py'}:{factory}"
        (folder / "job.json").write_text(Job(target=target, cluster=Cluster(workers=2), **job).to_json())
        (folder / "result.json").write_text('{"digest": "abc", "steps": 3}')
        return folder

    return make


def trained() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_run_gives_its_module_with_its_weights(make_run, lazy: bool) -> None:
    expected = trained()
    make_run(expected, args={"lazy": lazy})
    drawn = torch.rand(3, generator=torch.manual_seed(1))
    torch.manual_seed(1)
    run = shoal.Run.open("demo")
    module = run.model()
    assert run.digest == "abc"
    assert torch.equal(torch.rand(3), drawn), "the caller's random numbers are its own"
    assert not module.training
    inputs = torch.randn(5, 4)
    assert torch.equal(module(inputs), expected(inputs))


def test_without_a_model_a_sentence_says_so(make_run) -> None:
    (make_run(trained()) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has left no model"):
        load_module("demo")


def test_weights_by_name(make_run) -> None:
    expected = dict(trained().state_dict())
    make_run(trained())
    found = load_file(export("demo", "safetensors"))
    assert Path("demo.safetensors").is_file()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    path = export("demo", "torch", "taken.pt")
    assert path == Path("taken.pt").absolute()
    found = torch.load(path, weights_only=True)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_what_transformers_reads(make_run) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    torch.manual_seed(4)
    expected = transformers.BertForSequenceClassification(config).eval()
    make_run(expected, "pretrained")
    read = transformers.BertForSequenceClassification.from_pretrained(export("demo", "huggingface")).eval()
    given, found = expected.state_dict(), read.state_dict()
    assert given.keys() == found.keys() and all(torch.equal(found[name], given[name]) for name in given)


def test_a_model_of_ones_own_cannot_be_saved_for_transformers(make_run) -> None:
    make_run(trained())
    with pytest.raises(SpecError, match=r"save_pretrained.*this task's is a Sequential; use --to safetensors"):
        export("demo", "huggingface")


@pytest.mark.skipif(find_spec("onnxscript") is not None, reason="it is installed")
def test_what_onnx_takes_is_said(make_run) -> None:
    make_run(trained())
    with pytest.raises(SpecError, match=r"needs .*onnxscript.* not installed.*pip install shoal\[onnx\]"):
        export("demo", "onnx")


def test_onnx_computes_the_same(make_run) -> None:
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    expected = trained()
    make_run(expected)
    session = reference.ReferenceEvaluator(str(export("demo", "onnx")))
    inputs = torch.randn(5, 4)  # another number of samples than it was shown
    [found] = session.run(None, {session.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected(inputs).detach())


def test_what_cannot_be_written_is_refused(make_run) -> None:
    make_run(trained())
    with pytest.raises(SpecError, match="Choose one of: huggingface, onnx, safetensors, torch"):
        export("demo", "pickle")
    with pytest.raises(SpecError, match="there is no folder"):
        export("demo", "torch", "nowhere/taken.pt")
