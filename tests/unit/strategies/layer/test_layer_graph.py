"""Which layer goes where, what hangs together, and where a model can be cut: pure decisions."""

import pytest

from shoal.errors import SpecError
from shoal.strategies.layer.graph import GraphNode, chains, divide, groups_by_depth
from shoal.strategies.layer.placement import assign, check_homes, home_of, spread
from shoal.strategies.layer.program import cut_into_segments


def layer(name, *inputs, size=10):
    return GraphNode(name=name, inputs=inputs, module=name, size=size, has_weights=True)


def norm(name, *inputs):
    return GraphNode(name=name, inputs=inputs, module=name, size=8)


def function(name, *inputs):
    return GraphNode(name=name, inputs=inputs)


DIAMOND = (
    layer("stem"),
    function("relu", "stem"),
    layer("left", "relu", size=30),
    layer("right", "relu", size=20),
    function("tanh", "right"),
    function("cat", "left", "tanh"),
    layer("head", "cat"),
    function("output", "head"),
)
LINE = (
    layer("first", size=40),
    function("relu", "first"),
    layer("second", "relu"),
    layer("third", "second"),
    function("output", "third"),
)


def names(groups):
    return [[node.name for node in group] for group in groups]


def test_chains_end_at_forks_and_begin_at_joins():
    assert names(chains(DIAMOND)) == [["stem", "relu"], ["left"], ["right", "tanh"], ["cat", "head", "output"]]
    assert names(chains(LINE)) == [["first", "relu", "second", "third", "output"]]


def test_what_is_read_twice_by_one_step_is_one_line():
    assert names(chains((layer("a"), function("square", "a", "a")))) == [["a", "square"]]


def test_functions_follow_their_input_and_joins_the_next_placed_layer():
    assert assign(DIAMOND, {"left": 0, "right": 1, "head": 1}) == {
        "stem": 0,  # depends on nothing: with the first placed layer that reads it
        "relu": 0,
        "left": 0,
        "right": 1,
        "tanh": 1,
        "cat": 1,
        "head": 1,
        "output": 1,
    }


def test_a_join_that_no_placed_layer_follows_stays_with_its_first_input():
    assert assign(DIAMOND, {"stem": 2, "left": 0, "right": 1})["cat"] == 0


def test_a_layer_that_is_called_again_is_where_it_was():
    nodes = (layer("a"), layer("b"), GraphNode(name="a_1", inputs=("b",), module="a"), function("out", "a_1"))
    assert assign(nodes, {"a": 1, "b": 0}) == {"a": 1, "b": 0, "a_1": 1, "out": 1}


def test_parts_are_where_the_module_is_that_they_belong_to():
    homes = {"blocks": 1, "blocks.0": 0}
    assert [home_of(name, homes) for name in ("blocks.0.norm", "blocks.1", "blocksmith", "")] == [0, 1, None, None]


def test_branches_are_spread_over_workers_by_size():
    homes = spread(DIAMOND, 2)
    assert homes["left"] != homes["right"]
    assert set(homes) == {"stem", "left", "right", "head"}
    three = tuple(layer(f"branch{number}", size=number) for number in range(4))
    homes = spread((*three, function("sum", *(node.name for node in three))), 2)
    # 3 | 2, then 1 with the 2, and 0 with either: 3 and 3.
    assert homes["branch3"] != homes["branch2"] == homes["branch1"]


def test_a_line_of_layers_cannot_be_spread():
    with pytest.raises(SpecError, match="2 workers, but the model's layers form 1 line"):
        spread(LINE, 2)


def test_placements_must_name_layers_and_employ_everybody():
    with pytest.raises(
        SpecError, match="'middle', which the model does not call; it calls stem, left, right, head"
    ):
        check_homes(DIAMOND, {"middle": 0}, 1)
    with pytest.raises(SpecError, match="nothing runs on worker 1"):
        check_homes(DIAMOND, {"left": 0, "right": 2}, 3)


def test_segments_are_lines_of_one_worker():
    workers = assign(DIAMOND, {"left": 0, "right": 1, "head": 0})
    found = cut_into_segments(DIAMOND, workers)
    assert [(one.worker, one.steps, one.inputs) for one in found] == [
        (0, ("stem", "relu"), ()),
        (0, ("left",), ("relu",)),
        (1, ("right", "tanh"), ("relu",)),
        (0, ("cat", "head", "output"), ("left", "tanh")),
    ]
    across = cut_into_segments(LINE, {"first": 0, "relu": 0, "second": 1, "third": 1, "output": 1})
    assert [(one.worker, one.result, one.inputs) for one in across] == [(0, "relu", ()), (1, "output", ("relu",))]


def test_a_line_is_divided_evenly():
    assert divide([5, 1, 1, 1, 1, 1], 2) == [range(1), range(1, 6)]
    assert divide([1, 1, 1, 1], 4) == [range(i, i + 1) for i in range(4)]
    assert divide([0, 0, 9], 3) == [range(1), range(1, 2), range(2, 3)]


def test_groups_end_behind_norms_and_activations_and_where_one_result_crosses():
    assert names(groups_by_depth(LINE, 2)) == [["first", "relu"], ["second", "third", "output"]]
    assert names(groups_by_depth(DIAMOND, 2)) == [
        ["stem", "relu"],
        ["left", "right", "tanh", "cat", "head", "output"],
    ]
    assert len(groups_by_depth(DIAMOND, 9)) == 3  # stem, both branches, head: not between the branches
    normed = (layer("first"), norm("norm", "first"), function("relu", "norm"), layer("second", "relu"))
    assert names(groups_by_depth(normed, 3)) == [["first", "norm", "relu"], ["second"]]
