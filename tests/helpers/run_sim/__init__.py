"""Whole runs in one thread: the supervisor's own machine, hosts and processes that are simulated, virtual time.

A seed is a run: what is trained and how, on how many hosts, what happens to whom and when.
"""

from helpers.run_sim.run import RunFailed, Undone, simulate

__all__ = ["RunFailed", "Undone", "simulate"]
