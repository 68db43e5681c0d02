"""A grid search over 8 candidates and 3 folds on two workers, beside scikit-learn's own in one process.

`python -m benchmarks.grid_search`: the same estimator, data and candidates, and the same scores. Both take turns,
and each process has one thread. What starting the workers takes is in it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV

from shoal.sklearn import ShoalClassifier, grid_search

WORKERS, FOLDS, LEAST_SPEEDUP = 2, 3, 1.7
GRID = {"lr": [0.003, 0.01, 0.03, 0.1], "batch_size": [32, 64]}


def measure(search: Callable[[ShoalClassifier, Any, Any], Any], samples: int, epochs: int) -> tuple[float, Any]:
    """How long a search takes, and the scores of all candidates."""
    inputs, target = make_classification(samples, 20, n_informative=8, n_classes=3, random_state=0)
    model = ShoalClassifier(hidden_layer_sizes=(64, 64), epochs=epochs, random_state=0)
    began = time.perf_counter()
    found = search(model, inputs.astype(np.float32), target)
    return time.perf_counter() - began, found.cv_results_["mean_test_score"]


def main(
    rounds: Annotated[int, typer.Option(help="Measure both so often, in turn.")] = 3,
    samples: Annotated[int, typer.Option(help="Of the data set.")] = 6000,
    epochs: Annotated[int, typer.Option(help="Of each fit.")] = 40,
) -> None:
    """Measure, and hold the ratio against its bar."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    searches: dict[str, Callable[[ShoalClassifier, Any, Any], Any]] = {
        "one process": lambda model, inputs, target: GridSearchCV(model, GRID, cv=FOLDS).fit(inputs, target),
        f"{WORKERS} workers": lambda model, inputs, target: grid_search(
            model, GRID, inputs, target, cv=FOLDS, workers=WORKERS
        ),
    }
    ratios = []
    for _ in range(rounds):
        (alone_s, expected), (spread_s, scores) = (measure(one, samples, epochs) for one in searches.values())
        if not np.array_equal(expected, scores):
            raise SystemExit(f"The scores differ: {expected} and {scores}")
        ratios.append(alone_s / spread_s)
        print(f"one process {alone_s:.1f} s, {WORKERS} workers {spread_s:.1f} s: {ratios[-1]:.2f} times")
    print(f"median {median(ratios):.2f} times (bar {LEAST_SPEEDUP})")
    if median(ratios) < LEAST_SPEEDUP:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
