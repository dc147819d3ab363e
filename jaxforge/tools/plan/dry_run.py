"""Dry run of a start: `jaxforge train --config FILE --dry-run`.

Config, data, mesh and model are read and built as `launch` and `build` do it, with the same error
messages. Nothing is compiled, and nothing is written. `--devices` plans for other hardware: the
mesh then has no devices, but the shapes and shardings of the real mesh.
"""

import contextlib
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from jaxforge.checkpoint import paths
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.relayout import by_layer
from jaxforge.checkpoint.restore import find_start
from jaxforge.cli.redaction import redacted
from jaxforge.config.ineffective_settings import answers, ineffective_settings
from jaxforge.config.job import JobConfig, toml
from jaxforge.config.reading.schema import REGISTRIES
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.resolution import ResolvedRun, World, resolve
from jaxforge.data import sources
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.fingerprint import check_random_tokens, check_unchanged, fingerprints
from jaxforge.data.order import data_seed
from jaxforge.data.segments import draws
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.parallel import device_memory, multihost
from jaxforge.parallel.mesh import abstract_mesh, data_parallel_size, describe_mesh, make_mesh
from jaxforge.runs import run_directory
from jaxforge.state.train_state import TrainState
from jaxforge.storage import urls
from jaxforge.tasks.opening import describe_tasks
from jaxforge.telemetry.metric_writers import check_libraries
from jaxforge.tools.plan import checks
from jaxforge.tools.plan.dry_run_memory import (
    AnyMesh,
    fits_by_device,
    memory_rows,
    model_rows,
    parse_devices,
    replica_rows,
    this_device,
    too_large,
)
from jaxforge.training.banner import describe_average, describe_layer_embeddings
from jaxforge.training.callbacks.callback import named_callback
from jaxforge.training.resolution import with_idle_experts
from jaxforge.training.summary import describe_groups, schedule_summary
from jaxforge.training.training_data import check_not_exhausted, phases_of

Data = Dataset | Mixture | Streaming | None
"""An opened training set; None if it was not opened."""


def epoch_length(config: JobConfig, rows: int) -> int | None:
    """Return the epoch length that a start would use, without tokenizing a dataset."""
    if name := _from_hugging_face(config):
        raise UserError(
            f"--dry-run: the length of an epoch is unknown before a start tokenizes {name}. "
            "Give lengths in updates or tokens"
        )
    return sequences_per_epoch(config, rows)


def open_data(config: JobConfig, *, opens: bool, is_elsewhere: bool) -> tuple[Data, list[str]]:
    """Open the training set if that needs no writing, and describe all datasets.

    Args:
        config: the config.
        opens: open the data at all.
        is_elsewhere: the run is planned for another machine.

    Raises:
        UserError: data are missing, damaged or do not fit the model.
    """
    if not opens:
        return None, ["not on this machine: not checked"]
    if name := _from_hugging_face(config):
        how = "streams it" if config.data.hf_streaming else "tokenizes it once"
        return None, [f"Hugging Face dataset {name}: not checked; a start {how}"]
    if is_elsewhere and not config.data.has_source and config.data.dataset_type == "auto":
        return None, ["no data are named: a start would be refused"]
    data = sources.open_training_data(config)
    rows = [f"training: {_set(data)}"]
    source = config.eval.sources().values() if config.eval.reads_data else ()
    if any(not dataset.dataset_path for dataset in source):
        rows.append("evaluation: a Hugging Face dataset is not checked; a start tokenizes it")
    elif config.eval.reads_data:
        for name, dataset in sources.open_eval_data(config).items():
            rows.append(f"evaluation{f' {name}' if name else ''}: {_set(dataset)}")
    if config.eval.enabled and not is_elsewhere:
        rows += describe_tasks(config.eval)
    return data, rows


def mixture_rows(config: JobConfig, dp: int, data: Data) -> list[str]:
    """Describe the tokens that a new run draws per phase, and the epochs of each dataset.

    With `data.order = "torch"` these are the proportions of whole epochs, not counts.

    Args:
        config: the config.
        dp: number of data-parallel ranks.
        data: the training set; without a mixture there are no rows.

    Raises:
        UserError: the datasets reach their limits before the end of the run.
    """
    if not isinstance(data, Mixture):
        return []
    ramp, seq_len = config.train.ramp(dp), config.train.seq_len
    phases, last = phases_of(config, data), config.train.max_steps
    segments = phases.segments([], 0, 0, ramp.samples)
    check_not_exhausted(config, data, segments, ramp, (0, 0))
    about = " (about)" if config.data.order == "torch" else ""
    rows, total = [], dict.fromkeys(data.sizes, 0)
    for start, counts in draws(segments, ramp.samples(last), data_seed(config)):
        # The first step that begins at this sample or later: phases count samples.
        step = bisect_left(range(last), start, key=ramp.samples)
        shares = ", ".join(
            f"{name} {counts[name] * seq_len:,} ({counts[name] / max(1, sum(counts.values())):.2%})"
            for name in counts
        )
        rows.append(f"from step {step:,}, tokens drawn{about}: {shares}")
        total |= {name: total.get(name, 0) + count for name, count in counts.items()}
    for name, count in total.items():
        most = phases.limits.get(name)
        limit = f", of at most {most / data.sizes[name]:.4g}" if most else ""
        rows.append(
            f"{name}: {count / data.sizes[name]:.4g} epochs{limit} ({count:,} sequences drawn, "
            f"{data.sizes[name]:,} there)"
        )
    return rows


def _from_hugging_face(config: JobConfig) -> str:
    """Return the name of the Hub dataset that a start would load, or "" if it reads shards only."""
    data = config.data
    if data.datasets:
        return next(
            (dataset.hf_name for dataset in data.datasets if dataset.hf_name and not dataset.path),
            "",
        )
    return "" if data.dataset_path else data.hf_dataset_name or ""


def _set(data: Data) -> str:
    if isinstance(data, Mixture):
        sizes = (f"{name} {size:,}" for name, size in data.sizes.items())
        return f"a mixture, sequences of each: {', '.join(sizes)}"
    if not isinstance(data, Dataset):
        return "a stream"
    source = data.source
    directory = getattr(source, "directory", None)
    if directory is None:
        return "random tokens (no data)" if len(data) > 2**30 else f"{len(data):,} sequences"
    tokens, files = getattr(source, "tokens", 0), len(getattr(source, "files", ()))
    return f"{directory}: {tokens:,} tokens in {files} file(s), {len(data):,} sequences"


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


def run(config: UnresolvedConfig, devices: str) -> int:
    """Print what a start would do.

    Args:
        config: the config, not yet resolved.
        devices: "" for the local devices, a number of absent devices of any kind, or a machine
            in the form of `jaxforge plan --topology`.

    Returns:
        0.

    Raises:
        UserError: a start would be refused; the message is the start's.
    """
    # Checks are in the order of a start, so that the first message is that of a start.
    target = parse_devices(devices)
    run_directory.check_not_moved(config)
    if not target:
        multihost.open_devices()
    n = target[0] if target else jax.device_count()
    started = resolve(config, World(n), epoch_length)
    resolved = started.config
    check_libraries(resolved.metrics)
    for callback in resolved.plugins.callbacks:
        if callback.rpartition(".")[0] in sys.modules:  # otherwise the plugin is not trusted
            named_callback(callback)
    mesh: AnyMesh = abstract_mesh(resolved, n) if target else make_mesh(resolved)
    # Without its plugin neither model nor data can be built; plugins are imported if trusted.
    if unknown := _unknown(resolved):
        _show("config, where it is not the default", _differences(resolved))
        _show("machine", [f"{n} device(s), mesh: {describe_mesh(mesh.shape)}"])
        _show("run", [run_directory_row(resolved, None, None)])
        _show("not known without plugins", unknown)
        return 0
    kinds = target[1] if target else [this_device()]
    missing = list(checks.missing_data_warnings(resolved)) if target else []
    # `skip_idle_experts` may be a fact of the checkpoint that the run starts from.
    started, notes = _as_started(started, is_elsewhere=target is not None)
    resolved = started.config
    data, data_rows = open_data(resolved, opens=not missing, is_elsewhere=target is not None)
    if not target:
        missing = list(checks.disk_warnings(resolved))
    dp = data_parallel_size(mesh)
    # Data that were not opened have no known length.
    per_epoch = None
    if data is not None:
        per_epoch = sequences_per_epoch(resolved, resolved.train.microbatch_size(dp), data)
    teacher, of_teacher = checks.known_teacher(resolved, is_elsewhere=target is not None)
    model, state, fits = fits_by_device(resolved, mesh, kinds, teacher)
    run_row = run_directory_row(resolved, by_layer(state, model.stack), data)
    _show("config, where it is not the default", _differences(resolved))
    if derived := list(started.rows()):
        _show("derived", derived)
    _show("schedule", schedule_summary(resolved, dp, per_epoch or None).splitlines())
    between = describe_groups(resolved, model, mesh)
    machine = [f"{n} device(s), mesh: {describe_mesh(mesh.shape)}"]
    _show("machine", [*machine, f"groups: {between}"] if between else machine)
    _show("data", data_rows)
    if mixture := mixture_rows(resolved, dp, data):
        _show("mixture", mixture)
    _show("model", model_rows(model))
    average = describe_average(resolved.train, device_memory.bytes_per_device(state.ema))
    parts = [f"of the state, average {average}"] if average else []
    if embeddings := describe_layer_embeddings(state):
        parts.append(f"of the state, embeddings of layers: {embeddings}")
    _show("memory of a device, an estimate", [*memory_rows(fits), *parts])
    _show("run", [run_row, *replica_rows(resolved, state)])
    if notes := [*notes, *config.notes, *answers(resolved)]:
        _show("notes", notes)
    platform = kinds[0].platform
    warnings = [
        *ineffective_settings(resolved, platform),
        *missing,
        *of_teacher,
        *too_large(fits),
    ]
    _show("warnings", warnings or ["none"])
    print("nothing was written; `jaxforge plan` compiles the step for a machine and reports more")
    return 0


def _as_started(run: ResolvedRun, *, is_elsewhere: bool) -> tuple[ResolvedRun, list[str]]:
    """Return the run with the settings that a start takes from a checkpoint, and notes.

    Raises:
        UserError: the checkpoint that a run would start from is damaged, or of another model.
    """
    config, section = run.config, run.config.checkpoint
    if not config.model.is_moe or config.optimizer.skip_idle_experts is not None:
        return run, []
    start_path = section.start_path
    for location in filter(None, (section.dir, start_path)):
        is_named = location is start_path
        if urls.in_bucket(location) or (is_elsewhere and is_named and not Path(location).exists()):
            return run, [f"optimizer.skip_idle_experts: a start takes it from {location}, "
                         "which was not read"]  # fmt: skip
    return with_idle_experts(run), []


def _unknown(config: JobConfig) -> list[str]:
    """Describe registered names that only plugins can provide, and how to import the plugins."""
    rows: list[str] = []
    for registry in REGISTRIES:
        section, _, key = registry.key.partition(".")
        value = getattr(getattr(config, section), key)
        names = (value,) if isinstance(value, str) else value
        rows.extend(f'{registry.key} = "{name}"' for name in names if name not in registry.names())
    modules = ", ".join(config.plugins.names.all_modules())
    about = f"--trust-plugins imports {modules}: data, model and memory are then checked"
    return [*rows, about] if rows else []


def _differences(config: JobConfig) -> Iterator[str]:
    defaults = JobConfig().settings
    for key, value in config.settings.items():
        if value != defaults[key]:
            yield redacted(f"{key} = {toml(value)}")


def _show(title: str, rows: Iterable[str]) -> None:
    print(title, *(f"  {row}".rstrip() for row in rows), "", sep="\n")
