"""What Flower is given to do is what our clients do; the rest needs Flower itself."""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import environment, federated, flower_peer
from benchmarks.environment import FLOWER
from benchmarks.federated import EVERY, WORKERS, Case, Course
from shoal.errors import LaunchError, SpecError


def test_each_place_of_a_round_has_batches_of_one_client(tmp_path):
    case = Case(clients=10, per_round=8, rounds=3, alpha=0.3)
    federated.write_course(case, tmp_path / "course.npz")
    with np.load(tmp_path / "course.npz") as file:
        samples, settings, targets = file["samples"], json.loads(str(file["settings"])), file["targets"]
        assert file["initial 0.weight"].shape == (settings["width"], 64)
    assert samples.shape == (3, 8, EVERY, 64 // WORKERS) and samples.max() < len(targets)
    for found in samples:
        owned = [set(place.ravel()) for place in found]
        assert sum(map(len, owned)) == len(set().union(*owned)), "no sample is two clients'"


def test_the_first_round_is_not_counted():
    course = Course.of("x", [10.0, 10.5, 11.0, 11.5], [0.1, 0.5, 0.6, 0.7], {})
    assert course.rounds_per_s == 2.0 and course.accuracy == pytest.approx(0.475)


@pytest.mark.parametrize(
    ("script", "needed"), [("flower_peer", {"flwr"}), ("flower_app", {"flwr", "numpy", "torch"})]
)
def test_it_imports_nothing_that_its_interpreter_lacks(script, needed):
    modules = set()
    tree = ast.parse(Path(flower_peer.__file__).with_name(f"{script}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
    assert modules - set(sys.stdlib_module_names) == needed | {"benchmarks"}


def test_without_its_environment_it_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(FLOWER.variable, raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    with pytest.raises(LaunchError, match=r"python -m benchmarks\.environment flower"):
        FLOWER.require_python()
    with pytest.raises(SpecError, match="no peer 'petal'; there are tensorflow, flower"):
        environment.main(["petal"])
    assert federated.main([]) == 1
    assert "benchmarks.environment flower" in capsys.readouterr().err
