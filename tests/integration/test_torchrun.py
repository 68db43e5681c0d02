"""`shoal.Trainer` in processes that torchrun has started: all that `shoal run` starts elsewhere, in one go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_trainer
import test_trainer_strategies
from test_trainer_strategies import OTHERS, SAME

GUARD_S = 240
SERVED = "ps:servers=2"
"""Nobody starts servers here: the first process serves."""
BOTH = """
import runpy, sys

steps, fits, *strategies = sys.argv[1:]
for folder, words in ((steps, []), (fits, strategies)):
    sys.argv[1:] = [folder, *words]
    runpy.run_path(f"{folder}/script.py")
"""


def test_two_processes_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "both.py").write_text(BOTH)
    steps, fits = tmp_path / "steps", tmp_path / "fits"
    for folder, script in ((steps, test_trainer.SCRIPT), (fits, test_trainer_strategies.SCRIPT)):
        folder.mkdir()
        (folder / "script.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "both.py"), str(steps), str(fits), *SAME, *OTHERS, SERVED],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    test_trainer.check_answers(steps)
    test_trainer_strategies.check_answers(fits, SERVED)
