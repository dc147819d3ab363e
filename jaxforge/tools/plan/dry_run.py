"""Dry run of a start: `python -m jaxforge.train --config FILE --dry-run`.

Config, data, mesh and model are read and built as `launch` and `build` do it, with the same
messages for what is wrong; nothing is compiled, and nothing is written. With `--devices` the
machine is pretended: a mesh without devices, on which shapes and shardings are those of the real
one.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxforge.checkpoint import paths
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.relayout import by_layer
from jaxforge.cli.redaction import redacted
from jaxforge.config import rules
from jaxforge.config.job import JobConfig, toml
from jaxforge.config.problems import said
from jaxforge.config.reading.schema import REGISTRIES
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.useless import answers, useless
from jaxforge.data import sources
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.epoch import sequences_per_epoch
from jaxforge.data.fingerprint import check_random_tokens, check_unchanged, fingerprints
from jaxforge.errors import UserError
from jaxforge.model.runtime import gpu_capability
from jaxforge.model.transformer import (
    Model,
    active_parameter_count,
    build_model,
    parameter_count,
)
from jaxforge.parallel import device_memory, multihost
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import abstract_mesh, data_parallel_size, in_words, make_mesh
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.step.fitting import SLACK, Fit, fit
from jaxforge.storage import urls
from jaxforge.telemetry.metric_writers import check_libraries
from jaxforge.telemetry.numbers import human
from jaxforge.tools.plan import checks
from jaxforge.tools.plan.topology import CPU, Topology
from jaxforge.training.hooks import named_hook
from jaxforge.training.start import skipping_experts_as_started
from jaxforge.training.summary import schedule_summary

AnyMesh = Mesh | AbstractMesh
Data = Dataset | Mixture | Streaming | None


class Device(NamedTuple):
    """A kind of device that the run may have.

    Attributes:
        name: for a reader.
        platform: JAX's.
        capacity: bytes that a program may use.
        capability: of GPUs.
    """

    name: str
    platform: str
    capacity: int
    capability: str | None = None


def run(config: UnresolvedConfig, devices: str) -> int:
    """Prints what a start would do.

    Args:
        config: as read.
        devices: "" for those that are here, a number of pretended ones of any kind, or a machine
            as `jaxforge plan --topology` has it.

    Returns:
        0.

    Raises:
        UserError: a start would be refused; the message is the start's.
    """
    pretended = machine(devices)
    run_directory.check_not_moved(config)
    if not pretended:
        multihost.open_devices()
    n = pretended[0] if pretended else jax.device_count()
    resolved = config.resolve(n, _epoch_length)
    rules.check(resolved, n)
    check_libraries(resolved.metrics)
    for hook in resolved.plugins.hooks:
        if hook.rpartition(".")[0] in sys.modules:  # else it was not to be imported
            named_hook(hook)
    mesh: AnyMesh = abstract_mesh(resolved, n) if pretended else make_mesh(resolved)
    if unknown := _unknown(resolved):
        _show("config, where it is not the default", _differences(resolved))
        _show("machine", [f"{n} device(s), mesh: {in_words(mesh.shape)}"])
        _show("run", [_run_directory(resolved, mesh, None, None)])
        _show("not known without plugins", unknown)
        return 0
    kinds = pretended[1] if pretended else [_here()]
    missing = list(checks.absent(resolved)) if pretended else []
    resolved, notes = _as_started(resolved, is_pretended=pretended is not None)
    data, data_rows = _open(resolved, opens=not missing, is_pretended=pretended is not None)
    if not pretended:
        missing = list(checks.disk(resolved))
    dp = data_parallel_size(mesh)
    per_epoch = None
    if data is not None:
        per_epoch = sequences_per_epoch(resolved, resolved.train.microbatch_size(dp), data)
    model, fits = _fits(resolved, mesh, kinds)
    run_row = _run_directory(resolved, mesh, model, data)
    _show("config, where it is not the default", _differences(resolved))
    _show("schedule", schedule_summary(resolved, dp, per_epoch or None).splitlines())
    _show("machine", [f"{n} device(s), mesh: {in_words(mesh.shape)}"])
    _show("data", data_rows)
    _show("model", _model(model))
    _show("memory of a device, an estimate", _memory(fits))
    _show("run", [run_row])
    if notes := [*notes, *answers(resolved)]:
        _show("notes", notes)
    platform = kinds[0].platform
    warnings = [*useless(resolved, platform), *missing, *_too_large(resolved, mesh, fits)]
    _show("warnings", warnings or ["none"])
    print("nothing was written; `jaxforge plan` compiles the step for a machine, and knows more")
    return 0


def _as_started(config: JobConfig, *, is_pretended: bool) -> tuple[JobConfig, list[str]]:
    """Return the config with what a start would set in it, and notes of that.

    Raises:
        UserError: the checkpoint that a run would start from is damaged, or of another model.
    """
    section = config.checkpoint
    if not config.model.is_moe or config.optimizer.skip_idle_experts is not None:
        return config, []
    for location in filter(None, (section.dir, section.load_path)):
        is_named = location is section.load_path
        if urls.in_bucket(location) or (is_pretended and is_named and not Path(location).exists()):
            return config, [f"optimizer.skip_idle_experts: a start sets it as {location} has it, "
                            "which was not looked at"]  # fmt: skip
    started = skipping_experts_as_started(config)
    if started is config:
        return config, []
    return started, ["optimizer.skip_idle_experts: a start sets it to true, as the checkpoint has "
                     "it that the run starts from"]  # fmt: skip


def _unknown(config: JobConfig) -> list[str]:
    """The names that only plugins can register, and how they are imported."""
    rows = []
    for registry in REGISTRIES:
        section, _, key = registry.key.partition(".")
        name = getattr(getattr(config, section), key)
        if name not in registry.names():
            rows.append(f'{registry.key} = "{name}"')
    modules = ", ".join(config.plugins.names.all_modules())
    about = f"--trust-plugins imports {modules}: data, model and memory are looked at then"
    return [*rows, about] if rows else []


def machine(devices: str) -> tuple[int, list[Device]] | None:
    """Parse `--devices`: number of devices and their possible kinds; None if it is empty.

    Raises:
        UserError: it is neither a number nor a machine.
    """
    if not devices:
        return None
    if devices.isdigit() and int(devices):
        return int(devices), [_chip(name) for name in CHIPS]
    try:
        topology = Topology.parse(devices)
    except ValueError as error:
        raise UserError(f"--devices: expected a number, or a machine: {error}") from error
    n = topology.n_devices
    if topology.chip == CPU:
        return n, [Device("cpu", CPU, device_memory.capacity() // n)]
    return n, [_chip(topology.chip)]


def _chip(name: str) -> Device:
    chip = CHIPS[name]
    capability = ".".join(map(str, chip.target.capability)) if chip.target else None
    return Device(name, chip.platform, chip.memory, capability)


def _here() -> Device:
    device = jax.devices()[0]
    capacity = device_memory.capacity_of_each()
    return Device(device.device_kind, device.platform, capacity, gpu_capability(device))


def _epoch_length(config: JobConfig, rows: int) -> int | None:
    """Return the epoch length as a start would, without tokenizing a dataset for it."""
    if _from_hugging_face(config):
        raise UserError(
            f"--dry-run: lengths in epochs are known once {_from_hugging_face(config)} is "
            "tokenized, which a start does; give updates or tokens here"
        )
    return sequences_per_epoch(config, rows)


def _from_hugging_face(config: JobConfig) -> str:
    """The dataset that a start would load, or "" where it reads shards alone."""
    data = config.data
    if data.datasets:
        return next(
            (dataset.hf_name for dataset in data.datasets if dataset.hf_name and not dataset.path),
            "",
        )
    return "" if data.dataset_path else data.hf_dataset_name or ""


def _open(config: JobConfig, *, opens: bool, is_pretended: bool) -> tuple[Data, list[str]]:
    """The training set, if it can be opened without writing, and what is said of all sets.

    Raises:
        UserError: data are missing, damaged or do not fit the model.
    """
    if not opens:
        return None, ["not on this machine: not looked at"]
    if name := _from_hugging_face(config):
        how = "streams it" if config.data.hf_streaming else "tokenizes it once"
        return None, [f"Hugging Face dataset {name}: not looked at; a start {how}"]
    if is_pretended and not config.data.has_source and config.data.dataset_type == "auto":
        return None, ["none are named: a start here would be refused"]
    data = sources.open_training_data(config)
    rows = [f"training: {_set(data)}"]
    source = config.eval.sources().values() if config.eval.reads_data else ()
    if any(not dataset.dataset_path for dataset in source):
        rows.append("evaluation: a Hugging Face dataset is not looked at; a start tokenizes it")
    elif config.eval.reads_data:
        for name, dataset in sources.open_eval_data(config).items():
            rows.append(f"evaluation{f' {name}' if name else ''}: {_set(dataset)}")
    return data, rows


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


def _fits(
    config: JobConfig, mesh: AnyMesh, kinds: Iterable[Device]
) -> tuple[Model, dict[Device, Fit]]:
    """The model, and how it fits each kind of device that has the kernels it asks for.

    Raises:
        UserError: no kind has them, or a parameter does not divide.
    """
    fits: dict[Device, Fit] = {}
    built, refused = None, None
    for device in kinds:
        try:
            model = build_model(config, device.platform, device.capability)
        except UserError as error:
            refused = refused or error
            continue
        state = Program(config, mesh, model=model).abstract_state()
        fits[device] = fit(config, model, state, mesh, device.capacity)
        built = built or model
    if built is None:
        assert refused is not None
        raise refused
    return built, fits


def _differences(config: JobConfig) -> Iterator[str]:
    usual = JobConfig().settings
    for key, value in config.settings.items():
        if value != usual[key]:
            yield redacted(f"{key} = {toml(value)}")


def _model(model: Model) -> Iterator[str]:
    c = model.config
    yield (
        f"{c.n_layers} layers, dim {c.dim}, {c.n_heads}/{c.kv_heads} heads of {c.head_size}, "
        f"vocabulary {c.vocab_size:,}"
    )
    active = f"; a token meets {human(active_parameter_count(model))}" if c.is_moe else ""
    yield f"{human(parameter_count(model.abstract))} parameters{active}"


def _memory(fits: dict[Device, Fit]) -> Iterator[str]:
    """Yield the parts of memory on the first kind of device, and a line for each kind."""
    parts = next(iter(fits.values())).memory._asdict()
    yield ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
    for device, estimate in fits.items():
        most = f"{estimate.most_rows:,} at most fit" if estimate.most_rows else "not one fits"
        yield (
            f"{device.name}: {gigabytes(estimate.memory.total)} of {gigabytes(device.capacity)}; "
            f"{estimate.rows} sequence(s) of a microbatch on a device, {most}; gradients reduced "
            f"per {estimate.grad_sync}"
        )


def _too_large(config: JobConfig, mesh: AnyMesh, fits: dict[Device, Fit]) -> Iterator[str]:
    """Yield remedies if no kind of device has enough memory."""
    if any(estimate.memory.total <= SLACK * device.capacity for device, estimate in fits.items()):
        return
    device, estimate = max(fits.items(), key=lambda item: item[0].capacity)
    dp = data_parallel_size(mesh)
    yield (
        f"the step needs about {gigabytes(estimate.memory.total)} of a device, and {device.name} "
        f"has {gigabytes(device.capacity)}. What helps: "
        f"{'; '.join(_smaller(config, dp, estimate.most_rows))}"
    )


def _smaller(config: JobConfig, dp: int, most_rows: int) -> Iterator[str]:
    train = config.train
    if most_rows and train.global_batch_size is None:
        yield f"change {said({'train.batch_size': most_rows})}"
    elif most_rows and train.global_batch_size is not None:
        accum = -(-train.global_batch_size // (dp * most_rows))
        while train.global_batch_size % (accum * dp):
            accum += 1
        yield f"change {said({'train.grad_accum_steps': accum})}"
    if train.activation_checkpointing != "full":
        yield f"change {said({'train.activation_checkpointing': 'full'})}"
    if not most_rows:
        yield "more devices to share the state (distributed.dp_shard, tp or pp)"


def _run_directory(config: JobConfig, mesh: AnyMesh, model: Model | None, data: Data) -> str:
    """Return where a start would go on.

    Args:
        config: the config.
        mesh: the devices.
        model: the model; None if only a plugin can tell, and the checkpoint is not checked.
        data: the training data; None if they are not opened.

    Raises:
        UserError: a start would be refused: the checkpoint is of another model, optimizer or data,
            or lost.
    """
    directory = config.checkpoint.dir
    if urls.in_bucket(directory):
        return f"{directory}: not looked at"
    run = run_directory.root(config).absolute()
    try:
        _, step = paths.find(Path(directory))
    except UserError:
        run_directory.check_not_lost(run)
        return f"{run}: a new run"
    if model is None:
        return f"{run}: goes on from step {step:,}"
    checkpoints = Checkpoints(run, config.checkpoint, read_only=True)
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
    return f"{run}: goes on from step {step:,}"


def _show(title: str, rows: Iterable[str]) -> None:
    print(title, *(f"  {row}".rstrip() for row in rows), "", sep="\n")
