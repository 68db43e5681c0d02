"""Keras as Shoal uses it: version 3, on torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from shoal.errors import TaskError


def load_keras() -> Any:
    """The library, on torch; a sentence where it is missing or computes with another."""
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise TaskError(
                f"Keras computes with another library than torch here, which is not installed ({error.name}); set "
                "KERAS_BACKEND=torch before keras is imported, or write `import shoal.keras` above `import keras`."
            ) from None
        raise TaskError("Keras is not installed; use `pip install 'shoal[keras]'`.") from None
    if keras.backend.backend() != "torch":
        raise TaskError(
            f"Keras computes with {keras.backend.backend()} here, but Shoal needs torch; set KERAS_BACKEND=torch "
            "before keras is imported, or write `import shoal.keras` above `import keras`."
        )
    return keras


@contextmanager
def as_if_first(seed: int) -> Iterator[None]:
    """Build as in a new process that has this seed: Keras counts the layers' names, and draws seeds that nobody
    gives with Python's own random numbers."""
    from keras.src.backend.common import global_state

    kept = {
        name: global_state.get_global_attribute(name) for name in ("object_name_uids", "global_seed_generator")
    }
    state = random.getstate()
    for name in kept:
        global_state.set_global_attribute(name, None)
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        for name, value in kept.items():
            global_state.set_global_attribute(name, value)


@contextmanager
def in_numbers(kind: str | None) -> Iterator[None]:
    """Build with these floating-point numbers, `float64`; None: with those that the user has set."""
    keras = load_keras()
    if kind is None:
        yield
        return
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(kind)
    keras.config.set_dtype_policy(kind)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextmanager
def computing(device: str, dtype: Any) -> Iterator[None]:
    """Let Keras make the constants of a computation where it is, and as wide as float64 where that is."""
    import torch

    with load_keras().device(device), wide() if dtype == torch.float64 else nullcontext():
        yield


@contextmanager
def wide() -> Iterator[None]:
    """Let Keras compute in float64. Where it decides on a result's type, as for every product of matrices, it
    makes float32 of that on torch, whatever its `floatx` says."""
    from keras.src.backend.common.dtypes import BIT64_TO_BIT32_DTYPE as narrowed

    keras = load_keras()
    floatx, before = keras.config.floatx(), narrowed["float64"]
    keras.config.set_floatx("float64")
    narrowed["float64"] = "float64"
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        narrowed["float64"] = before


def seed_global(value: int) -> None:
    """Set the generator that Keras draws from where a layer has none of its own."""
    from keras.src.random import seed_generator

    set_seed(seed_generator.global_seed_generator(), value)


def set_seed(generator: Any, value: int) -> None:
    """What a generator draws from now on follows from this."""
    import torch

    with torch.no_grad():
        state = generator.state._value
        state.copy_(torch.tensor([value, 0], dtype=state.dtype))
