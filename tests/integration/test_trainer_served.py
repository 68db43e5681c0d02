"""`shoal.Trainer` with servers: `shoal run --strategy ps` starts them, and the script's `fit` is theirs, too."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_way
import pytest
import torch

import shoal
from helpers.observed import ObservedEngine
from helpers.training import Train, Trained
from shoal.checkpoint.listing import read_manifest
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.launch.scripts import run_script
from shoal.observe import Event
from shoal.roles.trainer.trainer import Trainer
from shoal.spec import Cluster, Job
from shoal.spec.vocabulary import Purpose

TASKS = Path(every_way.__file__)
HALF, WHOLE, MORE = 3, 6, 8
PACED_STEPS = 200
FITTED = """
import json, sys
import every_way, shoal
from shoal.checkpoint.model_file import digest

folder, optimizer, *loaded = sys.argv[1:]
with shoal.Trainer(every_way.task(optimizer)) as trainer:
    if loaded:
        trainer.load(loaded[0])
    before = trainer.evaluate()
    outcome = trainer.fit()
    state = trainer.state_dict()
    trainer.save(f"{folder}/state")
    found = {"step": trainer.steps, "loss": outcome.loss, "results": outcome.results, "again": trainer.evaluate(),
             "before": before, "lr": trainer.lr, "losses": state["losses"],
             "output": trainer.model(every_way.INPUTS[:2]).tolist(),
             "digests": [digest(state["model"]), digest(state["optimizer"])],
             "saved": trainer.save(f"{folder}/model.safetensors")}
json.dump(found, open(f"{folder}/rank-{trainer.world.global_rank}.json", "w"))
"""
PACED = f"""
import json, sys, time
from dataclasses import replace
import every_way, shoal
from shoal.checkpoint.model_file import digest

the_task = every_way.task(steps={PACED_STEPS})

def slowly(output, target):
    time.sleep(0.006)  # long enough to be met in the middle
    return the_task.loss(output, target)

with shoal.Trainer(replace(the_task, loss=slowly, test=None, metrics={{}})) as trainer:
    outcome = trainer.fit()
found = {{"step": outcome.step, "digest": digest(trainer.model.state_dict())}}
json.dump(found, open(f"{{sys.argv[1]}}/rank-{{trainer.world.global_rank}}.json", "w"))
"""


class Scripts:
    """Writes a script and runs it with two workers."""

    def __init__(self, folder: Path, zygote: ZygoteProcess) -> None:
        self.folder = folder
        self._zygote = zygote
        self.output = io.BytesIO()

    def __call__(self, code: str, strategy: str, *words: str) -> None:
        cluster = Cluster(workers=2, threads=1)
        argv = [str(self.folder), *words]
        script = self._written(code)
        run_script(script, argv, cluster=cluster, strategy=strategy, stream=self.output, zygote=self._zygote)

    def watched(self, code: str, strategy: str, on_event: Callable[[ObservedEngine, Event], None]) -> None:
        """The same, with a look at its processes at every event."""
        job = Job(
            purpose=Purpose.SCRIPT,
            target=str(self._written(code)),
            strategy=strategy,
            cluster=Cluster(workers=2, threads=1),
            options={"argv": [str(self.folder)]},
        )
        engine = ObservedEngine(self._zygote)
        engine.run(job, lambda event: on_event(engine, event))

    def fitted(self, strategy: str, optimizer: str, *words: str) -> list[dict[str, Any]]:
        """What both workers tell of a `fit` that went well."""
        try:
            self(FITTED, strategy, optimizer, *words)
        except shoal.ShoalError as error:
            pytest.fail(f"{error}\n{self.output.getvalue().decode()}")
        return self.told()

    def told(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(2)]

    def _written(self, code: str) -> Path:
        path = self.folder / "script.py"
        path.write_text(code)
        return path


@pytest.fixture
def scripts(tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    monkeypatch.setenv("PYTHONPATH", f"{TASKS.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Scripts(tmp_path, zygote)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> Trained:
    """What `shoal train` makes of the paced script's task."""
    train = Train(TASKS, tmp_path_factory.mktemp("undisturbed"), zygote)
    return train("task", workers=2, strategy="ps", overrides={"evaluate_every": PACED_STEPS}, steps=PACED_STEPS)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("ps", "momentum"), ("ps:servers=2", "adamw"), ("ps:servers=2,wire=tcp", "adamw")],
)
def test_lockstep_has_the_bits_of_shoal_train_and_of_one_process(
    scripts: Scripts, zygote: ZygoteProcess, strategy: str, optimizer: str
) -> None:
    first, second = scripts.fitted(strategy, optimizer)
    assert second == {**first, "saved": ""}
    train = Train(TASKS, scripts.folder, zygote)
    trained = train("task", workers=2, strategy=strategy, optimizer=optimizer)
    alone = train("task", workers=1, slots=2, optimizer=optimizer)
    assert first["digests"] == [digest(trained.model), digest(trained.state)]
    assert first["digests"] == [digest(alone.model), digest(alone.state)]
    assert first["results"] == first["again"] == trained.results["results"]
    assert first["before"] != first["again"]
    assert (first["step"], len(set(first["losses"]))) == (WHOLE, WHOLE)
    assert first["loss"] == first["losses"][-1] == trained.results["loss"]
    assert first["saved"] == first["digests"][0] == digest(load_tensors(scripts.folder / "model.safetensors"))


@pytest.mark.parametrize("strategy", ["ps:servers=2,sync=asp", "ps:push=parameters,every=2"])
def test_all_workers_end_with_the_model_that_they_have_trained_together(scripts: Scripts, strategy: str) -> None:
    first, second = scripts.fitted(strategy, "momentum")
    assert first["digests"] == second["digests"]
    assert first["output"] == second["output"]
    for told in (first, second):
        assert told["step"] == len(told["losses"]) == WHOLE
        assert told["results"] == told["again"] == first["again"] != told["before"]


def test_a_state_goes_on_from_one_process_to_servers_and_back(scripts: Scripts) -> None:
    with Trainer(every_way.task("adamw", HALF)) as alone:
        alone.fit()
        alone.save(scripts.folder / "before")
    first, second = scripts.fitted("ps:servers=2", "adamw", str(scripts.folder / "before"))
    assert second == {**first, "saved": ""}
    assert read_manifest(scripts.folder / "state").step == WHOLE
    with Trainer(every_way.task("adamw", MORE)) as after:
        after.load(scripts.folder / "state")
        assert (after.steps, after.lr) == (WHOLE, first["lr"])
        after.fit()
        found = after.state_dict()["losses"]
    with Trainer(every_way.task("adamw", MORE)) as unbroken:
        unbroken.fit()
        assert found == pytest.approx(unbroken.state_dict()["losses"], rel=1e-4)
    assert found[:WHOLE] == first["losses"]


@pytest.mark.parametrize("role", ["worker", "server", "coordinator"])
def test_who_is_killed_in_fit_is_followed(scripts: Scripts, undisturbed: Trained, role: str) -> None:
    killed, replaced = [], []

    def kill(engine: ObservedEngine, event: Event) -> None:
        if not killed and engine.crew.top_step >= PACED_STEPS // 20:
            killed.append(engine.running(role)[-1])
            engine.signal(killed[0], signal.SIGKILL)
        if event.kind == "replaced":
            replaced.append(event.values["role"])

    scripts.watched(PACED, "ps", kill)
    assert (len(killed), replaced) == (1, [role])
    assert scripts.told() == [{"step": PACED_STEPS, "digest": digest(undisturbed.model)}] * 2


def test_ctrl_c_interrupts_the_scripts_and_ends_the_servers(scripts: Scripts) -> None:
    pressed: list[int] = []

    def press(engine: ObservedEngine, event: Event) -> None:
        if not pressed and engine.crew.top_step >= 2:
            pressed.append(engine.crew.top_step)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped on request"):
        scripts.watched(PACED, "ps:servers=2", press)
    assert not list(scripts.folder.glob("rank-*.json")), "what comes after fit was not run"


def test_a_worker_that_dies_after_fit_ends_the_run(scripts: Scripts) -> None:
    with pytest.raises(WorkerFailed, match=r"Worker 1 was killed from outside \(SIGKILL\)"):
        scripts(
            "import os, signal, time, every_way, shoal\n"
            "trainer = shoal.Trainer(every_way.task(steps=2))\n"
            "trainer.fit()\n"
            "if trainer.world.global_rank == 1:\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "time.sleep(600)\n",
            "ps",
        )


def test_servers_run_the_script_up_to_its_fit(scripts: Scripts) -> None:
    scripts(
        "import os, every_way, shoal\n"
        "print(*(os.environ[name] for name in ('SHOAL_ROLE', 'RANK', 'ROLE_RANK', 'ROLE_WORLD_SIZE')))\n"
        "with shoal.Trainer(every_way.task(steps=2), strategy='ps:servers=2') as trainer:\n"
        "    trainer.fit()\n"
        "    print('after')\n",
        "ps:servers=2",
    )
    assert sorted(scripts.output.getvalue().decode().splitlines()) == [
        "[0] after",
        "[0] worker 0 0 2",
        "[1] after",
        "[1] worker 1 1 2",
        "[coordinator 0] coordinator -1 0 1",
        "[server 0] server -1 0 2",
        "[server 1] server -1 1 2",
    ]


MAKE = "import sys, every_way, shoal\ntask = every_way.task(steps=2)\n"


@pytest.mark.parametrize(
    ("strategy", "code", "message"),
    [
        (
            "data",
            "shoal.Trainer(task, strategy='ps')",
            r"this run has none, .* write `shoal run --strategy ps` before",
        ),
        (
            "ps",
            "shoal.Trainer(task, strategy='ps:servers=2')",
            r"strategy=ps:servers=2 is not what `shoal run --strategy ps` has started servers for",
        ),
        (
            "ps",
            "shoal.Trainer(task).step((every_way.INPUTS, every_way.TARGETS))",
            r"with strategy=ps a coordinator hands out parts of the task's own data, and counts them; use fit\(\)",
        ),
        ("pipeline", "shoal.Trainer(task).step((every_way.INPUTS, every_way.TARGETS))", "strategy=pipeline cuts"),
        ("ps", "pass", r"without Trainer\.fit\(\), but servers were started for it"),
        ("ps", "sys.exit(0)", r"without Trainer\.fit\(\), but servers were started for it"),
        ("ps", "sys.exit(7)", "ended with exit code 7"),
        ("ps", "for _ in range(2): shoal.Trainer(task).fit()", r"the servers of strategy=ps serve one fit\(\)"),
    ],
)
def test_what_cannot_be_is_said(scripts: Scripts, strategy: str, code: str, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        scripts(MAKE + code + "\n", strategy)


def test_a_plain_process_serves_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with Trainer(every_way.task()) as alone:
        expected = alone.fit()
    with Trainer(every_way.task(), strategy="ps:servers=2") as trainer:
        outcome = trainer.fit()
        for name, tensor in alone.model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], tensor), name
    assert outcome.facts["audit"]["clean"] and outcome.step == expected.step
    assert (outcome.loss, outcome.results) == (expected.loss, expected.results)
