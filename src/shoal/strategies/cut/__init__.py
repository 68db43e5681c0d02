"""A model cut into stages on several workers: its graph, what travels between stages, and how they are run."""
