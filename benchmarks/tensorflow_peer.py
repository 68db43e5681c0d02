"""TensorFlow's asynchronous ParameterServerStrategy on the benchmark's MLP: as its guide says, and tuned by hand.

A script for an interpreter that has tensorflow and numpy, without Shoal or torch. It starts the parameter servers
and workers as processes of their own, coordinates them, and prints a `Measurement` as its last line.

Both ways are reported. Without options it is what TensorFlow documents for loops of one's own, so what its users
run: `tf.keras.optimizers.SGD`, made in the strategy's scope, and `apply_gradients` in the scheduled function. With
`--tuned` it has all that made it faster and that few users know of.

What was tried, so that neither is a straw man; times are processor time of all processes for one worker's step:
- Updates: Keras 3 updates by many small operations. With `--tuned` `ResourceApplyMomentum` goes straight to the
  server's variables, in place and without locks, as with the v1 `MomentumOptimizer`.
- Allocator: with `--tuned` freed memory is kept besides, as Shoal's own workers do: 210 ms in place of 240 ms.
- Both together: 213 ms, where the documented way took 231 ms beside it, on a busy machine.
- Reads: each variable is read once per step. Leaving that to the tape makes no difference.
- Threads: one in an operation. Between operations two, for with one the workers wait for ever; four are no faster.
- Data: constants in the worker's graph, picked by a random number, so that no batch is ever sent.
- Two servers: kernels are created first and dealt out in turn, which halves the bytes exactly. Cutting each
  variable with a `MinSizePartitioner` is no faster, for its parts are put together again at every read.
- XLA for the forward and backward pass: no faster.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import itertools
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WIDTHS = (1024, *[2048] * 5, 1000)
BATCH, BATCHES_PER_PROCESS = 64, 8
LEARNING_RATE, MOMENTUM = 0.01, 0.9
STEPS = 40
"""Measured steps per worker. The workload is that of `benchmarks.models.mlp`; a test holds them together."""

THREADS_IN_OPERATION, THREADS_BETWEEN_OPERATIONS = 1, 2
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""For glibc: big buffers come from the heap and stay there, instead of going back to the kernel at every step."""
Cluster = dict[str, list[str]]
"""Job name, `ps` or `worker`, to the addresses of its processes."""
Update = Callable[[Sequence[Any]], list[Any]]
"""Applies gradients to the servers' variables; what it gives is there once that is done."""
MakeUpdate = Callable[[Any, Sequence[Any]], Update]
"""`(strategy, variables) -> Update`, called in the strategy's scope."""

PR_SET_PDEATHSIG = 1
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure TensorFlow's ParameterServerStrategy.")
    parser.add_argument("--name", default="tensorflow_ps", help="the variant's name in what is printed")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="workers")
    parser.add_argument("--steps", type=int, default=STEPS, help="measured steps per worker")
    parser.add_argument("--tuned", action="store_true", help="with all that makes it faster")
    parser.add_argument("--job", choices=("ps", "worker"), help="set for the processes that this one starts")
    parser.add_argument("--index", type=int, help="which of its job's processes it is")
    parser.add_argument("--cluster", type=json.loads, help="all addresses, as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Be what the command line says: one of the started processes, or the one that starts and measures."""
    arguments = parse(argv)
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"})
    if arguments.job:
        serve(arguments.cluster, arguments.job, arguments.index)
        return
    # The default action ends this process even while TensorFlow waits in C++; the others follow it by `die_with`.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(os.getppid())
    keep_to_loopback()
    cluster = free_addresses(arguments.servers, arguments.processes)
    with started(cluster, KEEP_FREED_MEMORY if arguments.tuned else {}):
        make_update = make_tuned_update if arguments.tuned else make_documented_update
        completions = train(cluster, warm_up_steps(arguments.steps) + arguments.steps, make_update)
        print(json.dumps(report(arguments.name, arguments.processes, arguments.steps, completions)), flush=True)
    # Without TensorFlow's own farewell, which waits for servers that are gone.
    os._exit(0)


def die_with(parent: int) -> None:
    """Have the kernel end this process when the one with this id, which started it, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def keep_to_loopback() -> None:
    """Enter a network of our own with nothing but loopback: TensorFlow listens on every interface, to anyone."""
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET):
        print(
            "tensorflow_peer: no network namespace here, its ports are open to all while it runs", file=sys.stderr
        )
        return
    with socket.socket() as any_socket:
        request = struct.pack("16sh22x", b"lo", IFF_UP | IFF_RUNNING)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


def free_addresses(servers: int, workers: int) -> Cluster:
    """An address on loopback for each process."""
    with contextlib.ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(servers + workers)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = ["{}:{}".format(*one.getsockname()) for one in sockets]
    return {"ps": addresses[:servers], "worker": addresses[servers:]}


@contextlib.contextmanager
def started(cluster: Cluster, settings: dict[str, str]) -> Iterator[None]:
    """Every server and worker as a process, ended with the block; one that ends earlier ends the whole run."""
    finished = threading.Event()
    command = [sys.executable, "-P", __file__, "--cluster", json.dumps(cluster)]
    processes = {
        f"{job} {index}": subprocess.Popen(
            [*command, "--job", job, "--index", str(index)],
            env={**os.environ, **settings},
            preexec_fn=functools.partial(die_with, os.getpid()),
        )
        for job, addresses in cluster.items()
        for index in range(len(addresses))
    }

    def watch(name: str, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not finished.is_set():
            print(f"tensorflow_peer: {name} ended with status {status} before the run did", file=sys.stderr)
            os._exit(1)

    for name, process in processes.items():
        threading.Thread(target=watch, args=(name, process), daemon=True).start()
    try:
        yield
    finally:
        finished.set()
        for process in processes.values():
            process.kill()


def serve(cluster: Cluster, job: str, index: int) -> None:
    """Be a parameter server or a worker until killed."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=THREADS_IN_OPERATION, inter_op_parallelism_threads=THREADS_BETWEEN_OPERATIONS
    )
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config
    )
    server.join()


def train(cluster: Cluster, steps: int, make_update: MakeUpdate) -> list[tuple[float, float]]:
    """Coordinate so many steps per worker: the time and loss of each, in the order in which they were done.

    Each worker has one step more to do, so that all of them are still busy when the last counted one is done.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS_IN_OPERATION)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS_BETWEEN_OPERATIONS)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    workers = len(cluster["worker"])
    with strategy.scope():
        step = make_step(strategy, BATCHES_PER_PROCESS * workers, make_update)
    scheduled = [coordinator.schedule(step) for _ in range((steps + 1) * workers)]
    coordinator.join()
    return sorted((float(when), float(loss)) for when, loss in (one.fetch() for one in scheduled))[:-workers]


def make_step(strategy: Any, batches: int, make_update: MakeUpdate) -> Callable[[], Any]:
    """One worker's asynchronous step, which gives the time when its update was applied, and its loss."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((batches, BATCH, WIDTHS[0]), dtype=np.float32)
    targets = generator.integers(0, WIDTHS[-1], (batches, BATCH), dtype=np.int32)
    # Kernels before biases: the strategy deals variables out to servers in turn, and so each gets as many bytes.
    shapes = [*itertools.pairwise(WIDTHS), *((width,) for width in WIDTHS[1:])]
    bounds = [width**-0.5 for width in WIDTHS[:-1]] * 2
    initial = [generator.uniform(-bound, bound, shape) for bound, shape in zip(bounds, shapes, strict=True)]
    variables = [tf.Variable(values, dtype=tf.float32) for values in initial]
    update = make_update(strategy, variables)

    def replica_step() -> Any:
        batch = tf.random.uniform([], 0, batches, tf.int32)
        params = [variable.read_value() for variable in variables]
        with tf.GradientTape() as tape:
            tape.watch(params)
            loss = mean_loss(params, tf.gather(inputs, batch), tf.gather(targets, batch))
        with tf.control_dependencies(update(tape.gradient(loss, params))):
            return tf.timestamp(), tf.identity(loss)

    @tf.function
    def step() -> Any:
        return strategy.run(replica_step)

    return step


def make_documented_update(strategy: Any, variables: Sequence[Any]) -> Update:
    """As TensorFlow's guide to loops of one's own does it: an optimizer of Keras, made in the strategy's scope."""
    import tensorflow as tf

    optimizer = tf.keras.optimizers.SGD(learning_rate=LEARNING_RATE, momentum=MOMENTUM)
    optimizer.build(variables)

    def update(gradients: Sequence[Any]) -> list[Any]:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        # Keras gives no operation to wait for. A look at a variable's shape comes behind what was written to it.
        return [tf.raw_ops.VariableShape(input=variable.handle) for variable in variables]

    return update


def make_tuned_update(strategy: Any, variables: Sequence[Any]) -> Update:
    """By hand: the fused operation of TensorFlow's own runtime, straight on the servers' variables."""
    import tensorflow as tf

    velocities = []
    for variable in variables:
        with strategy.extended.colocate_vars_with(variable):
            velocities.append(tf.Variable(tf.zeros(variable.shape), trainable=False))

    def update(gradients: Sequence[Any]) -> list[Any]:
        return [
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle, accum=velocity.handle, grad=gradient, lr=LEARNING_RATE, momentum=MOMENTUM
            )
            for variable, velocity, gradient in zip(variables, velocities, gradients, strict=True)
        ]

    return update


def mean_loss(params: Sequence[Any], inputs: Any, targets: Any) -> Any:
    """Cross-entropy of the perceptron with these kernels and, behind them, biases."""
    import tensorflow as tf

    layers = len(params) // 2
    hidden = inputs
    for place, (kernel, bias) in enumerate(zip(params[:layers], params[layers:], strict=True)):
        hidden = tf.matmul(hidden, kernel) + bias
        if place + 1 < layers:
            hidden = tf.nn.relu(hidden)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=hidden))


def report(variant: str, processes: int, steps: int, completions: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A `Measurement` over the last `steps` steps of each worker: all samples over the seconds they took."""
    times = [when for when, _ in completions]
    measured = steps * processes
    step_s = (times[-1] - times[-1 - measured]) / steps
    # A step of all workers together, whoever takes how many of its parts.
    begins, ends = times[-1 - measured : -processes], times[-1 - measured + processes :]
    rounds = [end - begin for begin, end in zip(begins, ends, strict=True)]
    lower, median, upper = (
        statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else [step_s] * 3
    )
    return {
        "variant": variant,
        "model": "mlp",
        "processes": processes,
        "step_s": step_s,
        "spread": (upper - lower) / median,
        "samples_per_s": BATCH * processes / step_s,
        "loss": completions[-1][1],
    }


def warm_up_steps(steps: int) -> int:
    """Steps of each worker before the measured ones."""
    return max(3, steps // 10)


if __name__ == "__main__":
    main(sys.argv[1:])
