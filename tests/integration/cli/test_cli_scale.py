"""`shoal scale` where there is nothing to scale. (Where there is: tests of the launcher.)"""

from __future__ import annotations


def test_a_run_that_has_ended(shoal, trained):
    answer = shoal("scale", str(trained), "--workers", "4")
    sentence = "error: Run 'done' is not running; only a run that is going on can be scaled.\n"
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", sentence)


def test_a_run_that_nobody_knows(shoal, trained):
    answer = shoal("scale", "dnoe", "--runs", str(trained.parent))
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: Run 'dnoe' is not a run's path") and "there are: done" in answer.stderr


def test_nobody_is_not_a_number_of_workers(shoal):
    answer = shoal("scale", "any", "--workers", "0")
    assert answer.returncode == 2 and "Usage" in answer.stderr
