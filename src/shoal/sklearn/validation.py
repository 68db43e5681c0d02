"""Folds and candidates, spread over processes."""

from __future__ import annotations

from typing import Any

from joblib import parallel_config
from sklearn import model_selection

from shoal.sklearn.backend import NAME, register


def cross_validate(
    estimator: Any, X: Any, y: Any = None, *, workers: int = 2, on: str = "local", **options: Any
) -> dict[str, Any]:
    """As scikit-learn's, with folds spread over so many processes; that of one that dies is done by another. `on`:
    where they are, as for `shoal train`."""
    register()
    with parallel_config(NAME, n_jobs=workers, on=on):
        found = model_selection.cross_validate(estimator, X, y, **{"n_jobs": workers, **options})
    return dict(found)


def grid_search(
    estimator: Any, grid: Any, X: Any, y: Any = None, *, workers: int = 2, on: str = "local", **options: Any
) -> model_selection.GridSearchCV:
    """A fitted `GridSearchCV`, whose candidates and folds were spread over so many processes, on any hosts."""
    register()
    with parallel_config(NAME, n_jobs=workers, on=on):
        return model_selection.GridSearchCV(estimator, grid, **{"n_jobs": workers, **options}).fit(X, y)
