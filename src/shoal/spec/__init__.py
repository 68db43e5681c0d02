"""What the user says, and where a process stands. Frozen data, checked when made; no torch at import."""

from shoal.spec.averaging import Average
from shoal.spec.callback import Callback, CallbackContext, Mishap
from shoal.spec.cluster import Cluster
from shoal.spec.conduct import Claim, Conduct
from shoal.spec.data import Data
from shoal.spec.job import Job
from shoal.spec.layerwise import Layer, LayerForm
from shoal.spec.model_parallel import Mesh, ModelParallel, Pipeline, Sharded, TensorParallel, as_mesh
from shoal.spec.parameter_server import ParameterServer
from shoal.spec.privacy import Privacy
from shoal.spec.sampling import Fold, Stratified, Weighted
from shoal.spec.step_form import StepForm
from shoal.spec.strategy import StrategySpec, parse_strategy
from shoal.spec.task import Plateau, Task
from shoal.spec.world import World

__all__ = [
    "Average",
    "Callback",
    "CallbackContext",
    "Claim",
    "Cluster",
    "Conduct",
    "Data",
    "Fold",
    "Job",
    "Layer",
    "LayerForm",
    "Mesh",
    "Mishap",
    "ModelParallel",
    "ParameterServer",
    "Pipeline",
    "Plateau",
    "Privacy",
    "Sharded",
    "StepForm",
    "StrategySpec",
    "Stratified",
    "Task",
    "TensorParallel",
    "Weighted",
    "World",
    "as_mesh",
    "parse_strategy",
]
