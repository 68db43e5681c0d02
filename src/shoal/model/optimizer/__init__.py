"""The task's optimizer: which kinds there are, over which part of a model they run, what they keep."""
