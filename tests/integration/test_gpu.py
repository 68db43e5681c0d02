"""Training on GPUs through torch's own collectives; runs where there is one."""

from __future__ import annotations

import runpy
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.comm.compression import make_compression
from shoal.errors import ShoalError, SpecError
from shoal.launch.live import Run
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import train as start
from shoal.launch.supervisor import Supervisor
from shoal.model.half_range import FIRST_SCALE, STEPS_TO_DOUBLE
from shoal.model.start import Start
from shoal.observe import RunFolder
from shoal.roles.fast.choice import StepWay
from shoal.roles.fast.trial import FormTrial
from shoal.roles.trainer.trainer import Trainer
from shoal.spec import Cluster, Job, StepForm, Task

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
FORMS = Path(__file__).parent / "form_tasks.py"


WAYS = [
    (1, "data"),
    (1, "data:via=backend"),
    (2, "data"),
    (2, "data:via=arena"),
    (1, "sharded"),
    (1, "tensor"),
    (1, "pipeline"),
    (1, "mesh"),
    (2, "sharded:stage=1"),
    (2, "sharded:stage=2"),
    (2, "sharded:stage=3"),
    (2, "sharded:stage=3,offload=on"),
    (2, "tensor:norms=replicated"),
    (2, "tensor:norms=sequence"),
    (2, "pipeline:schedule=gpipe"),
    (2, "pipeline:schedule=1f1b"),
    (2, "pipeline:schedule=interleaved"),
    (2, "pipeline:schedule=zero-bubble"),
    (4, "mesh:data=2,tensor=2"),
    (4, "mesh:data=2,pipeline=2"),
    (4, "mesh:shard=2,pipeline=2"),
    (8, "mesh:data=2,pipeline=2,tensor=2"),
]
"""On one GPU several workers share it and talk through gloo; with one for each they would talk through NCCL."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def train(
    zygote: ZygoteProcess,
    folder: Path,
    *,
    device: str = "cuda",
    workers: int = 1,
    strategy: str = "data",
    task: str = "mlp_quiet",
    precision: str = "fp32",
) -> float:
    job = Job(
        target=f"{TASKS}:{task}",
        cluster=Cluster(workers=workers, threads=1, device=device),
        strategy=strategy,
        precision=precision,
        run_dir=str(folder),
    )
    return float(Supervisor(job, lambda event: None, LocalEngine(zygote)).run()["loss"])


@needs_gpu
@pytest.mark.parametrize("task", ["mlp_quiet", "gpt_quiet"])
@pytest.mark.parametrize(("workers", "strategy"), WAYS)
def test_gpu_follows_the_cpu(
    zygote: ZygoteProcess, tmp_path: Path, workers: int, strategy: str, task: str
) -> None:
    expected = train(zygote, tmp_path / "cpu", device="cpu", task=task)
    found = train(zygote, tmp_path / "gpu", workers=workers, strategy=strategy, task=task)
    assert found == pytest.approx(expected, rel=1e-3)


@needs_gpu
@pytest.mark.parametrize("strategy", ["layer", "layer:decoupled=on", "layer:phases=2,every=5"])
def test_layers_train_as_on_the_cpu(zygote: ZygoteProcess, tmp_path: Path, strategy: str) -> None:
    expected = train(zygote, tmp_path / "cpu", device="cpu", workers=2, strategy=strategy, task="gpt_quiet")
    found = train(zygote, tmp_path / "gpu", workers=2, strategy=strategy, task="gpt_quiet")
    assert found == pytest.approx(expected, rel=1e-2)


@needs_gpu
@pytest.mark.parametrize("strategy", ["data", "sharded", "tensor", "pipeline"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "adaptive"])
def test_half_precision_learns_as_much(
    zygote: ZygoteProcess, tmp_path: Path, strategy: str, precision: str
) -> None:
    expected = train(zygote, tmp_path / "fp32", task="gpt_quiet")
    found = train(zygote, tmp_path / "half", workers=2, strategy=strategy, task="gpt_quiet", precision=precision)
    assert found == pytest.approx(expected, rel=2e-2)
    assert found != expected


@needs_gpu
@pytest.mark.parametrize(("workers", "strategy"), [(1, "data"), (2, "data"), (2, "sharded"), (2, "pipeline")])
def test_a_killed_worker_costs_no_bit(zygote: ZygoteProcess, tmp_path: Path, workers: int, strategy: str) -> None:
    asked = {"target": f"{TASKS}:mlp_quiet", "strategy": strategy, "args": {"steps": 60}, "output": StringIO()}
    asked |= {"cluster": {"workers": workers, "threads": 1, "device": "cuda"}, "runs": tmp_path, "zygote": zygote}
    calm = start(name="calm", **asked)
    found = start(name="killed", checkpoint="every=8", chaos=f"kill worker:{workers - 1} at step 20", **asked)
    assert found.results["restarts"] == 1 and found.results["audit"]["clean"]
    assert found.digest == calm.digest


@needs_gpu
@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (1, "data"),
        (2, "data:via=backend"),
        (2, "data:via=arena"),
        (2, "data:partition=relay"),
        (2, "sharded:stage=1"),
        (2, "sharded:stage=3"),
        (2, "tensor"),
        (2, "pipeline"),
        (2, "layer"),
        (2, "average:every=4"),
        (2, "ps"),
    ],
)
def test_a_resumed_run_goes_on_where_it_was(
    zygote: ZygoteProcess, tmp_path: Path, workers: int, strategy: str
) -> None:
    asked: dict[str, Any] = {
        "target": f"{TASKS}:gpt_quiet",
        "runs": tmp_path,
        "zygote": zygote,
        "output": StringIO(),
    }
    cluster = {"workers": workers, "threads": 1, "device": "cuda"}
    whole = start(name="whole", strategy=strategy, cluster=cluster, checkpoint="every=8,keep=9", **asked)
    resumed = start(resume="whole@8", runs=tmp_path, zygote=zygote, output=StringIO())
    assert resumed.results["audit"]["clean"]
    assert resumed.results["loss"] == pytest.approx(whole.results["loss"], rel=1e-3)


@needs_gpu
@pytest.mark.parametrize("task", ["mlp_quiet", "gpt_quiet"])
@pytest.mark.parametrize(
    ("workers", "strategy"),
    [(1, "ps"), (2, "ps"), (2, "ps:servers=2,wire=tcp,compress=zstd"), (2, "ps:push=parameters")],
)
def test_servers_of_the_host_serve_workers_on_gpus(
    zygote: ZygoteProcess, tmp_path: Path, workers: int, strategy: str, task: str
) -> None:
    expected = train(zygote, tmp_path / "cpu", device="cpu", workers=workers, strategy=strategy, task=task)
    found = train(zygote, tmp_path / "gpu", workers=workers, strategy=strategy, task=task)
    assert found == pytest.approx(expected, rel=1e-2)


@needs_gpu
def test_a_worker_of_servers_that_dies_on_a_gpu_is_followed_without_a_bit_lost(
    zygote: ZygoteProcess, tmp_path: Path
) -> None:
    asked = {"target": f"{TASKS}:mlp_quiet", "strategy": "ps", "args": {"steps": 60}, "output": StringIO()}
    asked |= {"cluster": {"workers": 2, "threads": 1, "device": "cuda"}, "runs": tmp_path, "zygote": zygote}
    calm = start(name="calm", **asked)
    found = start(name="killed", chaos="kill worker:1 at step 20", **asked)
    assert '"lost"' in (Path(found.folder) / "events.jsonl").read_text()
    assert found.results["audit"]["clean"] and found.digest == calm.digest


@needs_gpu
@pytest.mark.parametrize("strategy", ["ps:sync=asp", "ps:sync=ssp:3,shares=speed"])
def test_gpu_and_processor_train_one_model(zygote: ZygoteProcess, tmp_path: Path, strategy: str) -> None:
    """The first worker has the machine's only GPU; the second computes on the processor."""
    expected = train(zygote, tmp_path / "cpu", device="cpu", task="mlp_quiet")
    found = train(zygote, tmp_path / "both", device="cuda+cpu", workers=2, strategy=strategy)
    assert found == pytest.approx(expected, rel=0.3)


@needs_gpu
@pytest.mark.parametrize(("workers", "strategy"), [(2, "average:every=4"), (2, "average:every=4,outer=nesterov")])
def test_averages_train_as_on_the_cpu(zygote: ZygoteProcess, tmp_path: Path, workers: int, strategy: str) -> None:
    expected = train(zygote, tmp_path / "cpu", device="cpu", workers=workers, strategy=strategy)
    found = train(zygote, tmp_path / "gpu", workers=workers, strategy=strategy)
    assert found == pytest.approx(expected, rel=1e-2)


@needs_gpu
@pytest.mark.parametrize("strategy", ["data:via=backend", "data:via=backend,shares=2+1"])
def test_gpu_and_processor_take_one_step_together(zygote: ZygoteProcess, tmp_path: Path, strategy: str) -> None:
    expected = train(zygote, tmp_path / "cpu", device="cpu", task="gpt_quiet")
    found = train(zygote, tmp_path / "both", device="cuda+cpu", workers=2, strategy=strategy, task="gpt_quiet")
    assert found == pytest.approx(expected, rel=1e-3)


@needs_gpu
def test_parts_follow_the_speed_of_devices(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """Whatever is measured: parts of another size train the same model, and a processor that does not pay is left
    out."""
    cluster = {"workers": 2, "threads": 1, "device": "cuda+cpu"}
    alone = in_form(tmp_path, zygote, "alone")
    told = StringIO()
    found = in_form(tmp_path, zygote, "both", cluster=cluster, strategy="data:shares=speed", output=told)
    job = RunFolder(found.folder).read_job()
    assert job.cluster.device == "cuda" or sum(job.options["cuts"][0][1]) == load_small("mlp_quiet").batch_size
    assert "cuda+cpu: " in told.getvalue()
    cut = replace(
        job,
        strategy="data:via=backend",
        cluster=Cluster(**cluster),
        options={"cuts": [[1, [12, 4]]]},
        run_dir=str(tmp_path / "cut"),
    )
    loss = Supervisor(cut, lambda event: None, LocalEngine(zygote)).run()["loss"]
    assert loss == pytest.approx(alone.results["loss"], rel=1e-3)
    assert found.results["loss"] == pytest.approx(alone.results["loss"], rel=1e-3)


def test_what_needs_the_hosts_memory_is_refused() -> None:
    with pytest.raises(SpecError, match="via=backend"):
        Job(target="a.py", strategy="data:via=chain", cluster=Cluster(device="cuda"))
    with pytest.raises(SpecError, match=r"spares=1 .*via=arena"):
        Job(target="a.py", cluster=Cluster(device="cuda", spares=1))


@pytest.mark.parametrize(
    ("strategy", "asked", "said"),
    [
        ("data:via=arena,batchnorm=sync", {}, "via=backend"),
        ("data:via=arena", {"graph": True}, "leave graph or via out"),
        ("data:via=arena,shares=speed", {}, "shares=even"),
        ("data:journal=off", {}, "via=arena"),
    ],
)
def test_what_a_shared_gpu_cannot_do_is_refused(strategy: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Job(target="a.py", strategy=strategy, cluster=Cluster(device="cuda"), **asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said(zygote: ZygoteProcess, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="torch finds no GPU"):
        train(zygote, tmp_path)


def load_small(name: str) -> Task:
    """A task of the small ones, made here."""
    made: Task = runpy.run_path(str(TASKS))[name]()
    return made


def load_form(name: str, **args: Any) -> Task:
    """A task for forms of a step, made here."""
    made: Task = runpy.run_path(str(FORMS))[name](**args)
    return made


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An element for each captured step that this process replays from now on."""
    replays: list[None] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(None), replay(graph))[1])
    return replays


def in_form(folder: Path, zygote: ZygoteProcess, name: str, task: str = "mlp_quiet", **asked: Any) -> Run:
    """A run of one worker on the GPU."""
    cluster = {"workers": 1, "threads": 1, "device": "cuda"}
    usual: dict[str, Any] = {"target": f"{TASKS}:{task}", "args": {"steps": 40}, "cluster": cluster}
    return start(name=name, runs=folder, zygote=zygote, **({"output": StringIO()} | usual | asked))


@needs_gpu
@pytest.mark.parametrize("task", ["mlp_quiet", "gpt_quiet", "mlp"])
@pytest.mark.parametrize("form", [{"graph": True}, {"compile": True}, {"compile": True, "graph": True}])
def test_other_forms_train_as_plain_steps(
    zygote: ZygoteProcess, tmp_path: Path, task: str, form: dict[str, bool]
) -> None:
    plain = in_form(tmp_path, zygote, "plain", task)
    found = in_form(tmp_path, zygote, "found", task, **form)
    again = in_form(tmp_path, zygote, "again", task, **form)
    bound = (
        0.3 if form.get("compile") and task == "mlp" else 1e-2
    )  # what is compiled draws other numbers (dropout)
    assert found.results["loss"] == pytest.approx(plain.results["loss"], rel=bound)
    if not (form.get("compile") and "gpt" in task):  # there gradients of embeddings are added in any order
        assert found.digest == again.digest


@needs_gpu
def test_a_captured_step_follows_the_schedule_and_resumes(zygote: ZygoteProcess, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"task": "gpt_quiet", "graph": True}
    whole = in_form(tmp_path, zygote, "whole", **asked)
    in_form(tmp_path, zygote, "half", checkpoint="every=20", **asked)
    resumed = start(resume="half@20", runs=tmp_path, zygote=zygote, output=StringIO())
    assert resumed.results["loss"] == pytest.approx(whole.results["loss"], rel=1e-4)


@needs_gpu
@pytest.mark.parametrize(
    ("optimizer", "form"),
    [
        ("AdamW", {"graph": True}),
        ("RMSprop", {"graph": True}),  # does not look itself whether gradients are numbers
        ("AdamW", {"compile": True, "graph": True}),
    ],
)
def test_captured_steps_skip_what_plain_steps_in_fp16_skip(
    zygote: ZygoteProcess, tmp_path: Path, optimizer: str, form: dict[str, bool]
) -> None:
    asked: dict[str, Any] = {"target": f"{FORMS}:overflows", "args": {"optimizer": optimizer}, "precision": "fp16"}
    plain = in_form(tmp_path, zygote, "plain", **asked)
    found = in_form(tmp_path, zygote, "found", **asked, **form)
    again = in_form(tmp_path, zygote, "again", **asked, **form)
    assert found.results["skipped_steps"] == plain.results["skipped_steps"] >= 6
    assert found.results["loss_scale"] == plain.results["loss_scale"]
    assert found.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-2)
    assert found.digest == again.digest


@needs_gpu
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop"])
def test_an_overflow_inside_a_captured_step_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    replays = count_replays(monkeypatch)
    task = load_form("overflows", optimizer=optimizer)
    inputs, target = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    with Trainer(task, device="cuda", precision="fp16", form=StepForm(graph=True)) as trainer:
        for _ in range(6):
            trainer.step((inputs, target))
        before, replayed = trainer.state_dict(), len(replays)
        trainer.step((inputs, target + 3))
        after = trainer.state_dict()
        assert len(replays) == replayed + 1 and replayed > 1
        assert before["facts"]["precision"] == [FIRST_SCALE, 6, 0]
        assert after["facts"]["precision"] == [FIRST_SCALE / 2, 0, 1]
        for what in ("model", "optimizer"):
            assert before[what].keys() == after[what].keys() and len(after[what])
            assert all(torch.equal(before[what][name], tensor) for name, tensor in after[what].items())
        trainer.step((inputs, target))
        assert not all(torch.equal(after["model"][n], t) for n, t in trainer.state_dict()["model"].items())


@needs_gpu
def test_the_scale_doubles_inside_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = count_replays(monkeypatch)
    inputs, target = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    with Trainer(load_form("overflows"), device="cuda", precision="fp16", form=StepForm(graph=True)) as trainer:
        trainer.step((inputs, target))
        state = trainer.state_dict()
        state["facts"]["precision"] = [1024.0, STEPS_TO_DOUBLE - 5, 3]
        trainer.load_state_dict(state)
        known = []
        for _ in range(6):
            trainer.step((inputs, target))
            known.append(trainer.state_dict()["facts"]["precision"])
    assert known[3:] == [[1024.0, STEPS_TO_DOUBLE - 1, 3], [2048.0, 0, 3], [2048.0, 1, 3]]
    assert len(replays) == 3


@needs_gpu
def test_nobody_waits_for_a_captured_step_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = count_replays(monkeypatch)
    way = StepWay(form=StepForm(graph=True), precision="fp16")
    task = replace(load_form("overflows"), train=TensorDataset(torch.randn(64, 16) / 2, torch.arange(64) % 3))
    trial = FormTrial(task, way, "cuda", Start())
    assert trial.begin() is not None
    before = len(replays)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opened = [trial.take() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(replays) == before + 3
    assert all(each.result().loss > 0 for each in opened)
    assert trial.training.replica.precision.state.good_steps == 8
    trial.close()


@needs_gpu
def test_what_cannot_be_captured_is_said(zygote: ZygoteProcess, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="cannot be captured"):
        in_form(tmp_path, zygote, "asks", target=f"{FORMS}:asks_for_values", graph=True)


@needs_gpu
@pytest.mark.parametrize("compiles", [False, True])
def test_a_loss_in_pieces_on_the_gpu(zygote: ZygoteProcess, tmp_path: Path, compiles: bool) -> None:
    plain = in_form(tmp_path, zygote, "plain", target=f"{FORMS}:words")
    found = in_form(tmp_path, zygote, "found", target=f"{FORMS}:words", loss_in_pieces=True, compile=compiles)
    assert found.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-3)


@needs_gpu
def test_fast_captures_what_is_bound_by_launches(zygote: ZygoteProcess, tmp_path: Path) -> None:
    found = in_form(tmp_path, zygote, "fast", fast=True)
    job = RunFolder(found.folder).read_job()
    assert job.graph and not job.fast and job.options["chosen_form"]["ratio"] > 1.5


@needs_gpu
def test_a_trainer_takes_batches_of_the_host(tmp_path: Path) -> None:
    task = load_small("mlp_quiet")
    with Trainer(task, device="cuda") as trainer:
        batch = next(iter(DataLoader(task.dataset("train"), batch_size=16)))
        losses = [trainer.step(batch) for _ in range(8)]
    assert losses[-1] < losses[0]


@needs_gpu
def test_an_optimizer_in_the_hosts_memory_changes_no_bit(zygote: ZygoteProcess, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"target": f"{FORMS}:heavy", "checkpoint": "every=8,keep=9"}
    plain = in_form(tmp_path, zygote, "plain", **asked)
    found = in_form(tmp_path, zygote, "found", offload="optimizer", **asked)
    resumed = start(resume="found@8", runs=tmp_path, zygote=zygote, output=StringIO())
    assert found.digest == plain.digest == resumed.digest
    saved = found.results["offloaded_bytes"]
    assert saved > 64 << 20
    less = plain.results["peak_gpu_memory"]["0"] - found.results["peak_gpu_memory"]["0"]
    assert less > saved // 2
    report = (Path(found.folder) / "report.md").read_text()
    assert "of what the optimizer keeps" in report and "taken from the driver" in report


@needs_gpu
@pytest.mark.parametrize("form", [{}, {"graph": True}, {"compile": True}, {"compile": True, "graph": True}])
def test_a_flat_update_trains_as_torchs_own(zygote: ZygoteProcess, tmp_path: Path, form: dict[str, bool]) -> None:
    asked: dict[str, Any] = {"task": "gpt_quiet", "precision": "bf16", **form}
    plain = in_form(tmp_path, zygote, "plain", **asked)
    found = in_form(tmp_path, zygote, "found", flat_update=True, checkpoint="every=20", **asked)
    resumed = start(resume="found@20", runs=tmp_path, zygote=zygote, output=StringIO())
    assert found.results["loss"] == pytest.approx(plain.results["loss"], rel=1e-2)
    assert resumed.results["loss"] == pytest.approx(found.results["loss"], rel=1e-3)


@needs_gpu
def test_a_gpu_without_room_says_what_held_its_memory(zygote: ZygoteProcess, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"which was too little .*activations and all else .*; use accumulate=2"):
        in_form(tmp_path, zygote, "large", target=f"{FORMS}:hungry")


@needs_gpu
def test_plain_steps_in_fp16_skip_and_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(load_form("overflows"), train=TensorDataset(torch.randn(64, 16) / 2, torch.arange(64) % 3))
    trial = FormTrial(task, StepWay(precision="fp16"), "cuda", Start())
    assert trial.begin() is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        opened = [trial.take() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(each.result().loss > 0 for each in opened)
    assert trial.training.replica.precision.state.good_steps == 8
    trial.close()


@needs_gpu
@pytest.mark.parametrize(
    "text",
    ["none", "zstd", "bf16", "fp16", "int8", "int8:stochastic", "topk:0.05", "randomk:0.05", "sign", "powersgd:2"],
)
def test_tensors_on_a_gpu_are_compressed_there(text: str) -> None:
    given = [torch.randn(300, 70, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    here, there = make_compression(text), make_compression(text)
    for values in given:
        packed = there.encode("w", values.cuda())
        assert not any(isinstance(frame, torch.Tensor) and frame.is_cuda for frame in packed.frames)
        out, expected = torch.empty(300, 70, device="cuda"), torch.empty(300, 70)
        there.decode(packed, out)
        here.decode(here.encode("w", values), expected)
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-3)
        again = make_compression(text)
        again.remember({name: one.clone() for name, one in there.remembered().items()})
        there = again  # as after a resume: what was left out lies in the host's memory
