"""Run directory of a dry run: the step at which a start would resume."""

from pathlib import Path

from jaxforge.checkpoint import paths
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.relayout import by_layer
from jaxforge.checkpoint.restore import find_start
from jaxforge.config.job import JobConfig
from jaxforge.data.fingerprint import check_random_tokens, check_unchanged, fingerprints
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.storage import urls
from jaxforge.tools.plan.dry_run_data import Data
from jaxforge.tools.plan.dry_run_memory import AnyMesh


def run_directory_row(config: JobConfig, mesh: AnyMesh, model: Model | None, data: Data) -> str:
    """Describe where a start would resume.

    Args:
        config: the config.
        mesh: the mesh of the run.
        model: the model; None if only a plugin can build it. The checkpoint is then not checked.
        data: the training data; None if they are not opened.

    Raises:
        UserError: a start would be refused: the checkpoint is lost, or has another model,
            optimizer or data.
    """
    directory = config.checkpoint.dir
    if urls.in_bucket(directory):
        return f"{directory}: not checked"
    run = run_directory.root(config).absolute()
    try:
        _, step = paths.find(Path(directory))
    except UserError:
        run_directory.check_not_lost(run)
        if config.checkpoint.branch is None:
            return f"{run}: a new run"
        source, step = find_start(config.checkpoint)
        resumes = f"{run}: a new run that branches off from step {step:,} of {source}"
    else:
        source, resumes = run, f"{run}: resumes from step {step:,}"
    if model is None:
        return resumes
    checkpoints = Checkpoints(source, config.checkpoint, read_only=True)
    try:
        like = Program(config, mesh, model=model).abstract_state()
        progress = checkpoints.check_restorable(by_layer(like, model.stack), step)
    finally:
        checkpoints.close()
    check_random_tokens(config.data, progress.data)
    if data is not None:
        check_unchanged(
            config.data.on_change, progress.data, fingerprints(config.data, data, {}), step
        )
    return resumes
