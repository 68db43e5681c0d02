"""A model's file written tensor by tensor is what others write at once."""

import pytest
import torch
from safetensors.torch import save_file

from shoal.checkpoint.model_file import digest, load_tensors
from shoal.checkpoint.model_stream import TensorStream, save_stream
from shoal.errors import CheckpointError


def tensors():
    torch.manual_seed(1)
    weight = torch.randn(7, 5)
    return {
        "z.weight": weight,
        "a.tied": weight,
        "middle": torch.randn(3, 4).t(),
        "count": torch.tensor(3),
        "half": torch.randn(5).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "double": torch.randn(2, dtype=torch.float64),
    }


def test_same_values_as_the_formats_own_writer(tmp_path):
    key = save_stream(tmp_path / "streamed.safetensors", TensorStream.of(tensors()), steps="4")
    assert key == digest(tensors())
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors().items()}, tmp_path / "whole.safetensors"
    )
    streamed, whole = (load_tensors(tmp_path / f"{name}.safetensors") for name in ("streamed", "whole"))
    assert streamed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert streamed[name].dtype == tensor.dtype
        assert torch.equal(streamed[name], tensor), name


def test_tensors_are_taken_one_at_a_time(tmp_path):
    given = TensorStream.of(tensors())
    alive = []

    def one_by_one():
        for name, tensor in given.tensors:
            alive.append(name)
            yield name, tensor.clone()
            assert alive.pop() == name  # written before the next is asked for

    path = tmp_path / "model.safetensors"
    save_stream(path, TensorStream(looks=given.looks, tensors=one_by_one()))
    assert len(load_tensors(path)) == len(tensors())


def test_what_was_not_announced_is_refused_and_leaves_nothing(tmp_path):
    given, changed = TensorStream.of(tensors()), {**tensors(), "count": torch.tensor(3.0)}
    stream = TensorStream(looks=given.looks, tensors=TensorStream.of(changed).tensors)
    with pytest.raises(CheckpointError, match="'count'"):
        save_stream(tmp_path / "model.safetensors", stream)
    assert not list(tmp_path.iterdir())


def test_a_torn_stream_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "model.safetensors"
    save_stream(path, TensorStream.of(tensors()))

    def torn():
        yield from list(TensorStream.of(tensors()).tensors)[:3]
        raise OSError("the others are gone")

    with pytest.raises(OSError, match="gone"):
        save_stream(path, TensorStream(looks=TensorStream.of(tensors()).looks, tensors=torn()))
    assert len(load_tensors(path)) == len(tensors())
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
