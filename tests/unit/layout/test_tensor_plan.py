"""Plans by width as plain data: how they are told, given up step by step, and written by hand."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.layout.tensor_plan import LayerCut, Region, TensorPlan, Way, Wishes

UP, NORM, DOWN = (
    LayerCut(layer="blocks.0.up", way=Way.COLUMN, blocks=(4, 4)),
    LayerCut(layer="blocks.0.norm", way=Way.CHANNELS),
    LayerCut(layer="blocks.0.down", way=Way.ROW),
)
BLOCK = Region(block="blocks.0", cuts=(UP, NORM, DOWN), divided=(("blocks.0", "heads"),))
PLAN = TensorPlan(
    count=2,
    regions=(BLOCK, Region(block="blocks.1", cuts=BLOCK.cuts, divided=BLOCK.divided)),
    singles=(
        LayerCut(layer="tokens", way=Way.VOCABULARY, alone=True),
        LayerCut(layer="side", way=Way.ROW, alone=True),
    ),
    whole={"last": "LayerNorm is not cut"},
)


def test_equal_blocks_are_told_in_one_line() -> None:
    region = Region(
        block="blocks.1",
        cuts=(LayerCut(layer="blocks.1.up", way=Way.COLUMN), LayerCut(layer="blocks.1.down", way=Way.ROW)),
    )
    plan = TensorPlan(count=4, regions=(region,))
    assert plan.lines() == ["blocks.1: cut together: up by column, down by row"]
    first, *rest = PLAN.lines()
    assert first.startswith("blocks.0: cut together: up by column, norm by channels, down by row, heads")
    assert "tokens: cut by vocabulary" in rest
    assert "side: cut by row, input cut and output summed" in rest
    assert rest[-1] == "last: whole: LayerNorm is not cut"


def test_layers_of_a_region_apart_are_cut_each_for_itself() -> None:
    assert BLOCK.apart() == (
        LayerCut(layer="blocks.0.up", way=Way.COLUMN, alone=True),
        LayerCut(layer="blocks.0.down", way=Way.ROW, alone=True),
    )


def test_retreats_cut_less_each_time_and_say_what_was_given_up() -> None:
    plans = list(PLAN.retreats())
    assert [[cut.layer for cut in plan.singles] for plan in plans] == [["side"], [], []]
    assert [len(plan.regions) for plan in plans] == [2, 2, 0]
    assert set(plans[0].whole) == {"last", "tokens"}
    assert set(plans[-1].whole) == {"last", *PLAN.cut_layers}
    assert not plans[-1].cut_layers


def test_wishes() -> None:
    assert Wishes.parse("auto") is None
    wishes = Wishes.parse("blocks.*.up=column; blocks.*.down=row;*=whole")
    assert wishes is not None
    assert [wishes.of(name) for name in ("blocks.3.up", "blocks.0.down", "head")] == ["column", "row", "whole"]
    wishes.check(["blocks.0.up", "blocks.0.down", "head"])
    with pytest.raises(SpecError, match=r"blocks\.\*\.up=column matches nothing in the model; it has: down, head"):
        wishes.check(["down", "head"])
