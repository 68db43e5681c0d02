"""Which strategies are compared: lists as users write them, and what is usual."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from shoal.bench import comparison
from shoal.errors import SpecError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("data", ["data"]),
        ("data,ps:sync=asp", ["data", "ps:sync=asp"]),
        ("ps:servers=2,sync=ssp:3,data", ["ps:servers=2,sync=ssp:3", "data"]),
        ("mesh:data=2,tensor=2, sharded", ["mesh:data=2,tensor=2", "sharded"]),
        ("ps:sync=asp,pool=threads:2,ms:50,layer", ["ps:sync=asp,pool=threads:2,ms:50", "layer"]),
    ],
)
def test_a_comma_parts_strategies_and_keys_of_one(text, found):
    assert comparison.split_strategies(text) == found


def test_each_is_named_once_in_its_shortest_form():
    assert comparison.chosen_strategies("data:via=auto,data,sharded:stage=3") == ["data", "sharded"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data,shardd", "'shardd' is not known. Did you mean 'sharded'"),
        ("data,", "'' is not known"),
        ("ps:sync=asp,shards", "key 'shards' is not known|write shards=value|sync must be"),
        ("data:via=rign", "Did you mean 'ring'"),
    ],
)
def test_what_is_written_wrong_is_named(text, sentence):
    with pytest.raises(SpecError, match=sentence):
        comparison.chosen_strategies(text)


def test_the_usual_ones_are_all_there_is_without_sizes():
    assert comparison.chosen_strategies(None)[: len(comparison.USUAL)] == list(comparison.USUAL)
    kinds = {written.partition(":")[0] for written in comparison.USUAL}
    assert kinds == {"data", "ps", "sharded", "tensor", "pipeline", "layer"}


def test_strategies_of_other_packages_are_compared_too(monkeypatch):
    brought = EntryPoints([EntryPoint("sharded", "somewhere:Spec", "shoal.strategies")])
    monkeypatch.setattr(comparison, "entry_points", lambda group: brought)
    monkeypatch.setattr(comparison, "USUAL", ("data",))
    assert comparison.chosen_strategies(None) == ["data", "sharded"]
