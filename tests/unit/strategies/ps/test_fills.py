"""A shard fills a new copy over the wire, however large its tensors and their state are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.arena import Segment
from shoal.comm.codec import Message, decode, encode
from shoal.comm.compression import make_compression
from shoal.errors import ProtocolError, SpecError
from shoal.model.replica import Replica
from shoal.ps.buffers import Label
from shoal.ps.messages import Push
from shoal.spec import ParameterServer, Task, World
from shoal.spec.vocabulary import Role
from shoal.strategies.ps import parcelling, served
from shoal.strategies.ps.bulk import frames_of
from shoal.strategies.ps.served import Served
from shoal.strategies.ps.store import ShardStore


class Unknown(torch.optim.Adam):
    """Whatever is no class of torch's own is updated as a whole."""


def one(optimizer: Callable[..., torch.optim.Optimizer], wire: str, world: World | None = None) -> Served:
    task = Task(
        model=lambda: nn.Linear(40, 30),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: optimizer(params, lr=0.1),
        train=[0],
        batch_size=1,
        epochs=1,
    )
    return Served.open(ParameterServer(wire=wire), Replica(task), world or World(), slots=1, workers=1)


def updated(served: Served) -> ShardStore:
    """A copy that has taken two updates."""
    store = served.make_values(0, 0)
    store.initialise()
    served.memory.touched(0).fill_(1)
    for step in (1, 2):
        for view in served.memory.views("gradients/0"):
            view.fill_(0.5 * step)
        push = Push(
            shard=0,
            generation=1,
            origin=9,
            sequence=step,
            clock_of=0,
            clock=step,
            cells=[step - 1],
            based_on=step - 1,
            weight=1.0,
            loss=1.0,
            frames=() if served.shares_memory else frames_of(served.memory, 0, 0, make_compression("none")),
        )
        store.step([push], scale=1.0, lr_scale=1.0, loss=1.0 / step, last=True)
    return store


@pytest.mark.parametrize("limit", [parcelling.MAX_FRAME_BYTES, 64])
@pytest.mark.parametrize("wire", ["memory", "tcp"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, Unknown])
def test_a_new_copy_is_what_the_old_one_was(
    monkeypatch: pytest.MonkeyPatch, optimizer: Callable[..., torch.optim.Optimizer], wire: str, limit: int
) -> None:
    monkeypatch.setattr(parcelling, "MAX_FRAME_BYTES", limit)
    holder = one(optimizer, wire)
    old = updated(holder)
    new = (holder if wire == "memory" else one(optimizer, wire)).make_values(0, 1)
    new.initialise()
    frames, facts = old.frames(), old.facts()
    carried = decode([bytes(part) for part in encode(Message("fill", facts, frames))])
    new.load(carried.frames, carried.fields)
    assert new.digest() == old.digest()
    assert facts["updates"] == 2 and (limit > 64 or optimizer is torch.optim.Adam or len(frames) > 100)


def test_state_that_is_not_all_there_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not all there"):
        parcelling.from_frames([torch.ones(2), b"bytes"])
    with pytest.raises(ProtocolError, match="not all there"):
        parcelling.from_frames([])


def test_a_shard_of_too_many_frames_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MAX_FRAMES", 8)
    with pytest.raises(SpecError, match=r"at most 8 frames, but shard 0 of 1 takes 8; .* as in shards=2"):
        one(torch.optim.Adam, "tcp")
    one(torch.optim.Adam, "memory")


def test_labels_outlive_their_writer_whole_or_not_at_all() -> None:
    labels, label = one(torch.optim.SGD, "memory").memory.labels, Label(7, 3, 2.5, -1.0, True, 0.5)
    labels.put_label(1, label)
    assert labels.label(1) == label and labels.label(0).clock == 0
    labels.put_label(1, Label())
    assert labels.label(1).clock == 0


def test_over_tcp_what_a_worker_pushed_is_there_for_whoever_follows_it_in_the_same_attempt() -> None:
    world = World(arena_fd=Segment().detach(), attempt="first")
    first, second, other = (
        one(torch.optim.SGD, "tcp", replace(world, **changes)).memory
        for changes in ({}, {}, {"attempt": "second"})
    )
    server = one(torch.optim.SGD, "tcp", replace(world, role=Role.SERVER)).memory
    first.views("gradients/1")[0].fill_(3.0)
    first.labels.put_label(1, Label(7, 3, 2.5))
    assert second.labels.label(1) == Label(7, 3, 2.5) and float(second.views("gradients/1")[0].mean()) == 3.0
    assert other.labels.label(1) == Label(), "its clocks count other steps"
    assert float(server.views("gradients/1")[0].abs().max()) == 0.0, "what comes to a server is its own"
