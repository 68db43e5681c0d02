"""`shoal.Trainer` under every strategy: what its processes train together is what one trains alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import every_way
import pytest
import torch
from every_way import INPUTS, TARGETS

import shoal
from helpers.forked import in_processes
from helpers.training import largest_difference
from shoal.checkpoint.model_file import load_tensors
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess
from shoal.launch.scripts import run_script
from shoal.roles.trainer.trainer import Trainer
from shoal.spec import Cluster, World

SAME = (
    *(f"data:via={via}" for via in ("arena", "backend", "ring", "tree", "central", "allgather")),
    "data:partition=relay",
    "sharded",
    "sharded:stage=1",
    "tensor",
    "pipeline",
    "mesh:data=2",
    "layer:place=0@0+2@1+5@0",
)
"""Those that compute what one process computes."""
OTHERS = ("layer:decoupled=on", "layer:phases=2")
"""Other ways to train."""
SCRIPT = """
import json, sys
import every_way, shoal

folder, *strategies = sys.argv[1:]
found = []
for number, strategy in enumerate(strategies):
    with shoal.Trainer(every_way.task(), strategy=strategy) as trainer:
        outcome = trainer.fit()
        trainer.save(f"{folder}/model-{number}.safetensors")
        found.append({"loss": outcome.loss, "results": outcome.results, "again": trainer.evaluate()})
json.dump(found, open(f"{folder}/rank-{trainer.world.global_rank}.json", "w"))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_two_processes_of_shoal_run_fit_under_every_strategy(script: Path, zygote: ZygoteProcess) -> None:
    output = io.BytesIO()
    words = [str(script.parent), *SAME, *OTHERS]
    try:
        run_script(script, words, cluster=Cluster(workers=2, threads=1), stream=output, zygote=zygote)
    except shoal.ShoalError as error:
        pytest.fail(f"{error}\n{output.getvalue().decode()}")
    check_answers(script.parent)


def check_answers(folder: Path, *served: str) -> None:
    """Both processes tell the same, and where nothing else is claimed, it is what one process tells; `served`:
    more strategies that do, after the others."""
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    with Trainer(every_way.task()) as alone:
        outcome = alone.fit()
        model = {name: tensor.clone() for name, tensor in alone.model.state_dict().items()}
    for number, strategy in enumerate((*SAME, *OTHERS, *served)):
        told, saved = first[number], load_tensors(folder / f"model-{number}.safetensors")
        assert told["again"] == pytest.approx(told["results"]), strategy
        if strategy not in OTHERS:
            assert told["loss"] == pytest.approx(outcome.loss, rel=1e-4), strategy
            assert told["results"] == pytest.approx(outcome.results, rel=1e-4), strategy
            assert largest_difference(saved, model) < 1e-4, strategy
        else:
            assert saved.keys() == model.keys(), strategy
            assert largest_difference(saved, model) > 1e-3, strategy


@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_a_step_takes_the_batches_of_all_lanes(strategy: str) -> None:
    """Where processes compute a batch together, all of them pass it."""

    def train(world: World) -> dict[str, Any]:
        with Trainer(every_way.task(), strategy=strategy, world=world) as trainer:
            rows = slice(trainer.lane, 16, trainer.lanes)
            losses = [trainer.step((INPUTS[rows], TARGETS[rows])) for _ in range(4)]
            state = trainer.state_dict()["model"]
            return {"lanes": trainer.lanes, "losses": losses, "model": {n: t.tolist() for n, t in state.items()}}

    first, second = in_processes(2, train)
    assert first["lanes"] == second["lanes"] == {"sharded": 2, "tensor": 1}[strategy]
    with Trainer(every_way.task()) as alone:
        losses = [alone.step((INPUTS[:16], TARGETS[:16])) for _ in range(4)]
        assert first["losses"] == second["losses"] == pytest.approx(losses, rel=1e-5)
        for name, tensor in alone.model.state_dict().items():
            torch.testing.assert_close(torch.tensor(first["model"][name]), tensor, rtol=0, atol=1e-5)
    assert not second["model"], "the first process alone has all of it"


def test_groups_that_cut_their_model_take_steps_of_ones_own() -> None:
    """As those do who have all of it; what workers agree on, and end with, is the same."""

    def train(strategy: str) -> Any:
        def work(world: World) -> dict[str, Any]:
            with Trainer(every_way.task(), strategy=strategy, world=world) as trainer:
                rows = slice(trainer.lane, 16, trainer.lanes)
                losses = [trainer.step((INPUTS[rows], TARGETS[rows])) for _ in range(5)]
                state = trainer.state_dict()["model"]
                return {"losses": losses, "model": {name: one.tolist() for name, one in state.items()}}

        return work

    found = in_processes(4, train("average:every=2,inside=tensor,groups=2"))
    expected, _ = in_processes(2, train("average:every=2"))
    assert all(each["losses"] == pytest.approx(expected["losses"], rel=1e-5) for each in found)
    for name, values in expected["model"].items():
        torch.testing.assert_close(torch.tensor(found[0]["model"][name]), torch.tensor(values), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("pipeline", "cuts a batch's way through it; use fit"),
        ("layer:place=0@0+2@1+5@0", "cuts a batch's way through it; use fit"),
        ("data:partition=relay", "lets processes take turns with batches; use fit"),
        (
            "average:every=2,clients=4,share=0.5,partition=own",
            "each client is trained on its samples of the task's;",
        ),
    ],
)
def test_a_step_that_cannot_be_is_refused(strategy: str, why: str) -> None:
    def train(world: World) -> str:
        with Trainer(every_way.task(), strategy=strategy, world=world) as trainer:
            with pytest.raises(SpecError) as refused:
                trainer.step((INPUTS, TARGETS))
            return str(refused.value)

    for told in in_processes(2, train):
        assert f"strategy={strategy} {why}" in told


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("ps:servers=2", 2),
        *(pytest.param(f"ps:sync={sync}", 3, marks=pytest.mark.long) for sync in ("bsp", "asp")),
    ],
)
def test_the_first_process_serves_where_nobody_starts_servers(strategy: str, workers: int) -> None:
    def train(world: World) -> tuple[int, bool | None, str]:
        with Trainer(every_way.task(), strategy=strategy, world=world) as trainer:
            outcome = trainer.fit()
            audit = outcome.facts.get("audit")
            return outcome.step, None if audit is None else audit["clean"], digest_of(trainer)

    def train_in_lockstep(world: World) -> str:
        with Trainer(every_way.task(), world=world) as trainer:
            trainer.fit()
            return digest_of(trainer)

    steps, audits, digests = zip(*in_processes(workers, train), strict=True)
    assert len(set(steps)) == 1 and audits == (True, *[None] * (workers - 1))
    assert len(set(digests)) == 1, "each has the model as the servers had it"
    if "asp" not in strategy:
        assert digests[0] == in_processes(workers, train_in_lockstep)[0]


def digest_of(trainer: Trainer) -> str:
    model = trainer.state_dict()["model"]
    return hashlib.sha256(b"".join(model[name].numpy().tobytes() for name in sorted(model))).hexdigest()


def test_a_coordinator_that_nobody_can_follow_has_no_standby() -> None:
    with pytest.raises(SpecError, match="leave standby out, or use `shoal run`"):
        Trainer(every_way.task(), strategy="ps:standby=1")


@pytest.mark.parametrize("strategy", ["sharded", "tensor", "pipeline", "data:via=ring", "data:partition=relay"])
def test_one_process_alone_can_train_under_it(strategy: str) -> None:
    def train(world: World) -> list[float]:
        with Trainer(every_way.task()) as plain, Trainer(every_way.task(), strategy=strategy) as trainer:
            return [plain.fit().loss, trainer.fit().loss]

    ((expected, found),) = in_processes(1, train)
    assert found == pytest.approx(expected, rel=1e-5)
