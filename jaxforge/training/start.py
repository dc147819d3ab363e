"""Start of a run in its directory: logs, checkpoints, and records of the start."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxforge.checkpoint import paths
from jaxforge.checkpoint.restore import Source, find_start
from jaxforge.config.checkpoint import Branch, CheckpointConfig
from jaxforge.config.ineffective_settings import answers, ineffective_settings
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model, parameter_count
from jaxforge.parallel import agreement
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.runs import run_directory, starts
from jaxforge.runs.attempts import AttemptLog
from jaxforge.state.progress import Progress
from jaxforge.storage import mirror, trust, urls
from jaxforge.telemetry.console import add_log_file
from jaxforge.training.health.watchdog import Watchdog
from jaxforge.training.saving import Saver
from jaxforge.training.summary import schedule_summary, write_summary

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The run directory with its checkpoints.

    Attributes:
        saver: the checkpoints of the run.
        is_new: True if the run has no checkpoint yet.
    """

    saver: Saver
    is_new: bool

    @classmethod
    def open(
        cls, config: JobConfig, model: Model, watchdog: Watchdog, attempt: AttemptLog
    ) -> "RunFiles":
        """Open the run directory, whose lock is held. Only logs are written.

        Args:
            config: the resolved config.
            model: the model.
            watchdog: writes the stacks of a hanging process into the directory.
            attempt: records this attempt in the directory.

        Raises:
            UserError: the run had checkpoints that no longer exist.
        """
        copier = run_directory.open_mirror(config)
        files = mirror.files(config.checkpoint.dir)
        add_log_file(files)
        attempt.open(files, jax.process_index())
        run_directory.log_config_changes(files, config)
        for answer in answers(config):
            log.info("%s", answer)
        watchdog.write_stacks_to(files / "logs" / f"stacks_{jax.process_index()}.txt")
        saver = Saver.of_run(config, model, copier)
        is_new = saver.is_empty()
        if is_new:
            _check_not_lost(config)
        return cls(saver, is_new)

    def rename_old_metrics(self, config: JobConfig) -> None:
        """Rename metrics of an earlier run that left no checkpoint, if this run begins."""
        if self.is_new:
            run_directory.rename_old_metrics(mirror.files(config.checkpoint.dir))

    def record_start(self, config: JobConfig, model: Model, progress: Progress, mesh: Mesh) -> None:
        """Write the config, the record of this start and the schedule summary, and log warnings.

        A start that is refused does not warn: without data, a new model trains on random tokens,
        and weights of a checkpoint are refused.

        Args:
            config: the resolved config.
            model: the model.
            progress: the counters at this start.
            mesh: the mesh of the run.
        """
        run = mirror.files(config.checkpoint.dir)
        run_directory.prepare(run, config)
        run_directory.record_start(run, config, progress.step)
        if jax.process_index() == 0:
            for warning in ineffective_settings(config, jax.default_backend()):
                log.warning("%s", warning)
            more: dict[str, Any] = {}
            if self.is_new and config.checkpoint.start_path:
                _keep_documents(config.checkpoint.start_path, run)
                more["parent"] = _parent(config.checkpoint, progress)
            _note_trust(config)
            devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
            parameters = parameter_count(model.abstract)
            replicas = self.saver.replicas
            more |= {"replicas": replicas.origin} if replicas else {}
            starts.note(run, progress.step, parameters=parameters, devices=devices, **more)
        dp = data_parallel_size(mesh)
        write_summary(run, schedule_summary(config, dp, progress.sequences_per_epoch))


def _parent(section: CheckpointConfig, progress: Progress) -> dict[str, Any]:
    """Return the record of the checkpoint from which a new run starts."""
    if section.branch:
        return {"run": section.branch.run, "step": progress.step, "is_branch": True}
    return {"run": section.load_path, "step": progress.step, "is_branch": False}


def resolve_branch(config: JobConfig) -> JobConfig:
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
    agreement.check({"checkpoint.branch_from": str(failure or branch)})
    if failure:
        raise failure
    pinned = section.model_copy(update={"branch_from": str(branch)})
    return config.model_copy(update={"checkpoint": pinned})


def resolve_base(config: JobConfig) -> JobConfig:
    """Return the config with the absolute path of the base model, if the run trains adapters.

    Later commands read the base again, and may run in another directory.
    """
    section = config.checkpoint
    path = section.load_path
    if not config.lora.rank or path is None or urls.in_bucket(path):
        return config
    pinned = section.model_copy(update={"load_path": str(Path(path).absolute())})
    return config.model_copy(update={"checkpoint": pinned})


def _start(section: CheckpointConfig) -> tuple[str, int]:
    run, step = find_start(section)
    return str(run), step


def _begun_branch(section: CheckpointConfig, branch: Branch) -> Branch | None:
    """Return the branch of the run in `checkpoint.dir`; None if it has no checkpoint.

    Raises:
        UserError: it is another branch, or none.
    """
    begun = _own_run(section)
    if begun is None:
        return None
    stored = (paths.stored_config(begun).get("checkpoint") or {}).get("branch_from")
    recorded = Branch.parse(stored or "")
    wanted = branch._replace(run=str(urls.path(branch.run).absolute()))
    if recorded is None or wanted not in (recorded, recorded._replace(step=None)):
        origin = f"branched off from {stored}" if stored else "is no branch"
        raise UserError(
            f"checkpoint.branch_from = {wanted}: the run in {begun} {origin}. Name a new "
            "checkpoint.dir; to resume the run there, leave checkpoint.branch_from out"
        )
    return recorded


def _own_run(section: CheckpointConfig) -> str | None:
    """Return the directory with checkpoints of this run; None before its first one."""
    own = (section.dir, section.non_persistent_dir)
    return next((path for path in own if path and paths.has_run(path)), None)


def _note_trust(config: JobConfig) -> None:
    """Let commands that open this run import its plugins without `--trust-plugins`."""
    try:
        trust.note(run_directory.root(config), config.plugins.names)
    except OSError as error:
        log.warning(
            "commands that open this run need --trust-plugins: cannot write %s: %s",
            error.filename, error.strerror,
        )  # fmt: skip


def _check_not_lost(config: JobConfig) -> None:
    """Refuse, on all processes, to restart a run whose checkpoints are lost.

    Raises:
        UserError: the run directory records saved checkpoints.
    """
    failure = None
    try:
        if jax.process_index() == 0:  # only process 0 has the files of a run in a bucket
            run_directory.check_not_lost(mirror.files(config.checkpoint.dir))
    except UserError as error:
        failure = error
    agreement.raise_on_all(failure)


def resolve_skip_idle_experts(config: JobConfig) -> JobConfig:
    """Return the config with `optimizer.skip_idle_experts` as the run began, unless it is set.

    The value comes from the checkpoints of the run, else from `checkpoint.start_path`. Runs of
    KempnerForge may have skipped experts without tokens; their continuation then skips them too.

    Raises:
        UserError: the checkpoint to start from is damaged or belongs to another model.
    """
    section = config.checkpoint
    if not config.model.is_moe or config.optimizer.skip_idle_experts is not None:
        return config
    start = _own_run(section)
    if start is None and "optimizer" not in section.exclude_from_loading:
        start = section.start_path
    if start is None:
        return config
    if paths.has_run(start):
        skips = (paths.stored_config(start).get("optimizer") or {}).get("skip_idle_experts")
    else:
        from torch_compat.checkpoint import restore  # only for runs that start from PyTorch

        skips = restore.counts_experts(start, config)
    if not skips:
        return config
    log.info(
        "optimizer.skip_idle_experts is set to true as in %s: updates skip experts without tokens",
        start,
    )  # fmt: skip
    return config.with_idle_experts_skipped()


def open_foreign(path: str, config: JobConfig) -> Source:
    """Open a PyTorch checkpoint that a run starts from."""
    from torch_compat.checkpoint import restore  # only for runs that start from PyTorch

    return restore.open_foreign(path, config)


def foreign_model(path: str) -> ModelConfig | None:
    """Return the `[model]` section of a PyTorch checkpoint; None if the checkpoint has no config.

    Raises:
        UserError: there is no checkpoint, or its config is invalid or not supported.
    """
    from torch_compat.checkpoint import checkpoints  # only for models that come from PyTorch

    config = checkpoints.find(path).config(None)
    return None if config is None else config.model


def _keep_documents(load_path: str, run: Path) -> None:
    """Copy the files of a Hugging Face model that later exports of the run need."""
    from torch_compat.checkpoint import restore  # only for runs that start from a checkpoint

    restore.copy_documents(load_path, run)
