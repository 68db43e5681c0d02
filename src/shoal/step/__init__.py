"""One step, as all strategies take it: what is asked for, gradients, and what an optimizer may take."""
