"""`shoal.Trainer`: in one process a hand-written loop; in several, one process on all their batches."""

from __future__ import annotations

import io
import json
import textwrap
from dataclasses import replace
from pathlib import Path

import odd_tasks
import pytest
import torch
from odd_tasks import INPUTS, TARGETS
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.errors import SpecError, TaskError, WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.launch.scripts import run_script
from shoal.ledger import Order
from shoal.spec import Cluster, World

STEPS = 20
SCRIPT = """
import json, sys
import torch, torch.distributed as dist
import odd_tasks, shoal
from odd_tasks import INPUTS, TARGETS

dist.init_process_group("gloo")  # a script may use both
rank = dist.get_rank()
found = {}
for strategy in ("data", "data:via=ring"):
    with shoal.Trainer(odd_tasks.evaluated_often(), strategy=strategy) as trainer:
        rows = slice(0, 5) if rank == 0 else slice(5, 48)
        losses = [trainer.step((INPUTS[rows], TARGETS[rows])) for _ in range(10)]
        found[strategy] = {"losses": losses, "results": trainer.evaluate(),
                           "model": {k: v.tolist() for k, v in trainer.model.state_dict().items()}}
with shoal.Trainer(odd_tasks.evaluated_often()) as trainer:
    outcome = trainer.fit()
    again = trainer.evaluate()
    trainer.step((INPUTS[:4], TARGETS[:4]))
    found["fit"] = {"loss": outcome.loss, "results": outcome.results, "again": again,
                    "later": trainer.evaluate(), "digest": trainer.save(sys.argv[1] + "/model.safetensors")}
dist.destroy_process_group()
json.dump(found, open(f"{sys.argv[1]}/rank-{rank}.json", "w"))
"""


def test_one_process_is_a_hand_written_loop_bit_by_bit() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    trainer = shoal.Trainer(odd_tasks.make())
    for step in range(STEPS):
        rows = slice(step % 3 * 16, step % 3 * 16 + 16)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS[rows]), TARGETS[rows])
        loss.backward()
        optimizer.step()
        assert trainer.step((INPUTS[rows], TARGETS[rows])) == loss.item()
    assert trainer.steps == STEPS
    assert digest(trainer.model.state_dict()) == digest(model.state_dict())


def test_fit_goes_through_the_epochs_and_evaluates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    order = Order(48, 0)
    for epoch in range(3):
        for start in range(0, 48, 16):
            rows = torch.from_numpy(order.samples(epoch, start, start + 16))
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[rows]), TARGETS[rows]).backward()
            optimizer.step()
    with shoal.Trainer(odd_tasks.evaluated_often()) as trainer:
        outcome = trainer.fit()
        assert (outcome.step, outcome.reason, trainer.steps) == (9, "finished", 9)
        assert trainer.evaluate() == outcome.results
        with torch.no_grad():
            scores = model(INPUTS)
            assert outcome.results["loss"] == pytest.approx(F.cross_entropy(scores, TARGETS).item(), rel=1e-6)
            assert outcome.results["accuracy"] == pytest.approx(
                (scores.argmax(1) == TARGETS).double().mean().item()
            )
        key = trainer.save(tmp_path / "model.safetensors")
    assert key == digest(model.state_dict()) == digest(load_tensors(tmp_path / "model.safetensors"))


def test_a_loss_that_is_a_dict_is_told_in_parts() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        ce = F.cross_entropy(output, target)
        return {"loss": 2 * ce, "ce": ce}

    with shoal.Trainer(replace(odd_tasks.make(), loss=loss)) as trainer:
        assert trainer.loss_parts == {}
        told = trainer.step((INPUTS[:16], TARGETS[:16]))
        assert trainer.loss_parts == {"ce": pytest.approx(told / 2)}


def test_shared_memory_trains_the_same_in_one_process() -> None:
    plain, arena = shoal.Trainer(odd_tasks.sparse()), shoal.Trainer(odd_tasks.sparse(), strategy="data:via=arena")
    assert plain.fit().loss == pytest.approx(arena.fit().loss, rel=1e-5)
    arena.close()


def test_what_a_trainer_cannot_do_is_said() -> None:
    trainer = shoal.Trainer(odd_tasks.make())
    with pytest.raises(SpecError, match="give the task a test set"):
        trainer.evaluate()
    trainer.step((INPUTS, TARGETS))
    with pytest.raises(SpecError, match="but 1 were taken already; make a new Trainer"):
        trainer.fit()
    with pytest.raises(TaskError, match=r"must be \(inputs, target\), found 3 parts"):
        trainer.step((INPUTS, INPUTS, TARGETS))
    with shoal.Trainer(odd_tasks.make(), slots=4) as several, pytest.raises(SpecError, match="but slots=4 for 1"):
        several.step((INPUTS, TARGETS))
    with pytest.raises(SpecError, match="slots=1 is fewer than workers=2"):
        shoal.Trainer(odd_tasks.make(), slots=1, world=World(world_size=2, arena_fd=0))
    with pytest.raises(TaskError, match="given 1 parameters that are not the model's"):
        temperature = nn.Parameter(torch.ones(1))
        shoal.Trainer(odd_tasks.make(optimizer=lambda params: torch.optim.SGD([*params, temperature], lr=0.1)))


def test_what_it_trains_with_can_be_seen() -> None:
    def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    with shoal.Trainer(replace(odd_tasks.make(), scheduler=halved), device="cpu") as trainer:
        assert isinstance(trainer.optimizer, torch.optim.SGD) and trainer.lr == 0.1
        assert isinstance(trainer.scheduler, torch.optim.lr_scheduler.StepLR)
        trainer.step((INPUTS, TARGETS))
        assert trainer.lr == 0.05
    with pytest.raises(SpecError, match="device 'moon' is not known"):
        shoal.Trainer(odd_tasks.make(), device="moon")


def test_a_world_without_a_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SpecError, match="do not say where processes meet"):
        shoal.Trainer(odd_tasks.make(), world=World(world_size=2, local_size=2))
    with pytest.raises(shoal.ShoalError, match="Start all of them on one host"):
        shoal.Trainer(odd_tasks.make(), world=World(world_size=2, local_size=1))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_two_processes_of_shoal_run(script: Path, zygote: ZygoteProcess) -> None:
    output = io.BytesIO()
    cluster = Cluster(workers=2, threads=1)
    try:
        run_script(script, [str(script.parent)], cluster=cluster, stream=output, zygote=zygote)
    except shoal.ShoalError as error:
        pytest.fail(f"{error}\n{output.getvalue().decode()}")
    check_answers(script.parent)


UNEVEN = """
import odd_tasks, shoal
from odd_tasks import INPUTS, TARGETS

trainer = shoal.Trainer(odd_tasks.make(), strategy="{strategy}")
for _ in range(3 if trainer.world.is_first else 5):
    trainer.step((INPUTS, TARGETS))
{end}
"""


@pytest.mark.parametrize("end", ["trainer.close()", ""], ids=["closed", "just ends"])
@pytest.mark.parametrize("strategy", ["data", "sharded"])
def test_uneven_steps_are_no_hang(script: Path, zygote: ZygoteProcess, strategy: str, end: str) -> None:
    script.write_text(UNEVEN.format(strategy=strategy, end=end))
    with pytest.raises(WorkerFailed, match=r"^Worker 0 ended after 3 steps, but worker 1 is in step 4 and waits"):
        run_script(script, cluster=Cluster(workers=2, threads=1), stream=io.BytesIO(), zygote=zygote)


def check_answers(folder: Path) -> None:
    """What both processes tell is what one process tells that trains on both their batches."""
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2))
    alone = shoal.Trainer(odd_tasks.evaluated_often())
    losses = [alone.step((INPUTS, TARGETS)) for _ in range(10)]
    for strategy in ("data", "data:via=ring"):
        assert first[strategy] == second[strategy]
        assert first[strategy]["losses"] == pytest.approx(losses, rel=1e-6)
        assert first[strategy]["results"] == pytest.approx(alone.evaluate(), rel=1e-6)
        for name, tensor in alone.model.state_dict().items():
            torch.testing.assert_close(torch.tensor(first[strategy]["model"][name]), tensor, rtol=0, atol=1e-6)
    outcome = shoal.Trainer(odd_tasks.evaluated_often()).fit()
    fitted = first["fit"]
    assert fitted["loss"] == pytest.approx(outcome.loss, rel=1e-5)
    assert fitted["results"] == fitted["again"] == pytest.approx(outcome.results, rel=1e-5)
    assert fitted["later"] != fitted["again"], "an evaluation after another step is a new one"
    assert fitted["digest"] == digest(load_tensors(folder / "model.safetensors"))
    assert second["fit"] == {**fitted, "digest": ""}
