"""What shards tell each other before they close a round together, and the entry that closes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.ps.between_servers import RoundPart, Settle
from shoal.ps.messages import NOBODY, Push
from shoal.ps.shard import Shard, sum_by_position


def own_part(shard: Shard, number: int) -> RoundPart:
    """The part that this shard, of this number, has in closing its complete round."""
    pushes: Sequence[Push] = shard.in_order()
    if not shard.rules.adds_up:
        pushes = shard.usable(pushes)
    frames = shard.values.own_part(pushes, scale=shard.scale_of(pushes) if pushes else 0.0)
    facts = _sum_of_facts(_facts_of(push) for push in pushes) if shard.rules.adds_up else {}
    return RoundPart(shard=NOBODY, origin=number, round=shard.next_round, facts=facts, frames=frames)


def fits(shard: Shard, part: RoundPart) -> bool:
    """Whether another shard can have told this."""
    match part.facts:
        case {
            "cells": list(),
            "weight": int() | float(),
            "loss": int() | float(),
            "scaled": bool(),
            "found": list(),
            "loss_parts": list(),
        }:
            is_complete = True
        case _:
            is_complete = not shard.rules.adds_up
    return is_complete and shard.values.fits_part(part.origin, part.frames)


def due_now(early: dict[int, RoundPart], shard: Shard) -> dict[int, RoundPart]:
    """Takes those out that are of the round to be closed next."""
    due = {origin: part for origin, part in early.items() if part.round == shard.next_round}
    for origin in due:
        del early[origin]
    return due


def add_up(shard: Shard, parts: Sequence[RoundPart]) -> RoundPart:
    """What several whole copies gathered, as one; it is told under the last one's name."""
    return RoundPart(
        shard=NOBODY,
        origin=parts[-1].origin,
        round=shard.next_round,
        facts=_sum_of_facts(part.facts for part in parts),
        frames=shard.values.add_parts([part.frames for part in parts]),
    )


def settle_with_factor(shard: Shard, number: int, parts: Mapping[int, RoundPart]) -> Settle:
    """The entry that closes a round from the parts of all shards; each updates with what it has itself."""
    factor = shard.values.factor({origin: part.frames for origin, part in parts.items()}, scale=1.0)
    return _entry(shard, number, factor, parts[number], None)


def settle_with_sum(shard: Shard, number: int, total: RoundPart, *, kept: RoundPart) -> Settle:
    """The entry that closes a round with what all copies have gathered; `kept` is what others may ask for."""
    weight = 1.0 if total.facts["scaled"] or not total.facts["weight"] else total.facts["weight"]
    scale = shard.open_round[0].scale * (1.0 / weight)
    factor = shard.values.factor({total.origin: total.frames}, scale=scale)
    return _entry(shard, number, factor, kept, total)


def last_told(shard: Shard, origin: int, number: int) -> RoundPart | None:
    """What this shard can tell again of a round that it has closed, if that was the last."""
    last = shard.closed
    if last is None or last.round != number:
        return None
    return RoundPart(shard=NOBODY, origin=origin, round=number, facts=last.facts, frames=last.frames)


def _entry(shard: Shard, number: int, factor: float, kept: RoundPart, total: RoundPart | None) -> Settle:
    return Settle(
        shard=number,
        round=shard.next_round,
        factor=factor,
        facts=kept.facts,
        kept_frames=len(kept.frames),
        total={} if total is None else total.facts,
        frames=kept.frames if total is None else (*kept.frames, *total.frames),
    )


def _facts_of(push: Push) -> dict[str, Any]:
    return {name: getattr(push, name) for name in ("cells", "weight", "loss", "scaled", "found", "loss_parts")}


def _sum_of_facts(all_facts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    listed = list(all_facts)
    return {
        "cells": [cell for facts in listed for cell in facts["cells"]],
        "weight": sum(facts["weight"] for facts in listed),
        "loss": sum(facts["loss"] for facts in listed),
        "scaled": all(facts["scaled"] for facts in listed),
        "found": sum_by_position(facts["found"] for facts in listed),
        "loss_parts": sum_by_position(facts["loss_parts"] for facts in listed if facts["weight"]),
    }
