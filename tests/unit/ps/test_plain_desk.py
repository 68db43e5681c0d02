"""The desk of the plain server: every request is done once, and what is none changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shoal.comm.codec import Message, decode, encode
from shoal.errors import ProtocolError
from shoal.ps.plain.clientele import Caller, Clientele
from shoal.ps.plain.desk import Desk
from shoal.ps.plain.messages import (
    Ask,
    DeskAnswer,
    Request,
    WishOutcome,
    read_answer,
    read_request,
    write_answer,
    write_request,
)
from shoal.ps.plain.table import ParameterTable
from shoal.ps.plain.tensors import PlainBulk, pack, unpack

ADDRESS = "tcp://127.0.0.1:4000"


class Counter:
    """A desk and those who come to it, without a wire."""

    def __init__(self, table: ParameterTable, *, max_clients: int, **more) -> None:
        self.desk, self.clientele = Desk(table, **more), Clientele(max_clients)
        self.left = self.clientele.left

    def take(self, message: Message) -> tuple[Caller, Message] | None:
        request, address = read_request(Request, message)
        caller = self.clientele.meet(request.client, address)
        answer = self.desk.take(request, caller)
        return None if answer is None else (caller, write_answer(answer))


def table() -> ParameterTable:
    return ParameterTable({"w": torch.zeros(2), "b": torch.zeros(1)}, None)


def request(ask: Ask, sequence: int, client: int = 1, **more) -> Request:
    return Request(ask=ask, client=bytes([client] * 16), sequence=sequence, **more)


def adding(value: float, sequence: int, client: int = 1) -> Request:
    bulk = pack({"w": torch.full((2,), value)})
    return request(Ask.UPDATE, sequence, client, names=("w",), bulk=bulk)


def carried(message: Message) -> Message:
    """As it arrives at the other end of a wire."""
    return decode([bytes(part) for part in encode(message)])


def take(desk: Counter, asked: Request) -> tuple[Caller, DeskAnswer]:
    taken = desk.take(carried(write_request(asked, ADDRESS)))
    assert taken is not None
    return taken[0], read_answer(carried(taken[1]))


def test_a_client_learns_what_there_is_and_gets_it():
    desk, specs = Counter(table(), max_clients=2, notice={"steps": 3}), table().specs
    caller, hello = take(desk, request(Ask.HELLO, 1))
    assert hello.notice == {"steps": 3}
    assert caller.address == ADDRESS and hello.specs == specs and hello.version == 0
    _, done = take(desk, adding(2.0, 2))
    assert (done.outcome, done.version, done.sequence) == (WishOutcome.DONE, 1, 2)
    _, everything = take(desk, request(Ask.GET, 3))
    assert unpack(everything.bulk, specs, specs)["w"].tolist() == [2.0, 2.0] and everything.version == 1
    _, some = take(desk, request(Ask.GET, 4, names=("b",)))
    assert unpack(some.bulk, ["b"], specs)["b"].tolist() == [0.0]


def test_repeated_and_late_requests_change_nothing():
    """Every client's requests arrive in order, each several times, with late repeats in between."""
    dice, parameters = random.Random(0), table()
    desk = Counter(parameters, max_clients=4)
    asked: dict[int, list[Request]] = {client: [request(Ask.HELLO, 1, client)] for client in range(3)}
    for (hello,) in asked.values():
        take(desk, hello)
    late = 0
    for _ in range(300):
        client = dice.randrange(3)
        if dice.random() < 0.5:
            asked[client].append(adding(float(client + 1), len(asked[client]) + 1, client))
        repeated = dice.choice(asked[client][-3:])
        first = take(desk, asked[client][-1])[1]
        again = desk.take(write_request(repeated, ADDRESS))
        if repeated is asked[client][-1]:
            assert again is not None and read_answer(carried(again[1])) == first
        else:
            assert again is None
            late += 1
    total = sum((client + 1) * (len(requests) - 1) for client, requests in asked.items())
    assert parameters.copies()[1]["w"].tolist() == [total, total]
    assert parameters.version == sum(len(requests) - 1 for requests in asked.values()) > 100 and late > 50


def test_a_refusal_is_remembered_too():
    parameters = table()
    desk = Counter(parameters, max_clients=2)
    take(desk, request(Ask.HELLO, 1))
    wrong = request(Ask.STORE, 2, names=("w",), bulk=pack({"w": torch.zeros(3)}))
    _, refused = take(desk, wrong)
    assert refused.outcome is WishOutcome.REFUSED and "[3]" in refused.reason and parameters.version == 0
    assert take(desk, wrong)[1] == refused


@pytest.mark.parametrize(
    "wrong",
    [
        request(Ask.GET, 2, names=("v",)),
        request(Ask.UPDATE, 2, names=("v",), bulk=pack({"v": torch.zeros(2)})),
        request(Ask.UPDATE, 2, names=("w",)),
        request(Ask.UPDATE, 2, names=("w",), bulk=pack({"w": torch.zeros(2).double()})),
        request(Ask.UPDATE, 2, names=("w",), bulk=pack({"w": torch.zeros(2)}), compress="gzip"),
        request(Ask.UPDATE, 2, names=("w",), bulk=PlainBulk(packing=[[1, {}]], frames=[b"x"]), compress="zstd"),
        request(Ask.AVERAGE, 2, names=("w", "b"), bulk=pack({"w": torch.ones(2), "b": torch.ones(2)})),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(wrong):
    parameters = table()
    desk = Counter(parameters, max_clients=2)
    take(desk, request(Ask.HELLO, 1))
    _, answer = take(desk, wrong)
    assert answer.outcome is WishOutcome.REFUSED and answer.reason.endswith(".")
    version, values = parameters.copies()
    assert version == 0 and not values["w"].any() and not values["b"].any()
    assert take(desk, adding(1.0, 3))[1].version == 1


def test_who_is_not_known_is_told_and_changes_nothing():
    """A new server in the old one's place cannot know what that one has done."""
    parameters = table()
    _, answer = take(Counter(parameters, max_clients=2), adding(1.0, 7))
    assert answer.outcome is WishOutcome.UNKNOWN_CLIENT and parameters.version == 0


def test_those_who_left_make_room():
    desk = Counter(table(), max_clients=2)
    first, _ = take(desk, request(Ask.HELLO, 1, client=1))
    second, _ = take(desk, request(Ask.HELLO, 1, client=2))
    with pytest.raises(ProtocolError, match="2 clients already"):
        desk.take(write_request(request(Ask.HELLO, 1, client=3), ADDRESS))
    desk.left(first.peer)
    assert take(desk, adding(1.0, 2, client=1))[0] is first  # it came back in time
    desk.left(first.peer)
    third, _ = take(desk, request(Ask.HELLO, 1, client=3))
    assert len({first.peer, second.peer, third.peer}) == 3
    desk.left(third.peer)
    assert take(desk, adding(1.0, 3, client=1))[1].outcome is WishOutcome.UNKNOWN_CLIENT


GOOD = write_request(adding(1.0, 2), ADDRESS)


@pytest.mark.parametrize(
    "changed",
    [
        {"client": b"short"},
        {"client": "x" * 16},
        {"sequence": 0},
        {"sequence": "2"},
        {"names": ["w", "w"]},
        {"names": [["w"]]},
        {"names": "w"},
        {"share": 0.0},
        {"share": float("nan")},
        {"share": 1},
        {"compress": None},
        {"packing": {}},
        *({"reply_to": address} for address in ("", "tcp://localhost:80", "tcp://127.0.0.1:0", "127.0.0.1:80")),
        *({"reply_to": address} for address in ("tcp://::1:80", "tcp://[127.0.0.1]:80", "tcp://127.0.0.1:8_0")),
        *(
            {"reply_to": address}
            for address in ("tcp://127.0.0.1:http", "ipc://here", "ipc:///" + "é" * 60, "ipc://@" + "x" * 200)
        ),
    ],
    ids=str,
)
def test_what_is_no_request_gets_no_answer(changed):
    parameters = table()
    desk = Counter(parameters, max_clients=2)
    take(desk, request(Ask.HELLO, 1))
    with pytest.raises(ProtocolError):
        desk.take(replace(GOOD, fields=GOOD.fields | changed))
    assert parameters.version == 0
    assert desk.take(GOOD) is not None and parameters.version == 1


def test_messages_of_another_kind_are_none():
    for message in (Message("push", GOOD.fields), Message("update"), Message("done", {"sequence": 1})):
        with pytest.raises(ProtocolError):
            Counter(table(), max_clients=1).take(message)
        with pytest.raises(ProtocolError):
            read_answer(message)
    good = DeskAnswer(outcome=WishOutcome.DONE, sequence=1, specs=table().specs, notice={"steps": 3})
    again = read_answer(write_answer(good))
    assert (again.specs, again.notice) == (good.specs, good.notice)
    odd = write_answer(good)
    odd.fields["notice"] = {"steps": "three"}
    with pytest.raises(ProtocolError):
        read_answer(odd)
