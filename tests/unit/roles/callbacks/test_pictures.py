"""Images of all shapes become PNG files that others can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.errors import TaskError
from shoal.roles.callbacks.pictures import pixels_of, write_picture

GREY = np.arange(30, dtype=np.uint8).reshape(5, 6) * 8
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=2)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (GREY, GREY),
        (GREY[:, :, None], GREY),
        (COLOUR, COLOUR),
        (COLOUR.transpose(2, 0, 1), COLOUR),
        (torch.from_numpy(COLOUR).permute(2, 0, 1).float().div(255).requires_grad_(), COLOUR),
        (GREY > 100, (GREY > 100) * 255),
        (np.array([[-1.0, np.nan], [0.5, 2.0]]), [[0, 0], [128, 255]]),
        (np.full((2, 2), 300), np.full((2, 2), 255)),
        (Image.fromarray(COLOUR), COLOUR),
        ([[0, 255]], [[0, 255]]),
    ],
)
def test_what_is_written_is_what_was_given(tmp_path: Path, image: Any, expected: Any) -> None:
    path = write_picture(tmp_path / "images", "a/b: c", 7, image)
    assert path.name == "a-b-c-7.png"
    with Image.open(path) as found:
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_opacity_is_kept() -> None:
    assert pixels_of("x", np.zeros((5, 6, 4), np.uint8)).shape == (5, 6, 4)


@pytest.mark.parametrize("image", [np.zeros(3), np.zeros((2, 2, 2, 2)), np.zeros((5, 6, 7)), np.array([["a"]])])
def test_what_is_no_image_is_refused(image: Any) -> None:
    with pytest.raises(TaskError, match=r"log\('x', …\) takes a number, a text, or an image"):
        pixels_of("x", image)
