"""A job's plan, as `shoal train --explain` tells it. No torch: the model was built elsewhere and measured."""

from shoal.cli.plan.making import make_plan
from shoal.cli.plan.parts import Plan

__all__ = ["Plan", "make_plan"]
