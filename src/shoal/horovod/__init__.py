"""Horovod's interface for torch, and for Keras on it, on Shoal's groups: `import shoal.horovod.torch as hvd`.

requests      what a process wants done, and whether all want the same
negotiation   which of it all have asked for, in an order that all agree on; no I/O
parley        meeting in rounds: what all say, who has not come, and who has left
letter_parley the same between hosts, in messages
assembly      all processes, or some, as a group with a parley
over_hosts    the same on several hosts
reductions    average, sum, minimum, maximum, product, Adasum
operations    what was agreed on, done in a group
engine        the thread that negotiates and does it, behind handles
runtime       this process among the others: `init`, `rank`, process sets
timeline      what happened when, for chrome://tracing
torch         what scripts import
keras         what scripts that call Keras's `fit` import
elastic       worlds that shrink and grow
names         answers to `horovod` in scripts that are not to be changed
run           `horovodrun`'s flags
"""
