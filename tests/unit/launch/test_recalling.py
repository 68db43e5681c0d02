"""A machine that is told what another was told stands where that one stood, whatever had happened."""

from __future__ import annotations

import random
import stat
from pathlib import Path
from typing import Any

import pytest

from helpers.run_sim.folder import SimFolder
from helpers.run_sim.run import Plan, SimRun
from shoal.errors import LaunchError
from shoal.launch.journal import Journal, JournalEntry, is_noise, read_journal
from shoal.launch.machine import SupervisorMachine
from shoal.launch.messages import Emit, Ended, HostLost, Load, Said, Sight, StacksTaken
from shoal.launch.recalling import recall
from shoal.observe.happenings import Warned


def told_of(job: Any) -> dict[str, Any]:
    return {"job": job.to_json()}


@pytest.mark.parametrize("kind", ["faults", "storm", "spread"])
def test_simulated_runs_are_recalled(kind: str, tmp_path: Path) -> None:
    """Everything that was asked of hosts and told to watchers is asked and told again, in the same order."""
    for seed in range({"faults": 40, "storm": 3, "spread": 20}[kind]):
        draw = {"faults": lambda seed: Plan.draw(seed, 6), "storm": Plan.draw_storm, "spread": Plan.draw_spread}
        plan, dice = draw[kind](seed), random.Random(f"{seed} in detail")
        path = tmp_path / f"{seed}"
        journal = Journal.create(path, told_of(plan.job), is_exact=plan.job.cluster.is_elastic)
        run = SimRun(plan, f"{kind} {seed}", dice, SimFolder(dice), journal=journal)
        asked, ask = list(run.machine.outputs), run.machine.ask
        run.machine.ask = lambda output, asked=asked, ask=ask: (asked.append(output), ask(output))  # type: ignore
        run.go()
        past = read_journal(path)
        assert past is not None and past.job == plan.job
        known = recall(machine := SupervisorMachine(plan.job, 0.0), past.entries)
        again = [output for those in known.asked.values() for output in those]
        before = [output for output in asked if type(output).__name__ in ("StartProcess", "Say", "Signal")]
        assert sorted(map(repr, again)) == sorted(map(repr, before)), f"{kind} {seed}"
        told = [one for one in asked if isinstance(one, Emit) and not is_noise(one.what)]
        assert [one.what.kind_name for one in told] == [
            one.what.kind_name for one in known.left if isinstance(one, Emit)
        ], f"{kind} {seed}"
        assert (machine.over is None) == (run.machine.over is None), f"{kind} {seed}"
        path.unlink()


def test_a_journal_holds_what_was_told_and_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path, {"key": "k"}, is_exact=False)
    news = [
        Said(0, Warned(text="a")),
        Ended(process=3, exit_code=-9, last_output="é"),
        StacksTaken({1: Sight(stacks="a")}, "b"),
        HostLost(1, "c"),
        Load(idle_cores=0.5, waiting=1.0),
    ]
    for number, one in enumerate(news):
        journal.write(
            JournalEntry(what="take", now=float(number), value=one, host=0, count=number, top_step=number)
        )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = read_journal(path)
    assert whole is not None and [entry.value for entry in whole.entries] == news
    with path.open("ab") as file:
        file.write(b"\x85\xa4what")  # The supervisor was killed in the midst of a word.
    torn = read_journal(path)
    assert torn is not None and torn.entries == whole.entries and torn.end == whole.end
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="can be read or written by others"):
        read_journal(path)
    journal.close()
    assert read_journal(path) is None
