"""A task that a script has made is trained by processes that make it again."""

from __future__ import annotations

from helpers.commands import SMALL_TASK
from helpers.scripts import run_as_main

TRAINS = """
made = task(width=4)

if __name__ == "__main__":
    print(shoal.train(made, workers=2, max_steps=3).results["steps"])
"""


def test_a_task_at_the_top_of_a_script(zygote, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{SMALL_TASK.read_text()}\n{TRAINS}")
    answer = run_as_main(script, folder=tmp_path, zygote=zygote)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == "3"
