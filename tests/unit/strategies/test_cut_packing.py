"""What travels between workers of a cut model arrives as it was sent."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from shoal.errors import TaskError
from shoal.strategies.cut.packing import Form, MessageRoom, leaves, pack, replace_tensors, tensors_in

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
    assert replace_tensors(found, torch.Tensor.tolist) == replace_tensors(VALUE, torch.Tensor.tolist)
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


def test_tensors_of_a_value() -> None:
    assert len(tensors_in(VALUE)) == 2
    found = replace_tensors(VALUE, lambda tensor: tensor.dim())
    assert found == {"a": (1, [3, None, 2.5, True]), "b": 0, "c": "text"}


def test_named_tuples_keep_their_names_where_they_are_not_sent() -> None:
    Pair = namedtuple("Pair", "first second")
    pair = Pair(torch.ones(1), [torch.ones(2)])
    assert replace_tensors(pair, torch.Tensor.numel) == Pair(1, [2])
    assert type(replace_tensors(pair, torch.Tensor.numel)) is Pair
    assert type(sent(pair)) is tuple


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TaskError, match="passes a object on to a layer of another worker"):
        Form.of([object()])
