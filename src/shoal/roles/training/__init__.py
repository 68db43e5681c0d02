"""Training: the loop, and what goes on around its steps."""
