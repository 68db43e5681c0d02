"""Names of what a loss is told with: where the model is cut, not everybody computes the loss."""

from __future__ import annotations

from shoal.comm.group import Group
from shoal.model.loss_parts import LossParts
from shoal.strategies.groups.plain import share_plain


def learn_names(parts: LossParts, group: Group) -> None:
    """Let all know the names that some have found. All call this after each step in which somebody has any; the
    first time they speak."""
    if not parts.are_common:
        told = share_plain(list(parts.names), group)
        parts.learn(next(names for names in told if names))
