"""What travels between workers of a cut model arrives as it was sent."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from shoal.errors import TaskError
from shoal.strategies.cut.packing import Form, MessageRoom, leaves, pack, tensors_in

VALUE = {"a": (torch.ones(2), [3, None, 2.5, True]), "b": torch.zeros(()), "c": "text"}


def sent(value: Any, *, copies: bool = False) -> Any:
    form = Form.of(value)
    told = Form.from_bytes(form.to_bytes())
    assert told == form
    room = MessageRoom(told)
    room.room.copy_(pack(form, leaves(value), copies=copies))
    return room.value("cpu")


def test_values_survive_the_way() -> None:
    found = sent(VALUE)
    as_lists = partial(tree_map_only, torch.Tensor, torch.Tensor.tolist)
    assert as_lists(found) == as_lists(VALUE)
    assert (type(found["a"]), type(found["a"][1])) == (tuple, list)
    assert [type(one) for one in found["a"][1]] == [int, type(None), float, bool]
    assert sent((torch.Size([2, 3]), None)) == ((2, 3), None)
    assert sent(None) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_every_kind_of_tensor_keeps_its_bits(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).view(2, 3).t().to(dtype)
    for value in (tensor, [tensor, tensor[0], torch.empty(0, dtype=dtype), 7]):
        assert all(map(torch.equal, tensors_in(sent(value)), tensors_in(value)))


def test_what_had_a_history_begins_a_new_one() -> None:
    known, plain = torch.ones(3, requires_grad=True) * 2, torch.ones(3)
    for value in (known, (plain, known)):
        *_, found = tensors_in(sent(value))
        assert found.is_leaf and found.requires_grad
    with torch.no_grad():
        assert not sent(known).requires_grad


def test_a_single_tensor_is_its_own_message_unless_it_is_to_be_copied() -> None:
    tensor = torch.ones(3)
    form = Form.of(tensor)
    assert pack(form, [tensor]).data_ptr() == tensor.data_ptr()
    assert pack(form, [tensor], copies=True).data_ptr() != tensor.data_ptr()


def test_gradients_that_nobody_found_are_zeros_where_the_form_is_known() -> None:
    form = Form.of([torch.ones(2, requires_grad=True), 5, torch.ones(1), torch.ones(3, requires_grad=True)])
    room = MessageRoom(form.differentiable)
    room.room.copy_(pack(form.differentiable, [None, torch.full((3,), 2.0)]))
    assert [one.tolist() for one in room.value("cpu")] == [[0.0, 0.0], [2.0, 2.0, 2.0]]


def test_named_tuples_arrive_without_names() -> None:
    pair = namedtuple("Pair", "first second")(torch.ones(1), [torch.ones(2)])
    assert [tensor.numel() for tensor in tensors_in(pair)] == [1, 2]
    assert type(sent(pair)) is tuple


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TaskError, match="passes a object on to a layer of another worker"):
        Form.of([object()])
