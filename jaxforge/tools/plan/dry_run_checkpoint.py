"""Run directory of a dry run: the step at which a start would resume."""

import contextlib
from pathlib import Path

from jaxforge.checkpoint import paths
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import find_start
from jaxforge.config.job import JobConfig
from jaxforge.data.fingerprint import check_random_tokens, check_unchanged, fingerprints
from jaxforge.errors import UserError
from jaxforge.runs import run_directory
from jaxforge.state.train_state import TrainState
from jaxforge.storage import urls
from jaxforge.tools.plan.dry_run_data import Data


def run_directory_row(config: JobConfig, like: TrainState | None, data: Data) -> str:
    """Describe where a start would resume.

    Args:
        config: the config.
        like: the state that the run would restore, with an entry per layer; None if only a plugin
            can build the model. The checkpoint is then not checked.
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
    if like is None:
        return resumes
    with contextlib.closing(Checkpoints(source, config.checkpoint, read_only=True)) as checkpoints:
        progress = checkpoints.check_restorable(like, step)
    check_random_tokens(config.data, progress.data)
    if data is not None:
        check_unchanged(
            config.data.on_change, progress.data, fingerprints(config.data, data, {}), step
        )
    return resumes
