"""A server's desk: rules, who waits for whom, and changes that are made once, whenever it dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import SpecError
from shoal.kv.desk import KvAnswer, KvDesk, KvRequest, StoreConsistency
from shoal.kv.rules import read_optimizer, settings_of
from shoal.kv.vault import Vault, make_memory

FIRST, SECOND = b"a" * 16, b"b" * 16


class Died(BaseException):
    """In place of a SIGKILL."""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = make_memory()
    yield fd
    os.close(fd)


class Asking:
    """A client of a desk, with its numbers."""

    def __init__(self, desk: KvDesk, client: bytes = FIRST, worker: int = 0) -> None:
        self.desk, self.client, self.worker, self.sequence = desk, client, worker, 0

    def __call__(self, ask: str, *, again: bool = False, **more: Any) -> list[tuple[bytes, KvAnswer]]:
        self.sequence += not again
        request = KvRequest(
            ask=ask,
            client=self.client,
            sequence=self.sequence,
            worker=self.worker,
            key=more.pop("key", "t"),
            **more,
        )
        return self.desk.take(request)

    def done(self, ask: str, **more: Any) -> Tensor | None:
        ((client, answer),) = self(ask, **more)
        assert client == self.client and answer.reason == "" and answer.sequence == self.sequence
        return answer.values


def table(desk: KvDesk, rows: int = 6, columns: int = 2) -> Asking:
    ask = Asking(desk)
    values = torch.arange(float(rows * columns)).view(rows, columns)
    ask.done("init", look=(rows, columns, "float32"), values=values)
    return ask


def make(memory: int, kind: str = "dist_async", workers: int = 1) -> KvDesk:
    return KvDesk(Vault(memory), StoreConsistency.parse(kind), workers)


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
@pytest.mark.parametrize("moment", ["before", "rows", "all", "number"])
def test_who_follows_a_dead_server_finds_all_of_a_push_or_nothing(memory, kind, moment, monkeypatch):
    """The push is repeated, as its client would, and made once."""
    desk = make(memory, kind)
    ask = table(desk)
    ask.done("optimizer", rule=("adam", {"lr": 0.1}))
    ask.done("push", rows=torch.tensor([0, 3]), values=torch.ones(2, 2))
    before = ask.done("pull", start=0, count=6)
    with monkeypatch.context() as patch:
        die_in(patch, moment)
        with pytest.raises(Died):
            ask("push", rows=torch.tensor([3, 5]), values=torch.ones(2, 2))
    successor = make(memory, kind)
    ask.desk = successor
    if moment != "number":
        assert torch.equal(Asking(successor, SECOND).done("pull", start=0, count=6), before)
    ask("push", again=True, rows=torch.tensor([3, 5]), values=torch.ones(2, 2))
    found = ask.done("pull", start=0, count=6)
    whole = os.memfd_create("reference")
    os.ftruncate(whole, os.fstat(memory).st_size)
    reference = table(make(whole, kind))
    reference.done("optimizer", rule=("adam", {"lr": 0.1}))
    reference.done("push", rows=torch.tensor([0, 3]), values=torch.ones(2, 2))
    reference.done("push", rows=torch.tensor([3, 5]), values=torch.ones(2, 2))
    assert torch.equal(found, reference.done("pull", start=0, count=6))
    os.close(whole)


def die_in(patch: pytest.MonkeyPatch, moment: str) -> None:
    """In a change: before it, when some tables are changed, when all are, when its number is written."""
    change, copies = Vault.change, [0]

    @contextmanager
    def dying(self: Vault, *args: Any) -> Iterator[None]:
        manager = change(self, *args)
        manager.__enter__()
        if moment == "before":
            raise Died
        yield
        if moment == "number":
            manager.__exit__(None, None, None)
        raise Died

    if moment != "rows":
        patch.setattr(Vault, "change", dying)
        return
    copy = Tensor.index_copy_

    def counting(self: Tensor, *args: Any) -> Tensor:
        copies[0] += 1
        if copies[0] == 3:
            raise Died
        return copy(self, *args)

    patch.setattr(Tensor, "index_copy_", counting)


def test_a_change_that_fails_in_the_middle_is_undone(memory, monkeypatch):
    ask = table(make(memory))
    ask.done("optimizer", rule=("adam", {"lr": 0.1}))
    before = ask.done("pull", start=0, count=6)

    def fail(*args: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "index_copy_", fail)
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
