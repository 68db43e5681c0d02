"""Using a model: evaluation and prediction."""
