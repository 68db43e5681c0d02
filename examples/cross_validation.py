"""Five folds of a classifier, spread over two processes, as scikit-learn's users write it.

    python examples/cross_validation.py

Expected: a mean accuracy of about 0.97.
"""

from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from shoal.sklearn import ShoalClassifier, cross_validate


def main() -> None:
    """Train and test on each fold."""
    inputs, labels = load_digits(return_X_y=True)
    network = ShoalClassifier(hidden_layer_sizes=(128,), epochs=10, random_state=0)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    found = cross_validate(make_pipeline(StandardScaler(), network), inputs, labels, cv=folds, workers=2)
    for number, score in enumerate(found["test_score"], start=1):
        print(f"fold {number}: accuracy {score:.4f}")
    print(f"mean: {found['test_score'].mean():.4f}")


if __name__ == "__main__":
    main()
