"""Shoal as scikit-learn knows estimators: fit, predict, pipelines, searches.

networks      which module, loss and data an estimator has, as a task
estimators    `ShoalClassifier` and `ShoalRegressor`
calls         calls for processes; those of one that died are done by another
staff         these processes, on this host or on others
call_lines    how calls travel
backend       joblib's way to use them: `parallel_backend("shoal")`
validation    `cross_validate` and `grid_search`, spread over such processes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.sklearn.backend import register
    from shoal.sklearn.estimators import ShoalClassifier, ShoalRegressor
    from shoal.sklearn.validation import cross_validate, grid_search

__all__ = ["ShoalClassifier", "ShoalRegressor", "cross_validate", "grid_search", "register"]

__getattr__ = found_in(
    __name__,
    {
        "ShoalClassifier": "estimators",
        "ShoalRegressor": "estimators",
        "cross_validate": "validation",
        "grid_search": "validation",
        "register": "backend",
    },
)
