"""Banner of a run."""

import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version

import jax
from jax.sharding import Mesh

import jaxforge
from jaxforge.checkpoint.layout import split_adapters
from jaxforge.checkpoint.replica.replicas import describe_memory
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.train import TrainConfig
from jaxforge.model.fp8_layers import describe_products
from jaxforge.model.runtime import gpu_capability
from jaxforge.model.transformer import (
    LAYER_EMBEDDINGS,
    Model,
    active_parameter_count,
    parameter_count,
)
from jaxforge.parallel import device_memory
from jaxforge.parallel.device_memory import bytes_per_device, gigabytes
from jaxforge.parallel.mesh import data_parallel_size, describe_mesh
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.memory import step_memory
from jaxforge.storage import urls
from jaxforge.telemetry.numbers import human
from jaxforge.training.frozen import FrozenFields
from jaxforge.training.summary import describe_groups, epoch_rounding


def rows(
    program: Program,
    state: TrainState,
    progress: Progress,
    frozen: FrozenFields | None = None,
    derived: Iterable[str] = (),
) -> Mapping[str, str]:
    """Return the rows of the banner by subject.

    Args:
        program: the program of the run.
        state: the initial state of this start.
        progress: the counters at this start.
        frozen: the reference or teacher, if the objective has one.
        derived: a line for each value of the config that the user did not write.
    """
    named = [*_rows(program, state, progress, frozen), ("derived", "\n".join(derived))]
    return {name: text for name, text in named if text}


def _rows(
    program: Program, state: TrainState, progress: Progress, frozen: FrozenFields | None
) -> Iterator[tuple[str, str]]:
    config, model, mesh = program.config, program.model, program.mesh
    train, device = config.train, jax.devices()[0]
    yield "model", _model(config.model)
    yield "experts", _experts(model)
    count = human(parameter_count(model.abstract))
    yield "parameters", f"{count} in {train.param_dtype}, computing in {train.mixed_precision}"
    yield "embeddings of layers", describe_layer_embeddings(state)
    yield "adapters", _adapters(model)
    yield "frozen model", _frozen(frozen)
    yield "optimizer", _optimizer(config)
    yield "average", describe_average(train, bytes_per_device(state.ema))
    devices = f"{jax.device_count()} x {device.device_kind} ({device.platform})"
    yield "devices", f"{devices}, {jax.process_count()} process(es)"
    yield "mesh", describe_mesh(mesh.shape)
    yield "groups", describe_groups(config, model, mesh)
    ramp = train.ramp(data_parallel_size(mesh))
    per_update = ramp.sequences(train.grad_accum_steps)
    yield "step", _step(config, per_update)
    yield "memory", _memory(program, state, frozen)
    if model.recipe is not None:
        capability = gpu_capability(device)
        products = describe_products(model.recipe, device.platform, capability, device.device_kind)
        yield "products", products
    yield "kernels", _kernels(config, model, mesh)
    yield "on the host", ", ".join(train.offload)
    yield "replicas", describe_memory(config.checkpoint, state)
    yield "data", _data(config, progress.sequences_per_epoch)
    yield "length", _length(config, ramp.samples(train.max_steps), per_update, progress)
    seed = "" if train.data_seed is None else f", of the data {train.data_seed}"
    yield "seed", f"{train.seed}{seed}"
    yield "versions", _versions()
    yield "run", str(urls.path(config.checkpoint.dir, "checkpoint.dir").absolute())


def _model(m: ModelConfig) -> str:
    return (
        f"{m.n_layers} layers, dim {m.dim}, {m.n_heads}/{m.kv_heads} heads of {m.head_size}, "
        f"ffn {m.ffn_dim}, vocabulary {m.vocab_size:,}"
    )


def _step(config: JobConfig, samples: int) -> str:
    t, d = config.train, config.distributed
    schedule = f", {d.pp_schedule}" if d.pp > 1 else ""
    return (
        f"{samples} sequences x {t.seq_len} tokens = {samples * t.seq_len:,} tokens, "
        f"in {t.grad_accum_steps} microbatch(es); gradients reduced per {t.grad_sync}{schedule}"
    )


def _kernels(config: JobConfig, model: Model, mesh: Mesh) -> str:
    experts = f"experts: {model.runtime.grouped}, " if config.model.is_moe else ""
    return (
        f"attention: {model.runtime.describe_attention(mesh.shape['cp'])}, "
        f"loss: {config.train.loss_fn}, {experts}"
        f"checkpointing: {config.train.activation_checkpointing}"
    )


def _versions() -> str:
    return (
        f"jaxforge {jaxforge.__version__}, jax {version('jax')}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def _memory(program: Program, state: TrainState, frozen: FrozenFields | None) -> str:
    """Return an estimate from shapes; `MemoryReport` logs the real figures after the first step.

    On CPU, the same memory also holds Python with its libraries, the compiler while it runs, data
    workers, and the copy of a state that is being saved.
    """
    # The frozen model stays on the devices during the whole run.
    needs = step_memory(
        program.config, program.model, program.mesh, bytes_per_device(state),
        bytes_per_device(frozen.params) if frozen and frozen.params is not None else 0,
    ).total  # fmt: skip
    has = device_memory.capacity_per_device()
    more = ""
    if jax.default_backend() == "cpu":
        more = "; libraries, compiler, data and saves need more"
    return (
        f"about {gigabytes(needs)} of {gigabytes(has)} per device, for the arrays of a step{more}"
    )


def _data(config: JobConfig, per_epoch: int | None) -> str:
    data = config.data
    names = ", ".join(dataset.label for dataset in data.datasets)
    name = names or data.dataset_path or data.hf_dataset_name
    if not name:
        return "synthetic random tokens (no data)"
    tokens = f": {human(per_epoch * config.train.seq_len)} tokens" if per_epoch else ""
    return f"{name}{tokens}"


def _length(config: JobConfig, samples: int, per_update: int, progress: Progress) -> str:
    """Describe the length of the whole run and its current position."""
    epochs, per_epoch = "", progress.sequences_per_epoch
    if per_epoch:
        rounding = epoch_rounding(per_epoch, per_update)
        epochs = f", {samples / per_epoch:.3g} epochs{rounding}"
    begun = f"; from step {progress.step:,} on" if progress.step else ""
    tokens = human(samples * config.train.seq_len)
    return f"{config.train.max_steps:,} steps, {tokens} tokens{epochs}{begun}"


def _optimizer(config: JobConfig) -> str:
    """Describe the optimizer and the storage formats of moments and parameters."""
    rounding = config.train.param_rounding
    rounded = "" if rounding == "nearest" else f", parameters rounded: {rounding}"
    # Vectors are few, and blocks of 8 bits would be wider than some of them.
    moments = config.train.opt_state_dtype.replace("8bit", "8 bits, vectors in float32")
    idle = ", experts without tokens skipped" if config.skips_idle_experts else ""
    o = config.optimizer
    factors = "".join(f", lr x {f:g} for {pattern}" for pattern, f in o.lr_patterns.items())
    frozen = "".join(f", {pattern} frozen" for pattern in o.freeze_patterns)
    return f"{o.name}, moments in {moments}{rounded}{idle}{factors}{frozen}"


def _adapters(model: Model) -> str:
    """Describe the adapters, the only trained parameters; empty without them."""
    lora = model.adapters
    if lora is None:
        return ""
    trained = human(parameter_count(split_adapters(model.abstract)[0]))
    return f"rank {lora.rank}, outputs x {lora.scale:g}; {trained} trained parameters in float32"


def _frozen(frozen: FrozenFields | None) -> str:
    """Describe the frozen model of the objective; empty without one."""
    if frozen is None:
        return ""
    if frozen.params is None:
        return "the base model of the adapters"
    count = human(parameter_count(frozen.model.model.abstract))
    return f"{count} parameters, {gigabytes(bytes_per_device(frozen.params))} per device"


def describe_average(train: TrainConfig, nbytes: int) -> str:
    """Describe the average of the parameters; empty without one."""
    if not train.averages_weights:
        return ""
    every = f", every {train.ema_interval} updates" if train.ema_interval > 1 else ""
    start = f", from update {train.ema_start + 1:,} on" if train.ema_start else ""
    return (
        f"of the parameters, decay {train.ema_decay:g}{every}{start}, in {train.ema_dtype}: "
        f"{gigabytes(nbytes)} per device"
    )


def describe_layer_embeddings(state: TrainState) -> str:
    """Describe the size of the embeddings of layers; empty without them."""
    if (embeddings := state.params.get(LAYER_EMBEDDINGS)) is None:
        return ""
    count, size = parameter_count(embeddings), bytes_per_device(embeddings)
    return f"{human(count)} parameters, {gigabytes(size)} per device"


def _experts(model: Model) -> str:
    """Describe the experts; empty without them."""
    m = model.config
    if not m.is_moe:
        return ""
    layers = "" if all(m.has_experts) else f"in {sum(m.has_experts)} layers, "
    latent = f" in a latent of {m.moe_latent_dim}" if m.moe_latent_dim else ""
    shared = f", 1 shared of {m.shared_expert_dim}" if m.shared_expert_dim else ""
    capacity = f"capacity {m.moe_capacity_factor:g}" if m.moe_capacity_factor else "dropless"
    return (
        f"{layers}{m.moe_top_k} of {m.num_experts}, width {m.expert_dim}{latent}{shared}; "
        f"{m.moe_router}, {capacity}; {human(active_parameter_count(model))} active parameters "
        "per token"
    )
