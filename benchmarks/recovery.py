"""Cost of a replica in memory, and time of a restore from memory and from a bucket.

    python benchmarks/recovery.py [--quick]

The same random state (parameters and both AdamW moments in float32) is copied to memory and saved
to disk, alternately. Each save is directly followed by an in-place update of the whole state, so
that costs that a save defers to the next step count. Then the state is restored:

- from memory of this host;
- from memory of the peer over TCP, in this benchmark over loopback, which is not limited;
- from a bucket (`bucket_server.py`), which answers after 50 ms and sends at most `BANDWIDTH`.

All restores verify the state and end when its arrays are on the device.
"""

import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import results
from checkpoint import state_of
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.reading import Copy, Reader, read_tree
from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.checkpoint.replica.store import Store
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.parallel import host_memory
from jaxforge.parallel.stages import Stack
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.storage import COMMITTED, urls

DELAY = 0.05  # seconds to the first byte
BANDWIDTH = 400.0  # MB/s of a host from its bucket
TOKEN = b"t" * 32


class Saver(NamedTuple):
    """Subject of the comparison of saves."""

    save: Callable[[Progress, TrainState], object]
    wait: Callable[[], None]


def open_replicas(memory: Path, run: Path, state: TrainState) -> Replicas:
    """Return the replicas of a single process."""
    config = CheckpointConfig(replica_interval=1, replica_dir=str(memory))
    layers = len(jax.tree.leaves(state.params["layers"])[0])
    return Replicas(config, run, None, {}, Stack(layers))


def save_times(savers: dict[str, Saver], state: TrainState, rounds: int) -> dict[str, list[float]]:
    """Return median seconds of a call, of a call and the slower next update, and until the end."""
    update = jax.jit(
        lambda s: jax.tree.map(lambda x: (x * 0.999).astype(x.dtype), s), donate_argnums=0
    )
    times: dict[str, list[list[float]]] = {name: [] for name in savers}
    for step in range(1, rounds + 2):  # the first round is warm-up
        for name, saver in savers.items():
            clock = [time.perf_counter()]
            state = jax.block_until_ready(update(state))
            clock.append(time.perf_counter())
            saver.save(Progress(step=step), state)
            clock.append(time.perf_counter())
            state = jax.block_until_ready(update(state))
            clock.append(time.perf_counter())
            saver.wait()
            clock.append(time.perf_counter())
            alone, call, disturbed, _ = (b - a for a, b in itertools.pairwise(clock))
            times[name].append([call, call + disturbed - alone, clock[-1] - clock[1]])
    return {
        name: [statistics.median(column) for column in zip(*rows[1:], strict=True)]
        for name, rows in times.items()
    }


def restore_replica(store: Store, like: PyTree, source: transfer.Address | None) -> PyTree:
    """Restore the newest replica, from memory of this host or of a server."""
    group = store.groups()[-1]
    ((_, manifest),) = store.manifests(group)
    reader = Reader(group, store, TOKEN, {0: [Copy(0, source)]})
    index: dict = {}
    for shard in manifest.shards:
        index.setdefault(shard.array, []).append((0, shard))
    dtypes = {name: jnp.dtype(dtype) for name, (_, dtype) in manifest.arrays.items()}
    saved = unflatten_dict(
        {name: jax.ShapeDtypeStruct(shape, dtypes[name])
         for name, (shape, _) in manifest.arrays.items()}, sep=".",
    )  # fmt: skip
    return read_tree(reader, index, saved, like)


@contextlib.contextmanager
def bucket(directory: Path) -> Iterator[str]:
    """Serve a directory with limited bandwidth, and yield its URL."""
    script = Path(__file__).with_name("bucket_server.py")
    options = [f"--delay={DELAY}", f"--bandwidth={BANDWIDTH}"]
    command = [sys.executable, str(script), str(directory), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with mock.patch.dict("os.environ", settings):
            yield "s3://bucket"
        server.terminate()


def seconds(restore: Callable[[], PyTree], rounds: int) -> float:
    """Return the median time of a restore."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(restore())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def abstract(tree: PyTree) -> PyTree:
    """Return the abstract values of arrays with their shardings."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    results.leave_room()
    host_memory.keep_freed_memory()  # as a run does
    state, parameters, axes = state_of(quick)
    like, like_tree = abstract(state), abstract(layout.to_tree(state))
    size = sum(leaf.nbytes for leaf in flatten_dict(layout.to_tree(state), sep=".").values()) / 1e6
    rounds = 2 if quick else 5
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(dir=Path.cwd()) as disk,
    ):
        run = Path(disk) / "run"
        replicas = open_replicas(Path(memory), run, state)
        checkpoints = Checkpoints(run, CheckpointConfig(keep_last_n=1), axes)
        savers = {"theirs": Saver(checkpoints.save, checkpoints.wait),
                  "ours": Saver(replicas.save, replicas.wait)}  # fmt: skip
        saves = save_times(savers, state, rounds)
        del state
        checkpoints.close()
        step = checkpoints.path(rounds + 1)
        for directory in [step, *(path for path in step.iterdir() if path.is_dir())]:
            (directory / COMMITTED).touch()  # as in a bucket
        (data,) = Path(memory).rglob(f"step_{rounds + 1}.*/0.data")
        store = Store(data.parents[1])
        server = transfer.Server(store, "127.0.0.1", TOKEN)
        own, peer = (
            seconds(lambda source=source: restore_replica(store, like_tree, source), rounds)
            for source in (None, server.address)
        )
        server.close()
        with bucket(Path(disk)) as url:
            remote = Checkpoints(urls.path(f"{url}/run"), CheckpointConfig(), axes, read_only=True)
            from_bucket = seconds(lambda: remote.restore(like, rounds + 1)[0], rounds)
            remote.close()
    report(size, parameters, saves, own, peer, from_bucket, write=not quick)


def report(
    size: float,
    parameters: int,
    saves: dict[str, list[float]],
    own: float,
    peer: float,
    from_bucket: float,
    *,
    write: bool,
) -> None:
    """Print and write the rows."""
    what = f"{parameters / 1e6:.0f}M parameters, {size:,.0f} MB"
    cases = ("call", "call and slower next update", "until complete")
    rows = [
        results.Row(f"replica, {case}, {what}", round(1e3 * ours, 1), "checkpoint on disk",
                    round(1e3 * theirs, 1), "ms", smaller_is_better=True)
        for case, ours, theirs in zip(cases, saves["ours"], saves["theirs"], strict=True)
    ]  # fmt: skip
    peer_name = f"bucket, {BANDWIDTH:g} MB/s"
    rows += [
        results.Row(f"restore from {name}, {what}", round(ours, 2), peer_name,
                    round(from_bucket, 2), "s", smaller_is_better=True)
        for name, ours in (("this host", own), ("the peer over loopback", peer))
    ]  # fmt: skip
    notes = [f"the bucket answers after {1e3 * DELAY:g} ms and sends {BANDWIDTH:g} MB/s in all"]
    packages = ("jax", "orbax-checkpoint", "tensorstore")
    results.report("recovery", rows, packages, notes=notes, write=write)


if __name__ == "__main__":
    main()
