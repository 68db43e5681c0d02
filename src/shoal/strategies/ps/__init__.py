"""The parameter server as a strategy: where the model lies, what servers do with it, how workers use it."""
