"""The process that tries forms of a step on a job's own task, and leaves a page that says which to take."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shoal.errors import Diverged, ShoalError
from shoal.model.convolutions import can_use_patches
from shoal.model.memory_format import has_images
from shoal.model.products import can_multiply_by_onednn
from shoal.observe.disk import write_whole
from shoal.roles.fast.choice import (
    LEAST_GAIN,
    Openings,
    StepWay,
    Tried,
    agree,
    best_of,
    bound_for,
    captured_ways,
    compiled_ways,
    pays_to_compile,
    plain_way,
    quick_ways,
)
from shoal.roles.fast.devices import measure_devices
from shoal.roles.fast.trial import FormTrial
from shoal.roles.loading.start import read_start
from shoal.roles.loading.task import load_task
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.training import make_schedule
from shoal.spec import Job, Task, World
from shoal.spec.vocabulary import State
from shoal.step.flat_rules import why_not_flat
from shoal.step.pieces import find_vocabulary_layer

FILE_NAME = "form.json"
_ROUNDS = 3


def try_forms(job: Job, world: World, reporter: Reporter) -> None:
    """Find the fastest form for the job that the option `job` names."""
    reporter.on_state(State.STARTING, 0)
    wanted = Job.from_json(job.options["job"])
    task = load_task(wanted)
    train = task.dataset("train")
    start = read_start(wanted)
    schedule = make_schedule(task, train, wanted.num_slots, wanted.cluster.places)
    reporter.on_state(State.READY, 0)
    size = task.batch_size if task.batch_per_worker else max(1, task.batch_size // wanted.num_slots)
    slot = replace(
        task,
        train=train,
        test=None,
        stop=None,
        keep_best=None,
        callbacks=(),
        batch_size=size,
        batch_per_worker=False,
    )
    if job.options.get("devices"):
        whole = replace(slot, batch_size=schedule.batch_size)
        page = {"batch": schedule.batch_size, "times": measure_devices(whole, wanted, world.device, start)}
        write_whole(Path(job.run_dir) / FILE_NAME, json.dumps(page) + "\n")
        reporter.done({"samples": 0})
        return
    steps = max(1, schedule.total_steps - start.step)
    search = Search(slot, wanted, world.device, steps, start)
    page = search.run()
    write_whole(Path(job.run_dir) / FILE_NAME, json.dumps(page) + "\n")
    reporter.done({"samples": 0})


class Search:
    """Tries ways one after the other, the quick ones first."""

    def __init__(self, task: Task, job: Job, device: str, steps: int, start: Any) -> None:
        self._task = task
        self._job = job
        self._device = device
        self._steps = steps
        self._start = start
        self._tried: list[Tried] = []
        self._notes: list[str] = []
        self._losses: list[float] = []

    def run(self) -> dict[str, Any]:
        """What to take, and a line that says why."""
        openings = self._openings()
        base = FormTrial(self._task, plain_way(openings), self._device, self._start)
        openings = self._openings_of(base)
        lap = base.begin()
        assert lap is not None
        self._losses = lap.losses
        plain = Tried(way=plain_way(openings), step_s=base.measure(), first_s=lap.first_s)
        self._tried.append(plain)
        for way in quick_ways(openings):
            self._try(way, plain)
        ways = compiled_ways(openings, self._tried)
        if pays_to_compile(self._steps, plain.step_s, len(ways)):
            for way in ways:
                self._try(way, plain)
        else:
            self._notes.append(
                f"compile was not tried: the run takes about {self._steps * plain.step_s:,.0f} s, and compiling "
                "takes 10 to 60"
            )
        if openings.can_capture:
            for way in captured_ways(openings, self._tried):
                self._try(way, plain)
        left = list(self._tried[1:])
        while (best := best_of(plain, left, self._steps)) is not plain:
            if (ratio := self._beside(base, best)) >= LEAST_GAIN:
                return self._page(plain, best, ratio)
            left.remove(best)  # it was luck; the next one may be none
        return self._page(plain, plain, 1.0)

    def _openings(self) -> Openings:
        if self._job.precision == "auto":
            return Openings(precisions=("fp32", "bf16"))
        return Openings(precisions=(self._job.precision,))

    def _openings_of(self, base: FormTrial) -> Openings:
        job, replica = self._job, base.training.replica
        is_alone = self._device != "cpu" and job.cluster.places == job.num_slots == 1
        return replace(
            self._openings(),
            has_images=has_images(replica.module),
            can_multiply=self._device == "cpu" and can_multiply_by_onednn(replica.module),
            can_use_patches=self._device == "cpu" and can_use_patches(replica.module),
            has_vocabulary=find_vocabulary_layer(replica) is not None,
            can_capture=is_alone and job.offload == "none",
            can_update_flat=is_alone
            and job.offload == "none"
            and not why_not_flat(replica.optimizer)
            and replica.task.accumulate == 1,
        )

    def _try(self, way: StepWay, plain: Tried) -> None:
        trial = None
        try:
            trial = FormTrial(self._task, way, self._device, self._start)
            lap = trial.begin(limit_s=plain.step_s)
            if lap is None:
                found = Tried(way=way, why_not="much slower")
            elif not agree(lap.losses, self._losses, bound_for(way, self._device)):
                found = Tried(
                    way=way, why_not=f"its losses differ ({lap.losses[0]:.6g}, not {self._losses[0]:.6g})"
                )
            else:
                found = Tried(way=way, step_s=trial.measure(), first_s=lap.first_s)
        except Diverged:
            found = Tried(way=way, why_not="its losses are no numbers")
        except (ShoalError, RuntimeError, torch.OutOfMemoryError) as error:
            found = Tried(way=way, why_not=f"it failed ({str(error).strip().splitlines()[0][:120]})")
        finally:
            if trial is not None:
                trial.close()
            del trial
            gc.collect()
            if self._device != "cpu":
                torch.cuda.empty_cache()
        self._tried.append(found)

    def _beside(self, base: FormTrial, best: Tried) -> float:
        """How many times as fast it is, measured in turns."""
        trial = FormTrial(self._task, best.way, self._device, self._start)
        try:
            trial.begin()
            ratios = sorted(base.measure(0.5) / trial.measure(0.5) for _ in range(_ROUNDS))
            return ratios[_ROUNDS // 2]
        finally:
            trial.close()

    def _page(self, plain: Tried, best: Tried, ratio: float) -> dict[str, Any]:
        others = [one for one in self._tried if one not in (plain, best)]
        told = [f"{one.way}: {one.why_not or f'{plain.step_s / one.step_s:.2f}'}" for one in others]
        if best is plain:
            text = f"fast: plain steps are the fastest ({plain.step_s * 1e3:.3g} ms)"
        else:
            text = f"fast: {best.way}, {ratio:.2f} times plain ({plain.step_s * 1e3:.3g} ms a step)"
        text = "; ".join([text, *["beside it " + ", ".join(told)] * bool(told), *self._notes])
        return {
            "form": asdict(best.way.form),
            "precision": best.way.precision,
            "ratio": ratio,
            "text": text,
            "tried": [{"way": str(one.way), "step_s": one.step_s, "why_not": one.why_not} for one in self._tried],
        }
