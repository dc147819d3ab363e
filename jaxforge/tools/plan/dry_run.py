"""Dry run of a start: `jaxforge train --config FILE --dry-run`.

Config, data, mesh and model are read and built as `launch` and `build` do it, with the same error
messages. Nothing is compiled, and nothing is written. `--devices` plans for other hardware: the
mesh then has no devices, but the shapes and shardings of the real mesh.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from jaxforge.checkpoint.relayout import by_layer
from jaxforge.cli.redaction import redacted
from jaxforge.config.ineffective_settings import answers, ineffective_settings
from jaxforge.config.job import JobConfig, toml
from jaxforge.config.reading.schema import REGISTRIES
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.resolution import ResolvedRun, World, resolve
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.parallel import device_memory, multihost
from jaxforge.parallel.mesh import abstract_mesh, data_parallel_size, describe_mesh, make_mesh
from jaxforge.runs import run_directory
from jaxforge.storage import urls
from jaxforge.telemetry.metric_writers import check_libraries
from jaxforge.tools.plan import checks
from jaxforge.tools.plan.dry_run_checkpoint import run_directory_row
from jaxforge.tools.plan.dry_run_data import epoch_length, mixture_rows, open_data
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
from jaxforge.training.banner import describe_average
from jaxforge.training.callbacks.callback import named_callback
from jaxforge.training.resolution import with_idle_experts
from jaxforge.training.summary import schedule_summary


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
    if unknown := _unknown(resolved):
        _show("config, where it is not the default", _differences(resolved))
        _show("machine", [f"{n} device(s), mesh: {describe_mesh(mesh.shape)}"])
        _show("run", [run_directory_row(resolved, None, None)])
        _show("not known without plugins", unknown)
        return 0
    kinds = target[1] if target else [this_device()]
    missing = list(checks.missing_data_warnings(resolved)) if target else []
    started, notes = _as_started(started, is_elsewhere=target is not None)
    resolved = started.config
    data, data_rows = open_data(resolved, opens=not missing, is_elsewhere=target is not None)
    if not target:
        missing = list(checks.disk_warnings(resolved))
    dp = data_parallel_size(mesh)
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
    _show("machine", [f"{n} device(s), mesh: {describe_mesh(mesh.shape)}"])
    _show("data", data_rows)
    if mixture := mixture_rows(resolved, dp, data):
        _show("mixture", mixture)
    _show("model", model_rows(model))
    average = describe_average(resolved.train, device_memory.bytes_per_device(state.ema))
    parts = [f"of the state, average {average}"] if average else []
    _show("memory of a device, an estimate", [*memory_rows(fits), *parts])
    _show("run", [run_row, *replica_rows(resolved, state)])
    if notes := [*notes, *config.notes, *answers(resolved)]:
        _show("notes", notes)
    platform = kinds[0].platform
    warnings = [
        *ineffective_settings(resolved, platform),
        *missing,
        *of_teacher,
        *too_large(resolved, mesh, fits),
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
