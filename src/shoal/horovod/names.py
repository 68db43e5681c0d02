"""Answers to `horovod` in scripts that are not to be changed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_HOME = "shoal.horovod"
_ELSEWHERE = {
    "tensorflow": "a Keras model trains with `import keras` (3, on torch) and `import horovod.keras as hvd`; "
    "write others for torch, or keep TensorFlow's own tf.distribute",
    "mxnet": "MXNet is no longer maintained: write the model for torch",
    "spark": "start the script with `shoal run`, or train a task on Spark with shoal's engines",
    "ray": "start the script with `shoal run`, or train a task on Ray with shoal's engines",
    "data": "use a DataLoader",
}


class _SameModule(Loader):
    """Gives a module that is there already another name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import has just replaced


class HorovodNames(MetaPathFinder):
    """Finds `horovod.torch`, `horovod.keras` and their kin here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of `horovod` and what is in it; the rest is for others."""
        root, _, rest = fullname.partition(".")
        if root != "horovod":
            return None
        if (first := rest.partition(".")[0]) in _ELSEWHERE:
            raise ImportError(
                f"{fullname} is not there: Shoal has Horovod's interface for torch, and for Keras on torch; "
                f"{_ELSEWHERE[first]}."
            )
        ours = f"{_HOME}.{rest}" if rest else _HOME
        if importlib.util.find_spec(ours) is None:
            return None
        module = importlib.import_module(ours)
        return ModuleSpec(fullname, _SameModule(module), is_package=hasattr(module, "__path__"))


def prepare() -> None:
    """From now on, this process finds Horovod here, whether another one is installed or not."""
    # A script may import keras before it imports horovod.keras, which needs it on torch.
    os.environ.setdefault("KERAS_BACKEND", "torch")
    if not any(isinstance(finder, HorovodNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodNames())
