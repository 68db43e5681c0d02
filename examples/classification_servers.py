"""Ten workers and a parameter server: each trains on its own tenth of the data, the server averages.

    python examples/classification_servers.py
    shoal train examples/classification_servers.py --workers 10 --strategy ps:push=parameters,every=10

Every step is an epoch: the global batch is the whole data set, in its own order, so a worker sees the same hundred
samples again and again. Every 10 epochs the workers push their parameters, the server makes the mean of them the
model of all, and the loss over all thousand samples is shown.

Expected: a loss of 0.66 and an accuracy of 0.77 after 100 epochs. The training takes a second; starting twelve
processes that each import scikit-learn takes longer.
"""

import functools
import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

WORKERS, EPOCHS, PUSH_EVERY = 10, 100, 10
SAMPLES, FEATURES, INFORMATIVE, CLASSES = 1000, 20, 7, 10
STRATEGY = shoal.ParameterServer(servers=1, push="parameters", every=PUSH_EVERY)


@functools.cache
def samples() -> TensorDataset:
    """A random problem of ten classes; the labels are one-hot."""
    try:
        from sklearn.datasets import make_classification
    except ImportError as error:
        raise SystemExit("This example needs scikit-learn: run `pip install shoal[sklearn]`.") from error
    features, classes = make_classification(
        n_samples=SAMPLES,
        n_features=FEATURES,
        n_informative=INFORMATIVE,
        n_classes=CLASSES,
        n_clusters_per_class=1,
        random_state=0,
    )
    one_hot = nn.functional.one_hot(torch.from_numpy(classes), CLASSES)
    return TensorDataset(torch.from_numpy(features).float(), one_hot.float())


def accuracy(output: Tensor, one_hot: Tensor) -> float:
    """The share of samples whose class got the highest score."""
    return shoal.metrics.accuracy(output, one_hot.argmax(-1))


def task(lr: float = 0.5) -> shoal.Task:
    """What to train. The data is named, not made: the server has no use for it."""
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        train=samples,
        test=samples,
        batch_size=SAMPLES,
        shuffle=False,
        epochs=EPOCHS,
        evaluate_every=PUSH_EVERY,
        stop=shoal.Plateau(metric="loss", patience=1, min_delta=1e-6),
        metrics={"accuracy": accuracy},
    )


def main() -> None:
    """Train; the lines on the way show the loss every 10 epochs."""
    started = time.monotonic()
    run = shoal.train(task, workers=WORKERS, strategy=STRATEGY)
    print(f"run time {time.monotonic() - started:.1f} s")
    print(f"the server's last parameters are stored in {run.folder / 'model.safetensors'}, digest {run.digest}")


if __name__ == "__main__":
    main()
