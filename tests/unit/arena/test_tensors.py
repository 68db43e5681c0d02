"""How tensors lie in memory, as bytes."""

from __future__ import annotations

import pytest
import torch

from shoal.arena.tensors import as_bytes
from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.comm.codec import Message, decode, encode


@pytest.mark.parametrize("rows", [0, 1])
def test_a_column_of_one_row_is_contiguous_whatever_its_strides_are(rows, tmp_path):
    """It is to torch, and keeps the strides of the table that it was cut from."""
    column = torch.arange(6.0).view(2, 3)[1 : 1 + rows, 1]
    assert column.is_contiguous() and column.stride() == (3,)
    assert as_bytes(column).view(torch.float32).tolist() == [4.0][:rows]
    (sent,) = decode(encode(Message("push", {}, (column,)))).frames
    assert torch.equal(torch.as_tensor(sent), column)
    save_tensors(tmp_path / "model.safetensors", {"column": column})
    assert torch.equal(load_tensors(tmp_path / "model.safetensors")["column"], column)
