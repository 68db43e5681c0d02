"""From samples to batches: reading, preparing in other processes, loading ahead, shipping between workers.

A floor below the strategies: a batch flows down to them, and nothing here knows how it is used.
"""
