"""Scripts written for Horovod, unchanged: in a world, and in worlds that change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.commands import environment
from shoal.horovod.run import main
from shoal.launch.owner import ZygoteProcess

GUARD_S = 240.0
ROOT = Path(__file__).parents[3]
KERAS = ROOT / "tests" / "integration" / "horovod_keras_script.py"
ELASTIC_KERAS = ROOT / "tests" / "integration" / "elastic_horovod_keras_script.py"
ELASTIC = ROOT / "tests" / "integration" / "elastic_horovod_script.py"


def horovodrun(zygote: ZygoteProcess, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal.horovod.run", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(zygote), capture_output=True, text=True, timeout=GUARD_S
    )


def test_the_example_learns_whatever_it_is_given(shoal):
    script = str(ROOT / "examples" / "horovod_digits.py")
    answer = shoal("run", "--horovod", "-n", "2", script, "--epochs", "2", "--gradient-predivide-factor", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    last = [line for line in answer.stdout.splitlines() if "Accuracy" in line][-1]
    assert last.startswith("[0] Test set") and float(last.split()[-1]) > 0.85


def test_a_script_that_calls_fit_trains_as_one_process(shoal, tmp_path):
    answer = shoal("run", "--horovod", "-n", "2", str(KERAS), str(tmp_path))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert sorted(answer.stdout.splitlines()) == ["[0] as one process", "[1] as one process"]


@pytest.mark.long
@pytest.mark.parametrize("option", ["--use-adasum", "--fp16-allreduce"])
def test_the_example_learns_on_four(shoal, option):
    answer = shoal("run", "--horovod", "-n", "4", str(ROOT / "examples" / "horovod_digits.py"), option)
    last = [line for line in answer.stdout.splitlines() if "Accuracy" in line][-1]
    assert float(last.split()[-1]) > 0.9


def test_every_name_of_horovod_is_ours(shoal, tmp_path):
    (tmp_path / "names.py").write_text(
        "import horovod, horovod.torch as hvd, horovod.torch.elastic, shoal.horovod.torch\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "from horovod.torch.mpi_ops import allreduce\n"
        "assert hvd is shoal.horovod.torch and HorovodInternalError is hvd.HorovodInternalError\n"
        "assert hvd.__spec__.name == 'shoal.horovod.torch' and allreduce is hvd.allreduce\n"
        "try:\n    import horovod.tensorflow.keras\nexcept ImportError as error:\n    print(error)\n"
    )
    answer = shoal("run", "--horovod", "names.py")
    assert "horovod.tensorflow is not there" in answer.stdout, answer.stderr
    assert "a Keras model trains with `import keras` (3, on torch) and `import horovod.keras" in answer.stdout
    without = shoal("run", "names.py")
    assert without.returncode == 1 and "No module named 'horovod'" in without.stdout + without.stderr


def test_horovodruns_flags(zygote, tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "print(hvd.rank(), int(hvd.allreduce(torch.tensor(1), op=hvd.Sum, name='n')), *sys.argv[1:])\n"
    )
    flags = [
        "-np",
        "2",
        "-H",
        "localhost:4",
        "--gloo",
        "--fusion-threshold-mb",
        "32",
        "--timeline-filename",
        "t.json",
    ]
    answer = horovodrun(zygote, tmp_path, *flags, "python", "-u", "train.py", "--lr", "0.1")
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == ["[0] 0 2 --lr 0.1", "[1] 1 2 --lr 0.1"]
    assert "NEGOTIATE_ALLREDUCE" in (tmp_path / "t.json").read_text()


def test_horovodruns_flags_that_cannot_be(capsys):
    assert main(["-np", "2", "-H", "far:two", "python", "x.py"]) == 2
    assert "name:SLOTS" in capsys.readouterr().err
    assert main(["-np", "2", "--min-np", "1", "-H", "far:2", "python", "x.py"]) == 2
    assert "Elastic scripts run on one host" in capsys.readouterr().err
    assert main(["-np", "8", "-H", "localhost:4", "python", "x.py"]) == 2
    assert "more than the 4 slots" in capsys.readouterr().err
    assert main(["-np", "2"]) == 2
    assert "Say what to run" in capsys.readouterr().err
    assert main(["--check-build"]) == 0


def test_limits_are_for_elastic_scripts(shoal, tmp_path):
    (tmp_path / "x.py").touch()
    for words, sentence in [(("-n", "1:2"), "which need --horovod"), (("-n", "two"), "LEAST:MOST")]:
        answer = shoal("run", *words, "x.py")
        assert answer.returncode == 2 and sentence in answer.stderr


def test_an_elastic_script_survives_a_kill_with_every_sample_once(shoal, tmp_path):
    answer = shoal("run", "--horovod", "-n", "2:2", str(ELASTIC), "1", str(tmp_path))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [line[4:] for line in answer.stdout.splitlines()] == ["once sizes 2"] * 2
    assert (tmp_path / "killed-0").exists() and "SIGKILL" in answer.stderr


@pytest.mark.parametrize("kills", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_an_elastic_script_that_calls_fit_makes_every_step_once(shoal, tmp_path, kills):
    answer = shoal("run", "--horovod", "-n", "2:2", str(ELASTIC_KERAS), str(tmp_path), kills)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [line[4:] for line in answer.stdout.splitlines()] == ["steps 24 updates 12 sizes 2"] * 2
    assert (tmp_path / "killed").exists() is (kills == "1")


@pytest.mark.long
def test_an_elastic_script_survives_five_kills_and_one_that_joins(zygote, tmp_path):
    hosts = tmp_path / "hosts.sh"
    hosts.write_text(f"#!/bin/sh\nif [ -e {tmp_path}/room ]; then echo localhost:3; else echo localhost:2; fi\n")
    hosts.chmod(0o755)
    flags = ["-np", "2", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(hosts)]
    answer = horovodrun(zygote, tmp_path, *flags, "python", str(ELASTIC), "5", str(tmp_path), "200")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [line[4:] for line in answer.stdout.splitlines()] == ["once sizes 2 3"] * 3
    assert len(list(tmp_path.glob("killed-*"))) == 5


def test_a_script_that_fails_ends_an_elastic_run_with_its_status(shoal, tmp_path):
    (tmp_path / "x.py").write_text(
        "import signal, horovod.torch as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1:\n    raise SystemExit(7)\n"
        "signal.pause()\n"  # it is ended with the other
    )
    answer = shoal("run", "--horovod", "-n", "1:2", "x.py")
    assert answer.returncode == 7 and "Worker 1 failed with exit status 7" in answer.stderr
