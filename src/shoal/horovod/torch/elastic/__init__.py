"""Scripts whose world shrinks and grows: what they keep, and how they go on."""

from __future__ import annotations

from shoal.horovod.torch.elastic.going_on import run
from shoal.horovod.torch.elastic.sampler import ElasticSampler
from shoal.horovod.torch.elastic.state import ElasticState, ObjectState, TorchState

State = ElasticState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
