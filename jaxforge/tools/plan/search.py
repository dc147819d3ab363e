"""Search for the best mesh, batch split and rematerialisation of a model on a machine.

The update stays the same: the same number of sequences, of the same length. Candidates are ranked
by `step.update_time`. Candidates that cannot fit by `step.memory` are dropped. The best are
compiled, each in a process of its own, so that a crash of the compiler ends one candidate only.
"""

import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

import jaxforge
from jaxforge.config import axes, rules
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model.runtime import kernel_target
from jaxforge.model.transformer import Model, build_model
from jaxforge.parallel.device_memory import bytes_per_device
from jaxforge.parallel.groups import number_of_groups
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.step.executable import installed_version
from jaxforge.step.execution import RECOMPUTATIONS, with_execution
from jaxforge.step.frozen_model import frozen_bytes
from jaxforge.step.memory import step_memory
from jaxforge.step.update_time import update_seconds
from jaxforge.storage import safe_files
from jaxforge.tools.plan import checks
from jaxforge.tools.plan.compiled import devices_of
from jaxforge.tools.plan.dry_run_memory import SLACK
from jaxforge.tools.plan.topology import Topology

_MOST_ROWS = 16
_MOST_TP = 8
_MOST_STAGES = 8
_LEAST_TOKENS = 8192  # of a sequence on each device of `cp`
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


class Candidate(NamedTuple):
    """A configuration that runs the same update.

    Attributes:
        config: the complete config.
        mesh: size of each axis.
        seconds: estimated seconds of an update, from sizes alone.
    """

    config: JobConfig
    mesh: dict[str, int]
    seconds: float


class CompiledCandidate(NamedTuple):
    """A candidate and its plan.

    Attributes:
        candidate: the candidate.
        report: its plan, as `--json` writes it.
    """

    candidate: Candidate
    report: dict[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices; 0 if the candidate does not run."""
        fits = self.report.get("fits") and "step" in self.report
        return self.report["step"]["tokens_per_second"] if fits else 0.0


def search(
    config: JobConfig, topology: Topology, *, most: int, jobs: int, console: Console
) -> list[CompiledCandidate]:
    """Compile the given config and the most promising candidates, and sort them by speed.

    Args:
        config: config of the update.
        topology: the target hardware.
        most: number of candidates to compile.
        jobs: number of concurrent compilers.
        console: console for the progress bar.

    Returns:
        All compiled candidates, the fastest first.

    Raises:
        UserError: the machine's speed is unknown, or no candidate is valid.
    """
    if topology.chip not in CHIPS:
        raise UserError(
            f"--search: the speed of {topology.chip} is unknown. Choose one of {', '.join(CHIPS)}"
        )
    # The config itself is compiled, too: the result is never worse than what the user has.
    configured = list(configured_candidate(config, topology))
    further = (
        candidate
        for candidate in fitting_candidates(config, topology)
        if candidate.config not in [item.config for item in configured]
    )
    chosen = [*configured, *itertools.islice(further, most)]
    if not chosen:
        raise UserError(
            f"--search: no mesh of {topology} fits this update. Use fewer sequences or more devices"
        )
    with (
        Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
        # Threads suffice: each waits for a compiler in a process.
        ThreadPoolExecutor(jobs) as pool,
    ):
        task = progress.add_task("compiling", total=len(chosen))

        def compile_candidate(candidate: Candidate) -> CompiledCandidate:
            result = CompiledCandidate(candidate, compiled_report(candidate.config, topology))
            progress.advance(task)
            return result

        compiled = pool.map(compile_candidate, chosen)
        return sorted(compiled, key=lambda candidate: -candidate.tokens_per_second)


def configured_candidate(config: JobConfig, topology: Topology) -> Iterator[Candidate]:
    """Yield the config itself if it is valid, so that the result is never worse."""
    if rules.broken(config, topology.n_devices):
        return
    mesh, chip = rules.mesh_shape(config, topology.n_devices), CHIPS[topology.chip]
    dp = axes.data_parallel(mesh)
    rows = config.train.microbatch_size(dp) // dp  # batch_size is ignored with global_batch_size
    explicit = replaced(config, {"batch_size": rows}, {})
    try:
        placed = make_mesh(explicit, devices_of(topology))
        resolved, _ = with_execution(explicit, placed, capacity=chip.memory, chip=chip)
        model = build_model(resolved, *kernel_target(placed))
    except UserError:
        return
    yield Candidate(resolved, mesh, update_seconds(resolved, model, placed, chip))


def fitting_candidates(config: JobConfig, topology: Topology) -> Iterator[Candidate]:
    """Yield the valid candidates that may fit, the fastest by `step.update_time` first."""
    chip = CHIPS[topology.chip]
    teacher, _ = checks.known_teacher(config, is_elsewhere=True)

    @functools.cache
    def model_of(save: str, pp: int) -> Model:
        values = {"distributed.pp": pp, "train.activation_checkpointing": save}
        return build_model(config.with_values(values), chip.platform)

    @functools.cache
    def state_of(mesh: Mesh) -> tuple[int, int] | None:
        """Return the bytes of the state and of the frozen model on a device.

        Return None if a parameter does not divide.
        """
        # The state is the same with every policy.
        model = model_of("full", mesh.shape["pp"])
        try:
            state = Program(config, mesh, model=model).abstract_state()
            return bytes_per_device(state), frozen_bytes(config, model, mesh, teacher)
        except UserError:
            return None

    # Lazily, the fastest first: only as many are checked as are compiled.
    for candidate, mesh in sorted(candidates(config, topology), key=lambda pair: pair[0].seconds):
        sizes, train = state_of(mesh), candidate.config.train
        if sizes is None or sum(sizes) > chip.memory:
            continue
        model = model_of(train.activation_checkpointing, candidate.mesh["pp"])
        memory = step_memory(candidate.config, model, mesh, *sizes)
        if memory.total <= SLACK * chip.memory:
            yield candidate


def candidates(config: JobConfig, topology: Topology) -> Iterator[tuple[Candidate, Mesh]]:
    """Yield all valid candidates with their meshes, in no particular order."""
    chip, devices = CHIPS[topology.chip], devices_of(topology)
    model = build_model(config, chip.platform)
    for mesh in meshes(config, topology.n_devices):
        try:
            placed = make_mesh(replaced(config, {}, mesh), devices)
        except UserError:  # an axis does not map to the torus
            continue
        for split in splits(config, topology, mesh):
            yield Candidate(split, mesh, update_seconds(split, model, placed, chip)), placed


def splits(config: JobConfig, topology: Topology, mesh: Mapping[str, int]) -> Iterator[JobConfig]:
    """Yield the config with every valid batch split, rematerialisation and gradient reduction."""
    # Invariant: batch_size * dp * grad_accum_steps stays the size of the update.
    rows, dp = sequences(config, topology.n_devices), axes.data_parallel(mesh)
    syncs = ("update", "microbatch") if axes.token_parallel(mesh) > 1 else ("update",)
    for each, save, sync in itertools.product(_powers(_MOST_ROWS), RECOMPUTATIONS, syncs):
        if rows % (dp * each):
            continue
        split = {"batch_size": each, "grad_accum_steps": rows // (dp * each)}
        variant = replaced(
            config, {**split, "activation_checkpointing": save, "grad_sync": sync}, mesh
        )
        if not rules.broken(variant, topology.n_devices):
            yield variant


def sequences(config: JobConfig, n_devices: int) -> int:
    """Return the number of sequences of an update.

    Raises:
        UserError: the number depends on a mesh that does not fit the machine.
    """
    if config.train.global_batch_size:
        return config.train.global_batch_size
    dp = axes.data_parallel(rules.mesh_shape(config, n_devices))
    return config.train.batch_size * dp * config.train.grad_accum_steps


def meshes(config: JobConfig, n_devices: int) -> Iterator[dict[str, int]]:
    """Yield meshes of this size.

    The number of groups that train apart stays the same.

    `cp` splits no sequence into parts shorter than `_LEAST_TOKENS`, unless the config does.
    """
    experts = _powers(config.model.num_experts) if config.model.is_moe else [1]
    context = {*_powers(config.train.seq_len // _LEAST_TOKENS), config.distributed.cp}
    stages, tensor = _powers(_MOST_STAGES), _powers(_MOST_TP)
    for pp, tp, ep, cp in itertools.product(stages, tensor, experts, sorted(context)):
        dp, left = divmod(n_devices, pp * tp * ep * cp)
        if left or not dp:
            continue
        for shard in (n for n in range(1, dp + 1) if dp % n == 0):
            sizes = {"pp": pp, "dp_replicate": dp // shard, "dp_shard": shard, "cp": cp}
            # Another number of groups that train apart would be another run.
            if sizes["dp_replicate"] == number_of_groups(config) or not number_of_groups(config):
                yield {**sizes, "ep": ep, "tp": tp}


def replaced(config: JobConfig, train: Mapping[str, Any], mesh: Mapping[str, int]) -> JobConfig:
    """Return the config with other values in `[train]` and in the axes of `[distributed]`."""
    return config.with_values(
        {
            "train": config.train.with_values(train),
            "distributed": config.distributed.with_values(mesh),
        }
    )


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def compiled_report(config: JobConfig, topology: Topology) -> dict[str, Any]:
    """Return the `--json` plan of a config, cached because compilation takes minutes."""
    text = config.to_toml()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cached = Path(cache, "jaxforge", "plan", f"{_key(text, topology)}.json")
    if cached.exists():
        return json.loads(cached.read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "candidate.toml")
        path.write_text(text)
        # A process of its own: a crash of the compiler costs one candidate.
        command = [sys.executable, "-m", "jaxforge.plan", f"--config={path}", "--json"]
        done = subprocess.run(
            [*command, f"--topology={topology}"], text=True, capture_output=True, check=False
        )
    # 2: the candidate is refused or does not fit, which is a valid report.
    if done.returncode not in (0, 2) or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"fits": False, "errors": [f"the compiler failed ({done.returncode}): {last}"]}
    report = json.loads(done.stdout)
    cached.parent.mkdir(parents=True, exist_ok=True)
    safe_files.replace_text(cached, done.stdout)
    return report


def _key(text: str, topology: Topology) -> str:
    """Return a cache key of the config, the topology, the compilers and jaxforge's own code."""
    parts = [text, str(topology), *map(installed_version, _PACKAGES)]
    root = Path(jaxforge.__file__).parent
    # Any change of jaxforge may change the program or its estimate.
    parts += [path.read_text() for path in sorted(root.rglob("*.py"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def settings(candidate: Candidate) -> Sequence[str]:
    """Return the command-line settings that run a candidate."""
    train = candidate.config.train
    axes = [f"--distributed.{axis}={size}" for axis, size in candidate.mesh.items()]
    return [
        *axes,
        f"--train.batch_size={train.batch_size}",
        f"--train.grad_accum_steps={train.grad_accum_steps}",
        f"--train.activation_checkpointing={train.activation_checkpointing}",
        f"--train.grad_sync={train.grad_sync}",
        *(f"--train.xla_flags.{name}={value}" for name, value in train.xla_flags.items()),
    ]
