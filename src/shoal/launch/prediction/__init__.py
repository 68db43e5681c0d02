"""Prediction as the process sees it that asked for it: what goes to the workers, and the rows that come back."""
