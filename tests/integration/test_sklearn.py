"""Networks as scikit-learn's estimators, and folds and candidates spread over processes."""

from __future__ import annotations

import os
import pickle
import re
import signal
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from joblib import Parallel, delayed, parallel_config
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator
from torch import nn

from helpers.scripts import run_as_main
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.sklearn import ShoalClassifier, ShoalRegressor, cross_validate, grid_search, register
from shoal.sklearn.calls import CallPool

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "a batch has so many samples, whatever they weigh, and "
    "repeated ones make more batches; a test below has all in one"
}
"""By check: why an estimator does not pass it."""
QUICK = ("unfitted", "clone", "n_features_in", "get_params", "pickle", "y_2d", "no_attributes", "1sample")


@pytest.fixture(autouse=True)
def warm(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


def flowers() -> tuple[np.ndarray, np.ndarray]:
    data = load_iris()
    return StandardScaler().fit_transform(data.data), data.target


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ShoalClassifier, ShoalRegressor])
def test_scikit_learns_own_checks(kind):
    found = check_estimator(kind(), on_skip=None, expected_failed_checks=EXPECTED_FAILURES)
    assert len(found) > 50
    skipped = {one["check_name"] for one in found if one["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}, "which needs a variable of scipy's"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ShoalClassifier, ShoalRegressor])
def test_some_of_scikit_learns_own_checks(kind):
    count = 0
    for estimator, check in estimator_checks_generator(kind(epochs=2)):
        if any(word in str(check) for word in QUICK):
            check(estimator)
            count += 1
    assert count >= 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ShoalClassifier, ShoalRegressor])
def test_a_sample_that_weighs_two_is_two_samples(kind):
    rng = np.random.default_rng(0)
    inputs, weights = rng.standard_normal((30, 4)), rng.integers(0, 3, 30)
    targets = (inputs @ [1, -2, 0.5, 0] > 0).astype(int) if kind is ShoalClassifier else inputs[:, :2]
    settings = {"hidden_layer_sizes": (8,), "epochs": 20, "batch_size": 1000, "random_state": 0}
    if kind is ShoalClassifier:
        settings["class_weight"] = {0: 1.0, 1: 3.0}
    weighted = kind(**settings).fit(inputs, targets, sample_weight=weights)
    repeated = kind(**settings).fit(inputs.repeat(weights, 0), targets.repeat(weights, 0))
    score = "predict_proba" if kind is ShoalClassifier else "predict"
    expected = getattr(repeated, score)(inputs)
    np.testing.assert_allclose(getattr(weighted, score)(inputs), expected, rtol=1e-3, atol=1e-4)
    plain = getattr(kind(**settings).fit(inputs, targets), score)(inputs)
    assert abs(plain - expected).max() > 1e-2  # or the weights would have had no effect
    with pytest.raises(ValueError, match="at least one non-zero number"):
        weighted.fit(inputs, targets, sample_weight=np.zeros(30))
    stopping = kind(**settings | {"early_stopping": True, "batch_size": 8})
    assert stopping.fit(inputs, targets, sample_weight=weights).n_steps_ > 0


def test_weights_count_alike_in_two_workers():
    inputs, labels = flowers()
    weights = np.linspace(0, 2, len(labels))
    settings = {"hidden_layer_sizes": (8,), "epochs": 2, "random_state": 0}
    for extra, given in (({}, weights), ({"class_weight": {0: 0.0, 1: 9.0}}, None)):
        one, two = (
            ShoalClassifier(workers=workers, **settings, **extra).fit(inputs, labels, sample_weight=given)
            for workers in (1, 2)
        )
        np.testing.assert_allclose(two.predict_proba(inputs), one.predict_proba(inputs), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="leaves no sample that counts"):
        ShoalClassifier(class_weight=dict.fromkeys(range(3), 0.0)).fit(inputs, labels)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"class_weight": {5: 2.0}}, r"classes, \[0, 1, 2\], are not in class_weight"),
        ({"optimizer": "adam"}, "optimizer is a class of torch's, as torch.optim.Adam, found 'adam'"),
        ({"module": 3}, "module= is a torch module, or makes one, found 3"),
    ],
)
def test_what_is_set_wrong_is_said(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        ShoalClassifier(**wrong).fit(*flowers())


def test_one_hidden_layer_may_be_a_number():
    one, other = (ShoalRegressor(None, layers, epochs=1, random_state=0) for layers in (8, (8,)))
    inputs, labels = flowers()
    assert np.array_equal(one.fit(inputs, labels).predict(inputs), other.fit(inputs, labels).predict(inputs))


def test_modules_functions_and_layer_sizes_learn_flowers():
    inputs, labels = flowers()
    names = np.array(["setosa", "versicolor", "virginica"])[labels]
    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    before = torch.get_rng_state()
    for module in (
        None,
        given,
        lambda wide, narrow: nn.Sequential(nn.Linear(wide, 8), nn.ELU(), nn.Linear(8, narrow)),
    ):
        model = ShoalClassifier(module, epochs=20, random_state=0).fit(inputs, names)
        assert model.score(inputs, names) > 0.94
        assert model.predict_proba(inputs).sum(1) == pytest.approx(1)
        copy = pickle.loads(pickle.dumps(model)) if not callable(module) or module is given else clone(model)
        if hasattr(copy, "module_"):
            assert np.array_equal(copy.predict_proba(inputs), model.predict_proba(inputs))
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are its own"


@pytest.mark.long
def test_workers_and_strategies_learn_the_same():
    inputs, labels = flowers()
    alone = ShoalClassifier(epochs=5, random_state=0).fit(inputs, labels)
    for strategy in ("data", "ps:sync=bsp"):
        model = ShoalClassifier(epochs=5, random_state=0, workers=2, strategy=strategy).fit(inputs, labels)
        assert np.allclose(model.predict_proba(inputs), alone.predict_proba(inputs), atol=1e-4)


def test_going_on_stopping_early_and_weights_of_classes():
    inputs, labels = flowers()
    warm = ShoalClassifier(epochs=3, warm_start=True, random_state=0).fit(inputs, labels)
    first = warm.score(inputs, labels)
    assert warm.fit(inputs, labels).fit(inputs, labels).score(inputs, labels) >= first
    step = ShoalClassifier(random_state=0).partial_fit(inputs[:100], labels[:100], classes=[0, 1, 2])
    for _ in range(20):
        step.partial_fit(inputs, labels)
    assert step.score(inputs, labels) > 0.94
    stopped = ShoalClassifier(epochs=400, early_stopping=True, patience=2, random_state=0).fit(inputs, labels)
    assert stopped.n_steps_ < 400 * 4
    biased = ShoalClassifier(epochs=10, class_weight={0: 1e-4, 1: 1e-4, 2: 1000}, random_state=0)
    assert (biased.fit(inputs, labels).predict(inputs) == 2).mean() > 0.5
    balanced = ShoalClassifier(epochs=10, class_weight="balanced", random_state=0).fit(inputs, labels)
    assert balanced.score(inputs, labels) > 0.9
    with pytest.raises(ValueError, match="which is not one of"):
        step.partial_fit(inputs, labels + 1)


def test_numbers_one_or_several():
    inputs, targets = make_regression(200, 5, n_targets=2, noise=0.1, random_state=0)
    targets = StandardScaler().fit_transform(targets)
    for shape in (targets, targets[:, 0]):
        model = make_pipeline(StandardScaler(), ShoalRegressor(epochs=30, random_state=0)).fit(inputs, shape)
        assert model.predict(inputs).shape == shape.shape and model.score(inputs, shape) > 0.9


@pytest.mark.long
def test_folds_are_scikit_learns_own():
    inputs, labels = flowers()
    model = ShoalClassifier(epochs=3, random_state=0)
    found = cross_validate(model, inputs, labels, cv=3, workers=2, return_train_score=True)
    assert len(found["test_score"]) == len(found["train_score"]) == 3
    alone = cross_validate(model, inputs, labels, cv=3, workers=1)
    assert found["test_score"] == pytest.approx(alone["test_score"])


@pytest.mark.long
def test_searches_use_the_backend():
    inputs, labels = flowers()
    grid = {"C": [0.01, 1.0], "fit_intercept": [True, False]}
    search = grid_search(LogisticRegression(), grid, inputs, labels, cv=3)
    register()
    with parallel_config("shoal", n_jobs=2):
        by_hand = GridSearchCV(LogisticRegression(), grid, cv=3).fit(inputs, labels)
        # In workers, not here.
        pids = Parallel()(delayed(os.getpid)() for _ in range(8))
    assert search.best_params_ == by_hand.best_params_ and search.best_score_ == by_hand.best_score_
    assert os.getpid() not in pids and len(set(pids)) <= 2


@pytest.mark.long
def test_the_pages_examples_and_the_five_folds_run(tmp_path, zygote):
    root = Path(__file__).parents[2]
    page = (root / "docs" / "sklearn.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block, said in zip(blocks, ("True\n{'shoalclassifier__lr': ", "[0, 1, 4, 9]\n"), strict=True):
        script = tmp_path / "example.py"
        script.write_text(block)
        answer = run_as_main(script, folder=tmp_path, zygote=zygote)
        assert answer.returncode == 0 and answer.stdout.startswith(said), answer.stdout + answer.stderr
    answer = run_as_main(root / "examples" / "cross_validation.py", folder=tmp_path, zygote=zygote)
    assert answer.stdout.count("fold ") == 5 and float(answer.stdout.split()[-1]) > 0.95, answer.stderr


def test_calls_of_a_process_that_died_are_made_by_another(tmp_path):
    def die_once(mark: Path, number: int) -> int:
        # In here, so that it travels by itself: workers need not import this file.
        if number == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    register()
    with parallel_config("shoal", n_jobs=2):
        found = Parallel()(delayed(die_once)(tmp_path / "died", number) for number in range(6))
        assert found == [0, 1, 4, 9, 16, 25] and (tmp_path / "died").exists()
        with pytest.raises(ZeroDivisionError):
            Parallel()(delayed(divmod)(1, number) for number in (1, 0))


@pytest.mark.long
def test_calls_are_made_on_other_hosts_and_survive_the_loss_of_one(tmp_path, monkeypatch):
    monkeypatch.delenv(ZYGOTE_VARIABLE)  # each agent has one of its own

    def where(large: bytes) -> tuple[str, int]:
        # Alike on this machine, but for their agents.
        agent = next(one for one in psutil.Process().parents() if "--join" in one.cmdline())
        return agent.cmdline()[-1], len(large)

    def lose_host(mark: Path) -> str:
        agent = next(one for one in psutil.Process().parents() if "--join" in one.cmdline())
        if not mark.exists():
            mark.touch()
            agent.kill()
            signal.pause()
        return agent.cmdline()[-1]

    with CallPool(3, on="local:2") as pool:
        found = [future.result(60) for future in [pool.submit(partial(where, bytes(20 << 20))) for _ in range(12)]]
        assert {name for name, _ in found} == {"host-0", "host-1"} and {size for _, size in found} == {20 << 20}
        assert pool.submit(partial(lose_host, tmp_path / "lost")).result(60) in ("host-0", "host-1")
        left = {future.result(60)[0] for future in [pool.submit(partial(where, b"")) for _ in range(6)]}
        assert len(left) == 1
    inputs, labels = flowers()
    grid = {"C": [0.01, 1.0]}
    spread = grid_search(LogisticRegression(), grid, inputs, labels, cv=3, workers=2, on="local:2")
    here = GridSearchCV(LogisticRegression(), grid, cv=3).fit(inputs, labels)
    assert np.array_equal(spread.cv_results_["mean_test_score"], here.cv_results_["mean_test_score"])


def test_a_call_that_kills_every_process_is_given_up():
    with CallPool(2) as pool:
        deadly = pool.submit(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(WorkerFailed, match="3 processes that did this call have died"):
            deadly.result(timeout=60)
        assert pool.submit(lambda: 7).result(timeout=60) == 7
