"""A server's desk: rules, who waits for whom, and changes that are made once, whenever it dies."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import SpecError
from shoal.kv import vault
from shoal.kv.desk import KvDesk
from shoal.kv.holders import Seat
from shoal.kv.requests import KvRequest, StoreConsistency, carried
from shoal.kv.rules import read_optimizer, settings_of
from shoal.kv.shard_copy import ShardCopy
from shoal.kv.vault import Vault, make_memory
from shoal.ps.plain.messages import DeskAnswer, WishOutcome

FIRST, SECOND = b"a" * 16, b"b" * 16


class Died(BaseException):
    """In place of a SIGKILL."""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = make_memory()
    yield fd
    os.close(fd)


class Asking:
    """A client of a shard, with its numbers."""

    def __init__(self, shard: ShardCopy, client: bytes = FIRST, worker: int = 0) -> None:
        self.shard, self.client, self.worker, self.sequence = shard, client, worker, 0

    def __call__(self, ask: str, *, again: bool = False, **more: Any) -> list[tuple[bytes, DeskAnswer]]:
        self.sequence += not again
        request = KvRequest(
            ask=ask,
            client=self.client,
            sequence=self.sequence,
            worker=self.worker,
            key=more.pop("key", "t"),
            **carried(more.pop("values", None), more.pop("rows", None)),
            **more,
        )
        self.shard.on_request(request)
        answers = list(self.shard.answers)
        self.shard.answers.clear()
        return answers

    def done(self, ask: str, **more: Any) -> Tensor | None:
        ((client, answer),) = self(ask, **more)
        assert client == self.client and answer.reason == "" and answer.sequence == self.sequence
        return answer.values


def table(desk: ShardCopy, rows: int = 6, columns: int = 2) -> Asking:
    ask = Asking(desk)
    values = torch.arange(float(rows * columns)).view(rows, columns)
    ask.done("init", look=(rows, columns, "float32"), values=values)
    return ask


def make(memory: int, kind: str = "dist_async", workers: int = 1) -> ShardCopy:
    shard = ShardCopy(0, Seat(0, "life"), memory, is_alone=True)
    Asking(shard, b"o" * 16).done("open", look=(kind, workers))
    return shard


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
        lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.9)),
    ],
)
def test_rules_are_those_of_torch(memory, optimizer):
    reference = nn.Parameter(torch.arange(12.0).view(6, 2))
    peer = optimizer([reference])
    ask = table(make(memory))
    ask.done("optimizer", rule=read_optimizer(peer))
    for step in range(4):
        gradient = torch.randn(6, 2, generator=torch.Generator().manual_seed(step))
        reference.grad = gradient.clone()
        peer.step()
        if step % 2:
            ask.done("push", rows=torch.arange(6), values=gradient)
        else:  # in two pieces, which count as one push
            ask.done("push", start=0, is_last=False, values=gradient[:4])
            ask.done("push", start=4, values=gradient[4:])
    found = ask.done("pull", start=0, count=6)
    torch.testing.assert_close(found, reference.detach())
    torch.testing.assert_close(ask.done("pull", rows=torch.tensor([5, 0, 5])), reference.detach()[[5, 0, 5]])


def test_a_rule_that_follows_another_begins_anew(memory):
    ask = table(make(memory))
    ask.done("optimizer", rule=("sgd", {"lr": 0.0, "momentum": 0.9}))
    ask.done("push", start=0, values=torch.full((6, 2), -1.0))  # a momentum that no accumulator could be
    before = ask.done("pull", start=0, count=6)
    ask.done("optimizer", rule=("adagrad", {"lr": 0.5}))
    ask.done("push", start=0, values=torch.full((6, 2), 0.25))
    torch.testing.assert_close(ask.done("pull", start=0, count=6), before - 0.5)


@pytest.mark.parametrize("more", [{"initial_accumulator_value": 0.1}, {"lr_decay": 0.1}])
def test_settings_that_no_rule_has_are_refused(more):
    with pytest.raises(SpecError, match="in their plain forms"):
        read_optimizer(torch.optim.Adagrad([nn.Parameter(torch.zeros(1))], **more))


def test_the_settings_are_those_of_now_and_the_same_for_all():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    assert read_optimizer(optimizer)[1]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(SpecError, match="the same settings"):
        read_optimizer(optimizer)


def test_rows_that_were_not_pushed_stay(memory):
    ask = table(make(memory))
    ask.done("optimizer", rule=("adam", {"lr": 0.1}))
    before = ask.done("pull", start=0, count=6)
    ask.done("push", rows=torch.tensor([1, 4]), values=torch.ones(2, 2))
    after = ask.done("pull", start=0, count=6)
    assert before is not None and after is not None
    assert (after != before).any(1).tolist() == [False, True, False, False, True, False]


def test_rounds_are_applied_once_all_have_pushed(memory):
    desk = make(memory, "dist_sync", 2)
    first, second = table(desk), Asking(desk, SECOND, 1)
    first.done("push", rows=torch.tensor([0]), values=torch.ones(1, 2))
    assert first("pull", start=0, count=2) == [], "its own push is not in it yet"
    waiting = first.sequence
    assert second.done("pull", start=0, count=1).tolist() == [[0, 1]], "nothing of its own is missing"
    answers = second("push", rows=torch.tensor([0, 1]), values=torch.full((2, 2), 2.0))
    assert [(client, answer.sequence) for client, answer in answers] == [
        (SECOND, second.sequence),
        (FIRST, waiting),
    ]
    assert answers[1][1].values.tolist() == [[3, 3], [2, 2]], "without an optimizer the sum is the value"
    first.done("push", rows=torch.tensor([0]), values=torch.ones(1, 2))
    assert first("push", rows=torch.tensor([0]), values=torch.ones(1, 2)) == [], "the next round has not begun"
    answers = second("push", rows=torch.tensor([0]), values=torch.ones(1, 2))
    assert [client for client, _ in answers] == [SECOND, FIRST]
    assert second.done("pull", start=0, count=1).tolist() == [[2, 2]]


def test_who_is_too_far_ahead_waits(memory):
    desk = make(memory, "dist_ssp:1", 2)
    first, second = table(desk), Asking(desk, SECOND, 1)
    first.done("optimizer", rule=("sgd", {"lr": 1.0}))
    for _ in range(2):
        first.done("push", rows=torch.tensor([0]), values=torch.ones(1, 2))
        if _ == 0:
            assert first.done("pull", start=0, count=1) is not None
    assert first("pull", start=0, count=1) == []
    answers = second("push", rows=torch.tensor([0]), values=torch.ones(1, 2))
    assert [client for client, _ in answers] == [SECOND, FIRST]


def test_a_repeated_push_is_made_once(memory):
    ask = table(make(memory))
    ask.done("optimizer", rule=("sgd", {"lr": 1.0}))
    ask.done("push", rows=torch.tensor([0]), values=torch.ones(1, 2))
    ((_, answer),) = ask("push", again=True, rows=torch.tensor([0]), values=torch.ones(1, 2))
    assert answer.reason == ""
    assert ask.done("pull", start=0, count=1).tolist() == [[-1, 0]]


@pytest.mark.parametrize("kind", ["dist_async", "dist_sync"])
@pytest.mark.parametrize("moment", [None, 0, 1, 3])
def test_who_follows_a_dead_server_finds_all_of_a_push_or_nothing(memory, kind, moment, monkeypatch):
    """The push is repeated, as its client would, and made once."""
    ask = table(make(memory, kind))
    ask.done("optimizer", rule=("adam", {"lr": 0.1}))
    ask.done("push", rows=torch.tensor([0, 3]), values=torch.ones(2, 2))
    before = ask.done("pull", start=0, count=6)
    with monkeypatch.context() as patch:
        die_in(patch, moment)
        with pytest.raises(Died):
            ask("push", rows=torch.tensor([3, 5]), values=torch.ones(2, 2))
    successor = make(memory, kind)
    ask.shard = successor
    if moment is None:
        assert torch.equal(Asking(successor, SECOND).done("pull", start=0, count=6), before)
    ask("push", again=True, rows=torch.tensor([3, 5]), values=torch.ones(2, 2))
    found = ask.done("pull", start=0, count=6)
    whole = make_memory()
    reference = table(make(whole, kind))
    reference.done("optimizer", rule=("adam", {"lr": 0.1}))
    reference.done("push", rows=torch.tensor([0, 3]), values=torch.ones(2, 2))
    reference.done("push", rows=torch.tensor([3, 5]), values=torch.ones(2, 2))
    assert torch.equal(found, reference.done("pull", start=0, count=6))
    os.close(whole)


def die_in(patch: pytest.MonkeyPatch, moment: int | None) -> None:
    """In a change: before it is made, or when so many tables are written over."""
    write, written = Vault._write_note, [0]

    def dying(self: Vault, at: int) -> int:
        if written[0] == moment:
            raise Died
        written[0] += 1
        return write(self, at)

    def die(self: Vault) -> None:
        raise Died

    if moment is None:
        patch.setattr(Vault, "_write_over", die)
    else:
        patch.setattr(Vault, "_write_note", dying)


def test_a_change_that_fails_in_the_middle_is_undone(memory, monkeypatch):
    ask = table(make(memory))
    ask.done("optimizer", rule=("adam", {"lr": 0.1}))
    before = ask.done("pull", start=0, count=6)

    def fail(*args: Any, **more: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "addcdiv_", fail)
        ((_, answer),) = ask("push", rows=torch.tensor([1, 2]), values=torch.ones(2, 2))
    assert answer.reason == "no room"
    assert torch.equal(ask.done("pull", start=0, count=6), before)


def test_what_cannot_be_is_refused_and_the_desk_goes_on(memory):
    ask = table(make(memory))
    for ask_more, sentence in [
        ({"ask": "push", "rows": torch.tensor([0]), "values": torch.ones(1, 2)}, "set_optimizer first"),
        ({"ask": "pull", "key": "u"}, "'u' is not known"),
        ({"ask": "dance"}, "nothing that a server does"),
        ({"ask": "init", "look": (1, 1, "float32"), "values": torch.ones(1, 1)}, "was sent as"),
        ({"ask": "push", "values": torch.ones(1, 7)}, "do not fit"),
    ]:
        ((_, answer),) = ask(**ask_more)
        assert sentence in answer.reason
    assert ask.done("pull", start=0, count=1) is not None
    with pytest.raises(SpecError, match="Choose one of"):
        StoreConsistency.parse("dist_ssp")
    with pytest.raises(SpecError, match="momentun"):
        settings_of("sgd", {"momentun": 1})
    with pytest.raises(SpecError, match="plain forms"):
        read_optimizer(torch.optim.SGD([torch.zeros(1)], lr=1, momentum=0.1, nesterov=True))


def test_several_desks_over_one_memory_are_one(memory):
    """As processes of one host have them: what one does, and what keys it makes, the others see."""
    first = table(make(memory))
    vault = Vault(memory)
    second = KvDesk(vault)

    def ask(number: int, what: str, **more: Any) -> DeskAnswer | None:
        bulk = carried(more.pop("values", None), more.pop("rows", None))
        return second.take(KvRequest(ask=what, client=SECOND, sequence=number, **bulk, **more))

    first.done("optimizer", rule=("sgd", {"lr": 1.0}))
    first.done("push", rows=torch.tensor([0]), values=torch.ones(1, 2))
    answer = ask(1, "push", key="t", rows=torch.tensor([0]), values=torch.ones(1, 2))
    assert answer is not None and answer.reason == ""
    assert first.done("pull", start=0, count=1).tolist() == [[-2, -1]]
    assert ask(2, "init", key="u", look=(1, 1, "float32"), values=torch.full((1, 1), 7.0)).reason == ""
    assert first.done("pull", key="u", count=1).tolist() == [[7]]
    vault.close()


def test_workers_meet_and_with_the_last_all_goes(memory):
    desk = make(memory, workers=2)
    first, second = table(desk), Asking(desk, SECOND, 1)
    first.done("arrive")
    assert first("gather") == []
    waiting = first.sequence
    ((_, heard),) = first("gather", again=True)
    assert heard.outcome is WishOutcome.WAITS and heard.sequence == waiting, (
        "who asks again hears that the server lives"
    )
    answers = second("arrive")
    assert [(client, answer.outcome) for client, answer in answers] == [
        (SECOND, WishOutcome.DONE),
        (FIRST, WishOutcome.DONE),
    ]
    second.done("gather")
    for one in (first, second):
        one.done("leave")
    ((_, answer),) = first("pull", count=1)
    assert "'t' is not known" in answer.reason
    first.done("open", look=("dist_sync", 1))
    first.done("init", look=(3, 2, "float64"), values=torch.zeros(3, 2, dtype=torch.float64))
    assert first.done("pull", count=3).tolist() == [[0, 0]] * 3


def test_a_worker_that_is_killed_leaves_all_of_its_push_or_nothing(memory):
    """Processes that use the memory themselves, killed whenever it happens to be."""
    ask = table(make(memory), rows=3000, columns=16)
    ask.done("optimizer", rule=("sgd", {"lr": 1.0}))
    before, rows = ask.done("pull", start=0, count=3000), torch.arange(3000)
    for turn in range(12):
        if not (child := os.fork()):
            push_until_killed(memory, bytes([turn]) * 16, rows)
        begun = ask.shard.vault.index
        while ask.shard.vault.index < begun + 2:
            time.sleep(1e-4 * turn)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after = ask.done("pull", start=0, count=3000)
        moved = before - after
        assert 2 <= float(moved.min()) == float(moved.max()), "every row has moved by the same"
        before = after


def push_until_killed(memory: int, client: bytes, rows: Tensor) -> None:
    """A process of its own, with a desk over the same memory."""
    torch.set_num_threads(1)
    desk = KvDesk(Vault(memory))
    for number in itertools.count(1):
        values = torch.ones(len(rows), 16)
        desk.take(KvRequest(ask="push", client=client, sequence=number, key="t", **carried(values, rows)))


def test_a_key_is_there_for_others_once_all_of_it_is(memory: int) -> None:
    shard = make(memory, workers=2)
    maker, other = Asking(shard), Asking(shard, SECOND, worker=1)
    look, ones, twos = (4, 1, "float32"), torch.ones(2, 1), torch.full((2, 1), 2.0)
    maker.done("init", look=look, values=ones)
    assert other("init", look=look, values=twos) == [], "it waits"
    assert [client for client, _ in maker("init", look=look, start=2, values=ones)] == [FIRST, SECOND]
    other.done("init", look=look, start=2, values=twos)
    found = other.done("pull", start=0, count=4)
    assert found is not None and found.flatten().tolist() == [1.0] * 4


def test_a_key_is_whole_although_its_maker_heard_no_answer(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = make(memory, workers=2)
    maker, other = Asking(shard), Asking(shard, SECOND, worker=1)
    look, ones = (2, 1, "float32"), torch.ones(2, 1)

    def dies(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(KvDesk, "_note_whole", dies)
        with pytest.raises(Died):
            maker("init", look=look, values=ones)
    successor = ShardCopy(0, Seat(1, "life"), memory, is_alone=True)
    maker.shard = other.shard = successor
    assert other("init", look=look, values=ones) == []
    assert [client for client, _ in maker("init", again=True, look=look, values=ones)] == [FIRST, SECOND]


def test_of_more_clients_than_can_be_known_the_last_ones_are(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of jobs that have long ended leave their places to others, in all processes that use the memory."""
    monkeypatch.setattr(vault, "MOST_CLIENTS", 4)
    shard, beside = make(memory), KvDesk(Vault(memory))
    ask = table(shard)
    ask.done("optimizer", rule=("sgd", {"lr": 1.0}))
    values, pushed = torch.ones(1, 2), 0
    for number in range(20):
        client = Asking(shard, bytes([number]) * 16)
        for _ in range(2):
            client.done("push", rows=torch.tensor([0]), values=values)
            client.done("push", rows=torch.tensor([0]), values=values)
            pushed += 2
            client("push", again=True, rows=torch.tensor([0]), values=values)
            again = KvRequest(ask="push", client=client.client, sequence=client.sequence, key="t")
            assert beside.take(again).reason == ""
    assert ask.done("pull", start=0, count=1).tolist() == [[-pushed, 1 - pushed]]
