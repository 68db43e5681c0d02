"""A script that calls Shoal at its top is imported by the workers of its own run."""

from __future__ import annotations

import os

import pytest

from helpers.commands import SMALL_TASK
from helpers.scripts import run_as_main

GUARDED = """
if __name__ == "__main__":
    shoal.train(__file__)
"""


@pytest.mark.parametrize(
    ("verb", "calls"),
    [
        ("train", "shoal.train(__file__, workers=2)"),
        ("train", "shoal.train(__file__, workers=2, strategy='ps:servers=1')"),
        ("evaluate", f"{GUARDED}\nshoal.evaluate('mine')"),
    ],
)
def test_a_call_without_the_guard_is_refused_in_the_worker(zygote, tmp_path, verb, calls):
    script = tmp_path / "script.py"
    script.write_text(f"{SMALL_TASK.read_text()}\n\n{calls}\n")
    answer = run_as_main(script, folder=tmp_path, zygote=zygote)
    assert answer.returncode == 1
    last = answer.stderr.strip().splitlines()[-1]
    assert f"shoal.{verb} was called in " in last and 'put the call under `if __name__ == "__main__":`' in last
    assert len(os.listdir(tmp_path / "runs")) == 1
