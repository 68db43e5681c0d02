"""What all agree on, whoever asks in which order: without processes."""

from __future__ import annotations

import random

import pytest

from shoal.horovod.negotiation import BLOCKED_ROUNDS, Decision, Negotiation, Saying, SayingCodec
from shoal.horovod.requests import Act, TensorLook, TensorRequest


def wish(name: str, shape: tuple[int, ...] = (3,), **more: object) -> TensorRequest:
    given = {"act": Act.ALLREDUCE, "tensors": (TensorLook(dtype="float32", shape=shape),), "op": "sum", **more}
    return TensorRequest(name=name, **given)


def names(decisions: tuple[Decision, ...]) -> list[str]:
    return [decision.name for decision in decisions]


def test_what_all_want_is_done_in_the_order_in_which_it_was_first_wanted():
    negotiation = Negotiation([0, 1])
    assert names(negotiation.take([Saying(news=(wish("a"), wish("b"))), Saying(news=(wish("b"),))]).decisions) == [
        "b"
    ]
    assert negotiation.missing() == {"a": (1,)}
    outcome = negotiation.take([Saying(news=(wish("c"),)), Saying(news=(wish("c"), wish("a")))])
    assert names(outcome.decisions) == ["a", "c"]
    assert not any(decision.error for decision in outcome.decisions)


@pytest.mark.parametrize("seed", range(50))
def test_any_orders_come_to_one_order(seed):
    """Whoever says how much when: everything is done once, and nothing is left."""
    draw = random.Random(seed)
    size = draw.randint(2, 4)
    left = [draw.sample("abcdef", 6) for _ in range(size)]
    negotiation, done = Negotiation(range(size)), []
    while any(left):
        sayings = []
        for mine in left:
            count = min(len(mine), draw.randint(0, 3))
            sayings.append(Saying(news=tuple(wish(mine.pop(0)) for _ in range(count))))
        done += names(negotiation.take(sayings).decisions)
    assert sorted(done) == list("abcdef")
    assert negotiation.missing() == {}


def test_what_differs_is_refused_to_all_with_both_ranks_named():
    cases = [
        (
            wish("x", (3,)),
            wish("x", (3, 2)),
            "Mismatched allreduce tensor shapes: rank 4 has a tensor of shape [3]",
        ),
        (wish("x"), wish("x", act=Act.ALLGATHER), "Mismatched operations"),
        (wish("x"), wish("x", op="min"), "Mismatched reduction operations"),
        (wish("x"), wish("x", device="cuda"), "Mismatched CPU/GPU device selection"),
        (wish("x"), wish("x", prescale=2.0), "Mismatched prescale factors"),
        (wish("x"), wish("x", tensors=(TensorLook(dtype="int64", shape=(3,)),)), "Mismatched data types"),
        (wish("x", act=Act.BROADCAST), wish("x", act=Act.BROADCAST, root=1), "Mismatched broadcast root ranks"),
        (
            wish("x", (3, 2), act=Act.ALLGATHER),
            wish("x", (3, 1), act=Act.ALLGATHER),
            "Mismatched allgather tensor",
        ),
    ]
    for ours, theirs, sentence in cases:
        (decision,) = Negotiation([4, 7]).take([Saying(news=(ours,)), Saying(news=(theirs,))]).decisions
        assert sentence in decision.error and "rank 7" in decision.error
    rows = [Saying(news=(wish("x", (rows, 2), act=Act.ALLGATHER),)) for rows in (3, 0)]
    assert Negotiation([0, 1]).take(rows).decisions[0].error == ""


def test_ranks_that_wait_for_different_tensors_are_told_and_slow_ones_are_not():
    negotiation = Negotiation([0, 1])
    negotiation.take([Saying(news=(wish("a"),)), Saying(news=(wish("b"),))])
    blocked = [Saying(waits_for="a"), Saying(waits_for="b")]
    for _ in range(BLOCKED_ROUNDS - 1):
        assert negotiation.take(blocked).is_quiet
    # One of them computes in between, so that nothing is known.
    assert negotiation.take([Saying(waits_for="a"), Saying()]).is_quiet
    for _ in range(BLOCKED_ROUNDS - 1):
        assert negotiation.take(blocked).decisions == ()
    outcome = negotiation.take(blocked)
    assert sorted(names(outcome.decisions)) == ["a", "b"]
    assert all("rank 0 waits for 'a', rank 1 waits for 'b'" in one.error for one in outcome.decisions)
    assert negotiation.missing() == {}


def test_others_go_on_without_who_has_joined():
    negotiation = Negotiation([0, 1, 2])
    assert negotiation.take([Saying(), Saying(joins=True), Saying()]).last_joined is None
    outcome = negotiation.take([Saying(news=(wish("a"),)), Saying(joins=True), Saying(news=(wish("a"),))])
    assert [sorted(one.wanted) for one in outcome.decisions] == [[0, 2]]
    last = negotiation.take([Saying(joins=True), Saying(joins=True), Saying()])
    assert last.last_joined is None
    assert negotiation.take([Saying(joins=True), Saying(joins=True), Saying(joins=True)]).last_joined == 2
    assert negotiation.take([Saying(news=(wish("b"),)), Saying(), Saying()]).decisions == (), "all are back"


def test_what_was_told_in_full_is_told_by_number_and_read_the_same():
    codecs = [SayingCodec(), SayingCodec()]
    sayings = [
        Saying(news=(wish("a", splits=(1, 2)), wish("b"))),
        Saying(news=(wish("b"),), waits_for="b", joins=True),
    ]
    lengths = []
    for _ in range(2):
        texts = [codec.write(saying) for codec, saying in zip(codecs, sayings, strict=True)]
        assert codecs[0].read(texts) == codecs[1].read(texts) == sayings
        lengths.append(sum(map(len, texts)))
    assert lengths[1] < lengths[0] / 3
