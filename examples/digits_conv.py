"""Handwritten digits with a small convolutional network and batch normalisation.

    shoal train examples/digits_conv.py --workers 2
    shoal train examples/digits_conv.py --workers 2 --strategy data:batchnorm=sync

The first normalises each worker's part of a batch by itself, as most do; the second by the whole batch.

Expected: a test accuracy of about 0.98 after 6 epochs, in seconds.
"""

import torch
from torch import nn

import shoal


def conv_block(channels_in: int, channels_out: int) -> nn.Sequential:
    """A convolution that keeps the image's size; its bias would be undone by the normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def conv_net(width: int) -> nn.Sequential:
    """Two blocks at 8 x 8, one at 4 x 4, then one score per digit."""
    return nn.Sequential(
        conv_block(1, width),
        conv_block(width, 2 * width),
        nn.MaxPool2d(2),
        conv_block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def task(width: int = 16, lr: float = 0.05) -> shoal.Task:
    """What to train."""
    train, test = shoal.datasets.digits_images()
    return shoal.Task(
        model=lambda: conv_net(width),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-4),
        train=train,
        test=test,
        batch_size=64,
        epochs=6,
        metrics={"accuracy": shoal.metrics.accuracy},
    )
