"""Synchronous data parallel: one step for all, computed on parts of the batch."""
