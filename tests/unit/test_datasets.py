"""Data sets: their shapes, that they are the same every time, and torch's ways of reading them."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from shoal import datasets
from shoal.errors import SpecError


def test_digits_have_64_scaled_features_and_ten_classes():
    train, test = datasets.digits()
    inputs, targets = train.tensors
    assert inputs.shape == (1437, 64) and inputs.dtype == torch.float32
    assert len(test) == 360
    assert inputs.min() == 0 and inputs.max() == 1
    assert set(targets.tolist()) == set(test.tensors[1].tolist()) == set(range(10))


def test_digits_split_is_the_same_every_time_and_shares_nothing():
    (train, test), (again, _) = datasets.digits(), datasets.digits()
    assert torch.equal(train.tensors[0], again.tensors[0])
    train_rows = {tuple(row) for row in train.tensors[0].tolist()}
    assert not any(tuple(row) in train_rows for row in test.tensors[0].tolist())


def test_digits_images_are_the_same_digits():
    (flat, _), (images, _) = datasets.digits(), datasets.digits_images()
    assert images[3][0].shape == (1, 8, 8)
    assert torch.equal(images[3][0].flatten(), flat[3][0])


def test_digits_are_those_that_scikit_learn_loads():
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    train, test = datasets.digits()
    found = sorted((int(target), inputs.tolist()) for part in (train, test) for inputs, target in part)
    assert found == sorted((int(one), (row / 16).tolist()) for row, one in zip(pixels, classes, strict=True))


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SpecError, match=r"pip install shoal\[sklearn\]"):
        datasets.digits()


def test_text_targets_are_the_next_tokens():
    train, _ = datasets.python_text(block_size=32, max_bytes=100_000)
    inputs, target = train[5]
    assert inputs.shape == target.shape == (32,) and inputs.dtype == torch.int64
    assert torch.equal(inputs[1:], target[:-1])
    assert train[6][0][0] == target[-1]
    assert b"import" in bytes(train.tokens.tolist())


def test_text_is_the_same_every_time_and_bounded():
    (train, test), (again, _) = (datasets.python_text(64, max_bytes=200_000) for _ in range(2))
    assert torch.equal(train.tokens, again.tokens)
    assert len(train.tokens) + len(test.tokens) <= 200_000
    assert len(train.tokens) == pytest.approx(9 * len(test.tokens), rel=0.01)


def test_text_reads_many_blocks_at_once_as_torch_loaders_ask():
    train, _ = datasets.python_text(16, max_bytes=50_000)
    many = train.__getitems__([0, 7, len(train) - 1])
    for sample, index in zip(many, [0, 7, -1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(sample, train[index], strict=True))
    inputs, target = next(iter(DataLoader(train, batch_size=4)))
    assert inputs.shape == target.shape == (4, 16)


@pytest.mark.parametrize("index", ["past", "before"])
def test_text_refuses_an_index_outside(index):
    train, _ = datasets.python_text(16, max_bytes=50_000)
    with pytest.raises(IndexError, match="must lie within"):
        train[len(train) if index == "past" else -len(train) - 1]


def test_text_refuses_blocks_longer_than_the_text():
    with pytest.raises(SpecError, match="use shorter blocks"):
        datasets.python_text(block_size=100_000, max_bytes=50_000)


def test_importing_the_leaves_does_not_import_torch():
    code = "import sys, shoal.datasets, shoal.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
