"""What can be imported is what was promised: neither more nor less."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
PROMISED = [
    "Average",
    "Callback",
    "CallbackContext",
    "Cluster",
    "Data",
    "Evaluation",
    "Job",
    "Layer",
    "LiveRun",
    "Mesh",
    "ParameterServer",
    "Pipeline",
    "Plateau",
    "Privacy",
    "Run",
    "Sharded",
    "ShoalError",
    "StepForm",
    "Stratified",
    "Task",
    "TensorParallel",
    "Trainer",
    "Weighted",
    "World",
    "__version__",
    "datasets",
    "evaluate",
    "gather",
    "linear_cross_entropy",
    "metrics",
    "optim",
    "predict",
    "predictions",
    "ps",
    "resume",
    "scale",
    "start",
    "train",
    "verify",
]
PACKAGES = [
    "spec",
    "observe",
    "arena",
    "ledger",
    "ps",
    "checkpoint",
    "strategies",
    "bench",
    "keras",
    "verification",
    "horovod.keras",
    "horovod.torch",
    "horovod.torch.elastic",
    "sklearn",
    "kv",
    "federated",
]


def test_the_front_door():
    assert sorted(shoal.__all__) == sorted(PROMISED) == dir(shoal)
    for name in PROMISED:
        assert getattr(shoal, name) is not None
    with pytest.raises(AttributeError, match="trian"):
        _ = shoal.trian


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_have_what_they_list(package):
    module = importlib.import_module(f"shoal.{package}")
    assert len(module.__all__) == len(set(module.__all__)) > 0
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize("module", ["shoal", "shoal.launch.runs", "shoal.launch.saved", "shoal.cli.app"])
def test_importing_does_not_import_torch(module):
    code = f"import {module}, sys; print([name for name in ('torch', 'numpy', 'zmq') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_class_name_exists_once() -> None:
    """A noun has one meaning: whoever reads it need not ask which."""
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert len(homes) > 500
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
