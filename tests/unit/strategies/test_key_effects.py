"""Every key of every strategy does something: seen in what is decided or built by it, or in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.compression import make_compression
from shoal.errors import SpecError
from shoal.feed.parts import LoadedBatch, Part
from shoal.layout.schedules import make_schedule
from shoal.layout.state_cuts import CutParameter, cut_state
from shoal.model.replica import Replica
from shoal.ps.shard import Shard
from shoal.roles.coordinator import make_plan
from shoal.spec import Average, Cluster, Conduct, Job, Layer, Mesh, ParameterServer, Task, World, parse_strategy
from shoal.spec.model_parallel import ModelParallel, as_mesh
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.average.gossip import neighbours
from shoal.strategies.base import Company, Extent, Setting, Strategy
from shoal.strategies.groups.opening import open_group
from shoal.strategies.layer.phased import phase_of
from shoal.strategies.mesh.tensor.cutting import explain_width
from shoal.strategies.ps.bulk import frames_of
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.contributions import GradientMaker
from shoal.strategies.ps.group import PushGroup
from shoal.strategies.ps.making import make_contribute
from shoal.strategies.ps.served import Served

TESTS = Path(__file__).parents[2]
DIGITS = TESTS.parent / "examples" / "digits.py"
BATCH, SLOTS, STEPS = 8, 2, 4
INPUTS = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(BATCH) % 4


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)
    )


TASK = Task(
    model=model,
    loss=F.cross_entropy,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    train=TensorDataset(INPUTS, TARGETS),
    batch_size=BATCH,
)


# What can be seen of a written strategy.


def conduct(written: str, workers: int = 2) -> Conduct:
    return parse_strategy(written).conduct(Cluster(workers=workers))


def made(written: str) -> str:
    """The kind of strategy that each of two workers has."""
    return type(make_strategy(parse_strategy(written), World(world_size=2), 2)).__name__


def trained(written: str, slots: int = 1) -> Any:
    """A strategy in the arena after some steps of one process."""
    spec = parse_strategy(written)
    strategy: Any = make_strategy(spec, World(), slots)
    setting = Setting(
        world=World(),
        conduct=spec.conduct(Cluster(), slots),
        extent=Extent(total_steps=STEPS, batch_size=BATCH),
        company=Company(report=lambda line: None),
    )
    replica = Replica(TASK)
    strategy.open(replica, setting)
    replica.train_mode()
    for step in range(1, STEPS):
        parts = tuple(Part(slot, rows(slot, slots), float(BATCH)) for slot in range(slots))
        cast(Strategy, strategy).take(Work(step, parts, 0))
    return strategy


def rows(slot: int, slots: int) -> Callable[[], Iterator[LoadedBatch]]:
    first, last = BATCH * slot // slots, BATCH * (slot + 1) // slots
    return lambda: iter([((INPUTS[first:last], TARGETS[first:last]), float(last - first), last - first)])


def served(written: str, workers: int = 2) -> Served:
    """A process's view of a served model."""
    spec, slots = parse_strategy(written), conduct(written, workers).slots
    assert isinstance(spec, ParameterServer)
    return Served.open(spec, Replica(TASK), World(), slots=slots, workers=workers)


def bytes_by_server(written: str) -> list[int]:
    placement = served(written).placement
    return [
        sum(size for size, owner in zip(placement.shard_bytes, placement.owners, strict=True) if owner == server)
        for server in range(2)
    ]


def pushed_bytes(written: str) -> int:
    """What a push of everything weighs on the wire."""
    open_ = served(written)
    for view in open_.memory.views("gradients/0"):
        view.copy_(torch.randn(view.shape))
    open_.memory.touched(0).fill_(1)
    frames = frames_of(open_.memory, 0, 0, make_compression(open_.spec.compress))
    return sum(frame.nbytes if isinstance(frame, torch.Tensor) else len(frame) for frame in frames)


def contributor(written: str) -> str:
    """What a worker does with its cells."""
    client = SimpleNamespace(machine=SimpleNamespace(leases=object()))
    with patch("shoal.strategies.ps.making.PushGroup"):
        maker = make_contribute(served(written), cast(Any, client), cast(Any, None), World())
    maker_name = type(maker).__name__
    if maker_name == "PoolMaker":
        maker.close()
    return maker_name


def frees_parameters(written: str) -> bool:
    return conduct(written).frees_parameters


def talk(written: str) -> str:
    """What two workers talk through."""
    spec: Any = parse_strategy(written)
    with (
        patch("shoal.strategies.groups.opening.open_memory", return_value="memory"),
        patch("shoal.strategies.groups.opening.open_sockets", return_value="sockets"),
        patch("shoal.strategies.groups.backend.open_backend", return_value="backend"),
    ):
        return cast(str, open_group(spec.via, cast(Any, SimpleNamespace(world=World(world_size=2)))))


def leaders(written: str) -> list[int]:
    """Who pushes for a group of two, by clock."""
    seat: Any = SimpleNamespace(_spec=parse_strategy(written), ranks=range(2))
    return [PushGroup._leader(seat, clock) for clock in range(4)]


def begins_before_the_last_push_is_safe(written: str) -> bool:
    asked: list[bool] = []
    client: Any = SimpleNamespace(
        served=SimpleNamespace(spec=parse_strategy(written)),
        machine=SimpleNamespace(outstanding=1, slots=None),
        is_redealt=False,
        puller=SimpleNamespace(begin=lambda clock: None),
        wait=lambda is_done: asked.append(is_done()),
    )
    PsClient.begin(client, 2)
    return asked[0]


def weight_of_a_late_gradient(written: str) -> float:
    shard: Any = SimpleNamespace(rules=served(written).rules, version=5)
    push: Any = SimpleNamespace(cells=[0], based_on=0)
    return Shard._share_of(shard, push)


def saved_before_an_update(written: str) -> bool:
    """Whether a server keeps a block's old values."""
    open_ = served(written)
    store = open_.make_values(0, 0)
    store.initialise()
    assert store.journal is not None
    store.journal.save(0)
    return bool(open_.memory.undo(0, 0).any())


def planned(written: str) -> Any:
    """What the coordinator is told."""
    return make_plan(Job(target=str(DIGITS), strategy=written, cluster=Cluster(workers=2)), World())


def mesh(written: str, workers: int = 2) -> Mesh:
    spec = parse_strategy(written)
    assert isinstance(spec, ModelParallel)
    return as_mesh(spec, workers)


def spans(written: str) -> list[tuple[int, int]]:
    """Of each parameter of a layer and of a larger one, what the first of two workers keeps."""
    grid = mesh(written)
    params = [
        CutParameter(layer=layer, numel=numel) for layer, numel in (("a", 64), ("a", 8), ("b", 300), ("b", 3))
    ]
    (cut,) = cut_state([params], workers=2, policy=grid.policy, capacities=grid.capacities)
    return [cut.span(number, 0) for number in range(len(params))]


def order(written: str) -> Any:
    """What two workers do with four micro-batches."""
    grid = mesh(written)
    return make_schedule(grid.schedule, workers=2, per_worker=grid.stages_per_worker).actions(4)


def cut_layers(written: str) -> list[str]:
    """How a model is cut by its width, told in lines."""
    replica = Replica(TASK, sample=lambda: (INPUTS, TARGETS))
    return explain_width(replica, mesh(written).plan, mesh(written).norms, 2, saves_memory=False)


def turns(written: str) -> list[int]:
    """Which group of layers trains, by step."""
    spec = parse_strategy(written)
    assert isinstance(spec, Layer)
    return [phase_of(step, spec) for step in range(1, 7)]


@dataclass(frozen=True)
class Effect:
    """What a key changes: without it, and with it."""

    key: str
    without: str
    written: str
    seen: Callable[[str], Any]
    expected: Any = None
    """With it; None: just something else than without."""


def agreements(written: str) -> list[int]:
    """After which of the first steps all agree."""
    spec = parse_strategy(written)
    assert isinstance(spec, Average)
    return [step for step in range(1, 11) if spec.is_agreement(step, 2)]


def sent_after(written: str) -> dict[int, list[int]]:
    """By step of a round of four: the parts of the parameters that are sent."""
    spec = parse_strategy(written)
    assert isinstance(spec, Average)
    return {step: parts for step in range(1, 5) if (parts := spec.parts_sent(step))}


def met_by_each(written: str) -> Any:
    """By worker of four: whom it agrees with first."""
    spec = parse_strategy(written)
    assert isinstance(spec, Average)
    return "all" if spec.agrees_with_all else [neighbours(spec.with_, index, 4, 0) for index in range(4)]


ONE_AXIS = {"sharded": "shard", "tensor": "tensor", "pipeline": "pipeline"}
"""Strategies whose keys are those of a mesh."""

EFFECTS = [
    Effect("data.via", "data", "data:via=ring", made, "CollectiveData"),
    Effect("data.via", "data:via=ring", "data:via=arena", made, "ArenaData"),
    Effect(
        "data.batchnorm",
        "data:via=arena",
        "data:via=arena,batchnorm=sync",
        lambda written: trained(written)._shared.segment.room(0).counter(None)[0] > 0,
        True,
    ),
    Effect("data.shares", "data", "data:shares=1+3", lambda w: conduct_of_four(w).slots_per_worker, (1, 3)),
    Effect(
        "data.shares",
        "data",
        "data:shares=speed",
        lambda written: trained(written, SLOTS).sizes(STEPS - 1) is not None,
        True,
    ),
    Effect("data.partition", "data", "data:partition=relay", made, "RelayData"),
    Effect(
        "data.journal",
        "data:via=arena",
        "data:via=arena,journal=off",
        lambda written: bool(trained(written)._shared.segment.tensor("undo/0", torch.uint8).any()),
        False,
    ),
    Effect("ps.servers", "ps", "ps:servers=2", lambda written: conduct(written).servers, 2),
    Effect("ps.sync", "ps", "ps:sync=ssp:3", lambda written: str(served(written).consistency), "ssp:3"),
    Effect(
        "ps.replicas",
        "ps:servers=2",
        "ps:servers=2,replicas=0",
        lambda written: set(served(written).placement.backups),
        {None},
    ),
    Effect("ps.shards", "ps", "ps:shards=3", lambda written: len(served(written).placement.shards), 3),
    Effect(
        "ps.placement", "ps:shards=3", "ps:shards=3,placement=count", lambda w: served(w).placement.shards, None
    ),
    Effect(
        "ps.capacities",
        "ps:servers=2",
        "ps:servers=2,placement=capacity,capacities=3+1",
        lambda written: (b := bytes_by_server(written))[0] > 2 * b[1],
        True,
    ),
    Effect("ps.wire", "ps", "ps:wire=tcp", lambda written: served(written).listens_at(World())[:3], "tcp"),
    Effect(
        "ps.compress",
        "ps:wire=tcp",
        "ps:wire=tcp,compress=int8",
        lambda w: pushed_bytes(w) < pushed_bytes("ps:wire=tcp") / 2,
        True,
    ),
    Effect("ps.push", "ps", "ps:push=parameters", lambda written: served(written).rules.average, True),
    Effect("ps.every", "ps:push=parameters", "ps:push=parameters,every=3", lambda w: served(w).rules.every, 3),
    Effect("ps.via", "ps", "ps:via=ring", contributor, "GroupMaker"),
    Effect("ps.leader", "ps:via=ring", "ps:via=ring,leader=rotate", leaders, [0, 1, 0, 1]),
    Effect("ps.pool", "ps:sync=asp", "ps:sync=asp,pool=count:4", contributor, "PoolMaker"),
    Effect("ps.hosts", "ps:servers=host", "ps:servers=host,hosts=3", lambda w: conduct(w, 3).servers, 3),
    Effect(
        "ps.agree",
        "ps:servers=host",
        "ps:servers=host,agree=ring",
        lambda written: served(written).rules.together,
    ),
    Effect(
        "ps.overlap",
        "ps:sync=asp",
        "ps:sync=asp,overlap=on",
        lambda w: GradientMaker(served(w), cast(Any, None), cast(Any, None))._pushes_by_parts,
        True,
    ),
    Effect("ps.ahead", "ps:sync=asp", "ps:sync=asp,ahead=1", begins_before_the_last_push_is_safe, True),
    Effect(
        "ps.shares",
        "ps:sync=asp",
        "ps:sync=asp,shares=speed",
        lambda written: "shares" in planned(written).adjust and served(written).rules.slots,
        8,
    ),
    Effect("ps.rate", "ps:sync=asp", "ps:sync=asp,rate=full", weight_of_a_late_gradient, 1.0),
    Effect("ps.damping", "ps:sync=asp", "ps:sync=asp,damping=staleness", weight_of_a_late_gradient, 0.5 / 3.0),
    Effect("ps.adjust", "ps:sync=asp", "ps:sync=asp,adjust=rate", lambda w: "rate" in planned(w).adjust, True),
    Effect("ps.diverging", "ps:sync=asp", "ps:sync=asp,diverging=stop", lambda w: planned(w).max_rollbacks, 0),
    Effect("ps.journal", "ps", "ps:journal=off", saved_before_an_update, False),
    Effect("sharded.policy", "sharded", "sharded:policy=layer", spans, [(0, 0), (0, 0), (0, 300), (0, 3)]),
    Effect(
        "sharded.capacities",
        "sharded",
        "sharded:policy=device,capacities=0+1",
        spans,
        [(0, 0)] * 4,
    ),
    Effect("tensor.plan", "tensor", "tensor:plan=*=whole", cut_layers),
    Effect("pipeline.schedule", "pipeline", "pipeline:schedule=gpipe", order),
    Effect("pipeline.microbatches", "pipeline", "pipeline:microbatches=6", lambda w: conduct(w).microbatches, 6),
    Effect("pipeline.per_worker", "pipeline", "pipeline:per_worker=2", lambda w: mesh(w).num_stages, 4),
    Effect("pipeline.preprocess", "pipeline", "pipeline:preprocess=2", lambda w: conduct(w).preprocess, 2),
    Effect("mesh.data", "mesh:data=1,tensor=4", "mesh:data=2,tensor=2", lambda w: conduct(w, 4).has_copies, True),
    Effect("mesh.shard", "mesh:tensor=2,via=backend", "mesh:shard=2,via=backend", frees_parameters, True),
    *(Effect(f"{name}.via", name, f"{name}:via=backend", talk, "backend") for name in ONE_AXIS),
    Effect("layer.via", "layer", "layer:via=sockets", talk, "sockets"),
    Effect("mesh.pipeline", "mesh:data=2", "mesh:pipeline=2", lambda w: conduct(w).calls_model, False),
    Effect("mesh.tensor", "mesh:data=2", "mesh:tensor=2", lambda w: conduct(w).width is not None, True),
    Effect("layer.phases", "layer:phases=2,every=1", "layer:phases=3,every=1", turns, [0, 1, 2, 0, 1, 2]),
    Effect("layer.every", "layer:phases=2,every=1", "layer:phases=2,every=2", turns, [0, 0, 1, 1, 0, 0]),
    Effect("layer.decoupled", "layer", "layer:decoupled=on", lambda w: conduct(w).puts_aside, "head"),
    Effect("average.every", "average", "average:every=3", agreements, [3, 6, 9]),
    Effect("average.parts", "average:every=4", "average:every=4,parts=2", sent_after, {2: [0], 4: [1]}),
    Effect("average.after", "average:every=3", "average:every=3,after=4", agreements, [7, 10]),
    Effect("average.with_", "average", "average:with=ring", met_by_each, [[1, 3], [0, 2], [1, 3], [0, 2]]),
    Effect("average.with_", "average:with=ring", "average:with=pairs", met_by_each, [[3], [2], [1], [0]]),
]

IN_REAL_RUNS = {
    **dict.fromkeys(
        [
            f"average.{key}"
            for key in (
                "outer",
                "rate",
                "momentum",
                "weight",
                "clip",
                "via",
            )
        ],
        "equivalence/test_average.py",
    ),
    **dict.fromkeys(
        [
            f"average.{key}"
            for key in ("prox", "clients", "share", "partition", "scaffold", "held", "buffer", "oldest")
        ],
        "equivalence/test_federated.py",
    ),
    **dict.fromkeys(["average.init", "average.combine"], "equivalence/test_ensembles.py"),
    **dict.fromkeys(["average.inside", "average.groups"], "equivalence/test_inside.py"),
    "average.compress": "equivalence/test_compressed.py",
    "average.clips": "equivalence/test_average.py",
    "average.delay": "equivalence/test_streaming.py",
    "average.secure": "equivalence/test_private.py",
    "ps.standby": "integration/launch/test_several_hosts.py",
    "data.between": "contract/test_strategies.py",
    "sharded.stage": "integration/test_sharded_memory.py",
    "sharded.offload": "integration/test_gpu.py",
    "sharded.batchnorm": "equivalence/test_sharded.py",
    "tensor.norms": "equivalence/test_tensor.py",
    "pipeline.split": "equivalence/test_pipeline.py",
    "layer.place": "equivalence/test_layerwise.py",
    "layer.weights": "equivalence/test_layer_decoupled.py",
}
"""What takes several processes to be seen: where it is."""


def conduct_of_four(written: str) -> Conduct:
    return parse_strategy(written).conduct(Cluster(workers=2), 4)


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.written)
def test_a_key_has_its_effect(effect: Effect) -> None:
    without, found = effect.seen(effect.without), effect.seen(effect.written)
    assert found != without
    assert effect.expected is None or found == effect.expected


def test_no_key_is_left_out() -> None:
    names = ("average", "data", "ps", "sharded", "tensor", "pipeline", "layer")
    keys = {f"{name}.{field.name}" for name in names for field in fields(parse_strategy(name))}
    keys |= {f"mesh.{axis}" for axis in ("data", "shard", "pipeline", "tensor")}
    assert {effect.key for effect in EFFECTS} | IN_REAL_RUNS.keys() == keys
    for key, file in IN_REAL_RUNS.items():
        assert f"{key.partition('.')[2]}=" in (TESTS / file).read_text(encoding="utf-8"), key


def test_keys_of_one_axis_are_those_of_a_mesh() -> None:
    """So what they do there is what they do in a mesh; and a mesh has no others."""
    shared = set[str]()
    for name, axis in ONE_AXIS.items():
        spec = parse_strategy(name)
        shared |= {field.name for field in fields(spec)}
        assert mesh(name) == Mesh(**{axis: 2})
    assert {field.name for field in fields(Mesh)} == shared | {"data", "shard", "pipeline", "tensor"}
    assert mesh("sharded:stage=1,policy=count") == Mesh(shard=2, stage=1, policy="count")
    assert mesh("tensor:plan=a=row,norms=replicated") == Mesh(tensor=2, plan="a=row", norms="replicated")
    assert mesh("pipeline:schedule=gpipe,split=1+2") == Mesh(pipeline=2, schedule="gpipe", split="1+2")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("data:via=ring,journal=off", "journal=off acts only in shared memory"),
        ("ps:compress=int8", "compress=int8 acts only on what travels"),
        ("ps:wire=tcp,journal=off", "journal=off acts only in the host's memory"),
        ("ps:capacities=2+1", "capacities=2\\+1 acts only with placement=capacity"),
        ("ps:agree=ring", "agree=ring acts only with servers=host"),
        ("ps:servers=2,placement=capacity", "placement=capacity acts only where servers share the model"),
        ("ps:servers=host,placement=count", "placement=count acts only where servers share the model"),
        ("ps:ahead=1", "ahead=1 acts only where workers do not go in lockstep"),
        ("ps:diverging=stop", "diverging=stop acts only where workers do not go in lockstep"),
        ("ps:sync=quorum:1/2,rate=full", "rate=full acts only where a gradient may be an update of its own"),
        ("ps:sync=asp,push=parameters,damping=staleness", "damping=staleness acts only where a gradient"),
        (
            "ps:sync=asp,push=parameters,adjust=rate",
            "adjust=rate acts only as far as there is something to adjust",
        ),
        ("ps:adjust=rate", "adjust=rate acts only"),
        ("ps:sync=ssp:3,adjust=eviction", "eviction with sync=asp or shares=speed"),
        ("ps:push=parameters,overlap=on", "overlap=on acts only where each gradient is pushed by itself"),
        ("mesh:tensor=2,stage=1", "stage=1 acts only with shard=2 or more"),
        ("average:rate=0.5", "rate=0.5 acts only with an outer optimizer"),
        ("average:share=0.5", "share=0.5 acts only with clients"),
        ("average:clients=4,partition=own,oldest=3", "oldest=3 acts only where nobody waits for clients"),
        ("average:held=0.2", "held=0.2 acts only with clients"),
        ("average:scaffold=on", "scaffold=on acts only with clients"),
        ("average:with=ring,clip=norm:1", "clip=norm:1 acts only where all agree"),
        ("average:with=pairs,outer=adam", "outer=adam acts only where all agree"),
        ("average:combine=ensemble,outer=adam", "outer=adam acts only where all agree"),
        ("average:clips=parameters", "clips=parameters acts only with clip="),
        ("average:groups=2", "groups=2 acts only with inside=data"),
        ("average:with=ring,parts=2", "parts=2 acts only where all agree"),
        ("average:combine=ensemble,with=ring", "with=ring acts only where workers agree"),
        ("layer:every=3", "every=3 acts only where layers take turns"),
        ("layer:weights=1+2", "weights=1\\+2 acts only with decoupled=on"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(written: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_strategy(written)


def test_on_a_gpu_there_is_a_journal_only_where_its_memory_is_shared() -> None:
    with pytest.raises(SpecError, match="which device=cuda uses with via=arena alone; leave it out"):
        Job(target="a.py", strategy="data:journal=off", cluster=Cluster(workers=2, device="cuda"))
    Job(target="a.py", strategy="data:journal=off,via=arena", cluster=Cluster(workers=2, device="cuda"))


def test_there_is_nothing_to_offload_on_the_cpu() -> None:
    with pytest.raises(SpecError, match="but device=cpu; leave offload out"):
        Job(target="a.py", strategy="sharded:offload=on", cluster=Cluster(workers=2))
    Job(target="a.py", strategy="sharded:offload=on", cluster=Cluster(workers=2, device="cuda"))
