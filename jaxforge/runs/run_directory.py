"""The run directory, `checkpoint.dir`: all files of one run.

If it is in a bucket, all files but the checkpoints are written locally and copied there (`mirror`).

run.lock          lock of the training process (`run_lock`)
config.toml       the resolved config of the latest start
configs/          the configs of all starts on the run's path, by the step at which each began
metrics.jsonl     an object per logged step (`telemetry.sinks.JsonlSink`)
starts.jsonl      an object per start: time, command, versions (`starts`)
samples.jsonl     an object per generated text (`eval.sample_interval`)
activations/      step_<n>/: captured activations (`eval.activations_interval`)
logs/             a log and an account of time (`attempts`) per process
tokenizer/        a copy of the data's tokenizer, where there is one
huggingface/      config.json and generation_config.json that it began with, for exports
checkpoints/      `checkpoint.manager`
tb_logs/          TensorBoard's files, of a writer in `metrics.writers`
wandb/            W&B's files, of a writer in `metrics.writers`
profiler_traces/  with `profiling.enable`
"""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import load_config, load_config_of_run
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer, tokenizer_of
from jaxforge.errors import UserError, file_error
from jaxforge.runs import attempts, starts
from jaxforge.storage import mirror, safe_files, trust, urls
from jaxforge.storage.untrusted_json import Field, Omissions, is_step, sound_lines

log = logging.getLogger(__name__)

_CONFIG = "config.toml"
_DAMAGED_CONFIG = "config.damaged.toml"
_CONFIGS = "configs"
_METRICS, _SAMPLES = "metrics.jsonl", "samples.jsonl"
_TOKENIZER = "tokenizer"


def log_config_changes(run: Path, config: JobConfig) -> None:
    """Log the settings that have changed since the last start of the run.

    `config.toml` may have been edited since, to start from: the last start is in `configs/`.
    """
    started = _starts(run)
    path = _from_step(run, max(started)) if started else run / _CONFIG
    if jax.process_index() != 0 or not path.exists():
        return
    try:
        before = load_config(path, trusts=trust.never)
    except UserError as error:
        log.warning("what has changed since this run last started is not known: its config is "
                    "damaged (%s)", error)  # fmt: skip
    else:
        for change in changes(before, config):
            log.warning("changed since this run last started: %s", change)


def check_not_moved(config: UnresolvedConfig) -> None:
    """Refuse the `config.toml` of a run that was moved: a start would begin anew at its old path.

    Of a run that was copied the first one is trained, which is a warning.

    Raises:
        UserError: the run was moved, and the command line does not set `checkpoint.dir`.
    """
    file, directory = Path(config.file).absolute(), config.known.checkpoint.dir
    if file.name != _CONFIG or config.is_on_command_line("checkpoint.dir"):
        return
    here, is_local = file.parent, not urls.in_bucket(directory)
    # Links may give one directory two paths, so that real paths are compared.
    if not _has_steps(here) or (is_local and os.path.realpath(directory) == os.path.realpath(here)):
        return
    what = f"{config.file} lies in a run directory, and names another: checkpoint.dir = {directory}"
    if is_local and not _has_steps(Path(directory)):
        raise UserError(
            f"{what}, where no run is. Was the run moved? --checkpoint.dir={here} resumes it where "
            "it is; another --checkpoint.dir begins a run there"
        )
    log.warning("%s, which is trained; --checkpoint.dir=%s trains this one", what, here)


def _has_steps(run: Path) -> bool:
    return any((run / "checkpoints").glob("step_*"))


def check_not_lost(run: Path) -> None:
    """Refuse to start at step 0 in the directory of a run whose checkpoints are lost.

    Args:
        run: the directory, without checkpoints.

    Raises:
        UserError: the run had saved checkpoints.
    """
    last, has_saved = 0, False
    for step, is_saved in _logged_steps(run / _METRICS):
        last, has_saved = max(last, step), has_saved or is_saved
    # A branch starts at a step above 0 without checkpoints of its own.
    resumed = (start for start in starts.read(run) if "parent" not in start)
    if not has_saved and not any(start.get("step") for start in resumed):
        return
    raise UserError(
        f"checkpoint.dir = {run}: the run there logged {last:,} steps and saved checkpoints, and "
        f"no checkpoint is left: it would begin at step 0 and replace {_METRICS}. Bring "
        f"{run}/checkpoints back to resume; to begin anew, name another checkpoint.dir, or move "
        "this one away"
    )


def rename_old_metrics(run: Path) -> None:
    """Rename metrics and samples of steps that no checkpoint explains, before a run begins anew.

    Such are left where a run is killed before its first checkpoint.

    Raises:
        UserError: the directory cannot be written.
        StorageError: the disk is full or fails.
    """
    if jax.process_index() != 0 or not any(step for step, _ in _logged_steps(run / _METRICS)):
        return
    # Earlier leftovers keep their names.
    number = 1
    while (run / f"metrics.before_{number}.jsonl").exists():
        number += 1
    for name in (_METRICS, _SAMPLES):
        if (run / name).exists():
            aside = run / name.replace(".", f".before_{number}.", 1)
            try:
                (run / name).rename(aside)
            except OSError as error:
                raise file_error(run / name, error) from error
            log.warning("this run begins anew: %s is now %s", name, aside.name)


def _logged_steps(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield the step of each whole line of metrics, with True if it reports a durable save."""
    fields = {"step": Field(is_step, "the number of a step")}
    for values in sound_lines(path, fields, Omissions(path)):  # perhaps millions
        yield int(values["step"]), "checkpoint/save_sec" in values


def root(config: JobConfig) -> Path:
    """Return the run directory, on this machine or in a bucket."""
    return urls.path(config.checkpoint.dir, "checkpoint.dir")


def open_mirror(config: JobConfig) -> mirror.Mirror | None:
    """Open the mirror that copies `files` to the run's bucket; None for a run on disk."""
    run = root(config)
    if not urls.in_bucket(run):
        return None
    process = jax.process_index()
    logs = [f"logs/process_{process}.log", *attempts.file_names(process)]
    shared = [
        _CONFIG,
        _CONFIGS,
        *(
            f"{Path(name).stem}{kind}.jsonl"
            for name in (_METRICS, starts.FILE_NAME, _SAMPLES)
            for kind in ("", ".damaged")
        ),
        "progress.txt",
        _TOKENIZER,
    ]  # process 0 resumes from them
    return mirror.Mirror(run, process, logs + shared * (process == 0))


def prepare(run: Path, config: JobConfig) -> None:
    """Create the directory with `config.toml`, and `tokenizer/` if it does not exist yet.

    Raises:
        UserError: the directory cannot be written.
        StorageError: the disk is full or fails.
    """
    if jax.process_index() != 0 and not urls.in_bucket(config.checkpoint.dir):
        return  # for a run in a bucket, each process has its own local files
    try:
        run.mkdir(parents=True, exist_ok=True)
        tokenizer = tokenizer_for(run, config)
        # The first tokenizer stays: the model has learned its ids.
        if tokenizer is not None and not (run / _TOKENIZER).exists():
            _write_tokenizer(run, tokenizer)
        # A damaged config is put aside: it may still tell how the run was started.
        _put_aside_if_damaged(run / _CONFIG)
        _replace(run / _CONFIG, config)
    except OSError as error:
        raise file_error(f"checkpoint.dir = {run}", error) from error


def _put_aside_if_damaged(path: Path) -> None:
    try:
        if path.exists():
            load_config(path, trusts=trust.never)
    except UserError as error:
        path.replace(path.with_name(_DAMAGED_CONFIG))
        log.warning("%s was damaged (%s): moved to %s", path, error, _DAMAGED_CONFIG)


def record_start(run: Path, config: JobConfig, step: int) -> None:
    """Record the config of a start at `step`, and remove the configs of later starts.

    Raises:
        UserError: the directory cannot be written.
        StorageError: the disk is full or fails.
    """
    if jax.process_index() != 0:
        return
    try:
        safe_files.make_directory(run / _CONFIGS)
        # Before later configs are removed: after a crash in between, the step still has its own.
        _replace(_from_step(run, step), config)
        # Their steps are replaced by those of this start.
        for undone in (start for start in _starts(run) if start > step):
            _from_step(run, undone).unlink()
    except OSError as error:
        raise file_error(f"checkpoint.dir = {run}", error) from error


def config_of_step(run: Path, step: int) -> JobConfig:
    """Return the config of a step if the run records it, else the latest config.

    Args:
        run: the directory.
        step: from 1.
    """
    if not any(start < step for start in _starts(run)):
        return read_config(run)
    return load_config_of_run(_from_step(run, start_before(run, step)), run)


def start_before(run: Path, step: int) -> int:
    """Return the step at which the start that made a step began; 0 if it is not recorded."""
    return max((start for start in _starts(run) if start < step), default=0)


def steps_by_start(run: Path, first: int, last: int) -> list[tuple[int, int]]:
    """Return the ranges of steps between `first` and `last` with the same start."""
    starts = []
    # From the end: each start covers the steps up to the next one.
    while last >= first:
        start = start_before(run, last)
        starts.append((max(first, start + 1), last))
        last = start
    return starts[::-1]


def _starts(run: Path) -> list[int]:
    """Return the steps at which the recorded starts began."""
    paths = (run / _CONFIGS).glob("from_step_*.toml")
    return [int(n) for path in paths if (n := path.stem.removeprefix("from_step_")).isdigit()]


def _from_step(run: Path, step: int) -> Path:
    return run / _CONFIGS / f"from_step_{step}.toml"


def _replace(path: Path, config: JobConfig) -> None:
    safe_files.replace_text(path, config.to_toml())


def read_config(run: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the config of a run for inference, with overrides such as "--distributed.tp=2".

    Plugins are imported if the run is trusted. Settings that write files are omitted.

    Raises:
        UserError: the run does not exist, or the settings are invalid.
    """
    return load_config_of_run(_config_file(run), run, overrides)


def shown_config(run: Path) -> JobConfig:
    """Return the config of a run for display, without imports of plugins.

    Raises:
        UserError: the run does not exist, or its config is damaged.
    """
    return load_config(_config_file(run), trusts=trust.never)


def _config_file(run: Path) -> Path:
    if not (run / _CONFIG).is_file():
        raise UserError(f"no run at {run}: it has no {_CONFIG}{path_hint(run)}")
    return run / _CONFIG


def find_tokenizer(run: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's data, or None."""
    return load_tokenizer(run / _TOKENIZER) if (run / _TOKENIZER).is_dir() else None


def tokenizer_for(run: Path, config: JobConfig) -> Tokenizer | None:
    """Return the tokenizer of the run, else the tokenizer of the config's data, or None."""
    source = tokenizer_of(config.data)
    return find_tokenizer(run) or (load_tokenizer(source) if source else None)


def read_tokenizer(run: Path) -> Tokenizer:
    """Return the tokenizer of a run's data.

    Raises:
        UserError: the run has no tokenizer.
    """
    tokenizer = find_tokenizer(run)
    if tokenizer is None:
        raise UserError(
            f"{run} has no {_TOKENIZER}/: its data named none; set data.tokenizer_path in "
            f"{run / _CONFIG} and copy the tokenizer there"
        )
    return tokenizer


def _write_tokenizer(run: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer atomically: other processes of the job may read it meanwhile."""
    partial = safe_files.temporary_path(run / _TOKENIZER)
    partial.mkdir()
    try:
        tokenizer.save(partial)
        partial.replace(run / _TOKENIZER)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def changes(old: JobConfig, new: JobConfig) -> list[str]:
    """Return the settings that differ between two configs: "train.max_steps 100 -> 200"."""
    before, after = old.settings, new.settings
    changed = [key for key in after if after[key] != before[key]]
    return [f"{key} {before[key]!r} -> {after[key]!r}" for key in changed]
