"""Which form of a step is the fastest for a task on this machine: tried before the run."""
