"""Start of a run in its directory: logs, checkpoints, and records of the start."""

import dataclasses
import logging
from typing import Any

import jax

from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.ineffective_settings import answers, ineffective_settings
from jaxforge.config.job import JobConfig
from jaxforge.config.resolution import ResolvedRun
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model, parameter_count
from jaxforge.parallel import agreement
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.program import Program
from jaxforge.runs import run_directory, starts
from jaxforge.runs.attempts import AttemptLog
from jaxforge.state.progress import Progress
from jaxforge.storage import mirror, trust
from jaxforge.telemetry.console import add_log_file
from jaxforge.training.foreign import keep_documents
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
        has_begun: True if the run starts from a checkpoint, its own or another one.
    """

    saver: Saver
    is_new: bool
    has_begun: bool

    @classmethod
    def open(
        cls, run: ResolvedRun, model: Model, watchdog: Watchdog, attempt: AttemptLog
    ) -> "RunFiles":
        """Open the run directory, whose lock is held. Only logs are written.

        Raises:
            UserError: the run had checkpoints that no longer exist.
        """
        config = run.recorded
        copier = run_directory.open_mirror(config)
        files = mirror.files(config.checkpoint.dir)
        add_log_file(files)
        attempt.open(files, jax.process_index())
        run_directory.log_config_changes(files, config)
        for answer in (*run.notes, *answers(config)):
            log.info("%s", answer)
        watchdog.write_stacks_to(files / "logs" / f"stacks_{jax.process_index()}.txt")
        # Logs are open by now, so that the messages of a failed restore are in the run.
        saver = Saver.of_run(config, model, copier)
        is_new = saver.is_empty()
        if is_new:
            _check_not_lost(config)
        return cls(saver, is_new, not is_new or config.checkpoint.start_path is not None)

    def rename_old_metrics(self, config: JobConfig) -> None:
        """Rename metrics of an earlier run that left no checkpoint, if this run begins."""
        if self.is_new:
            run_directory.rename_old_metrics(mirror.files(config.checkpoint.dir))

    def record_start(self, resolved: ResolvedRun, program: Program, progress: Progress) -> None:
        """Write the config, the record of this start and the schedule summary, and log warnings.

        A start that is refused does not warn: without data, a new model trains on random tokens,
        and weights of a checkpoint are refused.
        """
        config, recorded = program.config, resolved.recorded
        run = mirror.files(config.checkpoint.dir)
        run_directory.prepare(run, recorded)
        run_directory.record_start(run, recorded, progress.step)
        if jax.process_index() == 0:
            for warning in ineffective_settings(config, jax.default_backend()):
                log.warning("%s", warning)
            more: dict[str, Any] = {"derived": dict(resolved.reasons)} if resolved.reasons else {}
            # Only at the first start: later ones resume from the run itself.
            if self.is_new and config.checkpoint.start_path:
                keep_documents(config.checkpoint.start_path, run)
                more["parent"] = _parent(config.checkpoint, progress)
            _note_trust(config)
            devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
            parameters = parameter_count(program.model.abstract)
            replicas = self.saver.replicas
            more |= {"replicas": replicas.origin} if replicas else {}
            starts.note(run, progress.step, parameters=parameters, devices=devices, **more)
        dp = data_parallel_size(program.mesh)
        write_summary(run, schedule_summary(config, dp, progress.sequences_per_epoch))


def _parent(section: CheckpointConfig, progress: Progress) -> dict[str, Any]:
    """Return the record of the checkpoint from which a new run starts."""
    if section.branch:
        return {"run": section.branch.run, "step": progress.step, "is_branch": True}
    return {"run": section.load_path, "step": progress.step, "is_branch": False}


def _note_trust(config: JobConfig) -> None:
    """Let commands that open this run import its plugins without `--trust-plugins`."""
    try:
        trust.note(run_directory.root(config), config.plugins.names)
    # The record only spares users an option, so its loss must not end the run.
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
