"""Resolution of a config at the start of a run: devices, data, checkpoints and execution.

`resolve_run` is the only place that changes the config of a run. `config.resolution` has the part
that needs neither checkpoints nor devices.
"""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxforge.checkpoint import paths
from jaxforge.checkpoint.restore import find_start
from jaxforge.config.checkpoint import Branch, CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.resolution import ResolvedRun, World, resolve
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.parallel import agreement
from jaxforge.parallel.mesh import make_mesh
from jaxforge.runs import run_directory, starts
from jaxforge.step.execution import with_execution
from jaxforge.storage import urls
from jaxforge.training.foreign import counts_experts
from jaxforge.training.frozen import teacher_model
from jaxforge.training.health.watchdog import Watchdog


def resolve_run(
    config: JobConfig | UnresolvedConfig, watchdog: Watchdog
) -> tuple[ResolvedRun, Mesh]:
    """Return the config that this start uses, once all processes agree on it, and its mesh.

    Collective.

    Raises:
        UserError: processes have different configs, the run was moved, the config breaks a rule, or
            the checkpoint to start from cannot be used.
    """
    # Collectives below would hang if processes disagreed about them.
    agreement.check(starts.facts_of_start(config) if jax.process_count() > 1 else {})
    if isinstance(config, UnresolvedConfig):
        run_directory.check_not_moved(config)
    with watchdog.section("data"):  # for lengths in epochs
        run = resolve(config, World(jax.device_count(), jax.process_count()), sequences_per_epoch)
    # Later commands read these paths from the config of the run, maybe in another directory.
    run = run.after(with_branch(run.config), "the checkpoint that the run branched off from")
    run = run.after(with_base(run.config), "the absolute path")
    run = with_idle_experts(run)
    # Execution comes last: it depends on all values above, and is not recorded.
    written, teacher = run.config, teacher_model(run.config)
    mesh = make_mesh(written)
    config, why = with_execution(written, mesh, teacher=teacher)
    return dataclasses.replace(run.after(config, why), written=written, teacher=teacher), mesh


def with_branch(config: JobConfig) -> JobConfig:
    """Return the config with the absolute path and the step of `checkpoint.branch_from`.

    Every process of the job must call this function.

    Raises:
        UserError: there is no such checkpoint, the processes of the job see different ones, or the
            run in `checkpoint.dir` is not this branch.
    """
    section = config.checkpoint
    if section.branch is None:
        return config
    branch, failure = section.branch, None
    try:
        branch = _begun_branch(section, section.branch) or Branch(*_start(section))
    except UserError as error:
        failure = error
    # Hosts with different views of a shared disk would start from different states.
    agreement.check({"checkpoint.branch_from": str(failure or branch)})
    if failure:
        raise failure
    return config.with_values({"checkpoint.branch_from": str(branch)})


def with_base(config: JobConfig) -> JobConfig:
    """Return the config with the absolute path of the base model, if the run trains adapters."""
    path = config.checkpoint.load_path
    if not config.lora.rank or path is None or urls.in_bucket(path):
        return config
    return config.with_values({"checkpoint.load_path": str(Path(path).absolute())})


def with_idle_experts(run: ResolvedRun) -> ResolvedRun:
    """Return the run with `optimizer.skip_idle_experts` as it began, unless it is set.

    The value comes from the checkpoints of the run, else from `checkpoint.start_path`. Runs of
    KempnerForge may have skipped experts without tokens; their continuation then skips them too.

    Raises:
        UserError: the checkpoint to start from is damaged or belongs to another model.
    """
    config, section = run.config, run.config.checkpoint
    if not config.model.is_moe or config.optimizer.skip_idle_experts is not None:
        return run
    # A run keeps the rule that it began with, even if the default changes.
    start = _begun_run(section)
    if start is None and "optimizer" not in section.exclude_from_loading:
        start = section.start_path
    if start is None:
        return run
    if paths.has_run(start):
        skips = (paths.stored_config(start).get("optimizer") or {}).get("skip_idle_experts")
    else:
        skips = counts_experts(start, config)
    if not skips:
        return run
    return run.after(config.with_values({"optimizer.skip_idle_experts": True}), f"as in {start}")


def _start(section: CheckpointConfig) -> tuple[str, int]:
    run, step = find_start(section)
    return str(run), step


def _begun_branch(section: CheckpointConfig, branch: Branch) -> Branch | None:
    """Return the branch of the run in `checkpoint.dir`; None if it has no checkpoint.

    Raises:
        UserError: the run is not this branch.
    """
    begun = _begun_run(section)
    if begun is None:
        return None
    stored = (paths.stored_config(begun).get("checkpoint") or {}).get("branch_from")
    recorded = Branch.parse(stored or "")
    absolute = branch._replace(run=str(urls.path(branch.run).absolute()))
    if recorded is None or absolute not in (recorded, recorded._replace(step=None)):
        origin = f"branched off from {stored}" if stored else "is not a branch"
        raise UserError(
            f"checkpoint.branch_from = {absolute}: the run in {begun} {origin}. Name a new "
            "checkpoint.dir; to resume the run there, leave checkpoint.branch_from out"
        )
    return recorded


def _begun_run(section: CheckpointConfig) -> str | None:
    """Return the directory with checkpoints of this run; None before its first one."""
    directories = (section.dir, section.non_persistent_dir)
    return next((path for path in directories if path and paths.has_run(path)), None)
