"""Rules between sections and the device mesh, one small function each.

A rule takes the configuration and the size of each mesh axis, and yields one sentence, naming the
keys to change, per way in which it is broken: or a `Problem`, whose changes `check` tries before it
proposes them. `RULES` lists them all; `check` runs them.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Set
from difflib import get_close_matches

from jaxforge.config.fixes import changed, other_axes, smaller_axis
from jaxforge.config.job import JobConfig
from jaxforge.config.locations import misplaced
from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.config.problems import Change, Problem, by_what, divisors, multiples, nearest, one
from jaxforge.config.train import CROSS_ENTROPIES, EIGHT_BIT
from jaxforge.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh axes, slowest network first: neighbours in tp are neighbours in the machine."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""The axes that sequences are spread over."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp", "ep")
"""The axes over which devices have other tokens: other sequences, or other parts of them."""

Mesh = Mapping[str, int]
"""Size of each axis."""

Rule = Callable[[JobConfig, Mesh], Iterator[str | Problem]]


def check(config: JobConfig, n_devices: int) -> None:
    """Refuses a configuration that cannot run on so many devices.

    Args:
        config: A loaded configuration.
        n_devices: Devices of the whole job, over all hosts.

    Raises:
        UserError: If any rule is broken; one line each.
    """
    problems = list(_broken_mesh(config, n_devices))
    mesh = _declared(config) if problems else mesh_shape(config, n_devices)
    problems += list(_broken_rules(config, mesh, n_devices))
    problems += misplaced(config)
    if problems:
        raise UserError("\n".join(problems))


def _broken_mesh(config: JobConfig, n_devices: int) -> Iterator[str]:
    """A sentence, with changes after which no new rule is broken, or else those of the mesh."""
    known = _found(config, _declared(config)).keys()
    for problem in _mesh_problems(config, n_devices):
        is_clean = functools.partial(_leaves_only, config, known, n_devices)
        is_mended = functools.partial(_leaves_only, config, None, n_devices)
        yield problem.told(is_clean if problem.working(is_clean) else is_mended)


def _broken_rules(config: JobConfig, mesh: Mesh, n_devices: int) -> Iterator[str]:
    """A sentence for each, with changes after which it is not broken, nor another one."""
    broken = _found(config, mesh)
    for what, problem in broken.items():
        others = broken.keys() - {what}
        yield problem.told(functools.partial(_leaves_only, config, others, n_devices))


def _leaves_only(config: JobConfig, known: Set[str] | None, n_devices: int, change: Change) -> bool:
    """Whether a changed configuration runs on so many devices but for these problems.

    Without `known`, whether it makes a mesh.
    """
    new = changed(config, change)
    if new is None or any(_mesh_problems(new, n_devices)):
        return False
    return known is None or _found(new, mesh_shape(new, n_devices)).keys() <= known


def _found(config: JobConfig, mesh: Mesh) -> dict[str, Problem]:
    """What is broken, by what is wrong."""
    return by_what(problem for rule in RULES for problem in rule(config, mesh))


def data_parallel(mesh: Mesh) -> int:
    """Number of groups of devices that see different sequences."""
    return math.prod(mesh[axis] for axis in BATCH_AXES)


def token_parallel(mesh: Mesh) -> int:
    """Number of groups of devices that see different tokens, and have gradients of their own."""
    return math.prod(mesh[axis] for axis in DATA_AXES)


def mesh_shape(config: JobConfig, n_devices: int) -> dict[str, int]:
    """The size of each mesh axis, in the order of `AXES`, with dp_shard = -1 resolved.

    Args:
        config: A loaded configuration.
        n_devices: Devices of the whole job, over all hosts.

    Raises:
        UserError: If the axes do not multiply to `n_devices`.
    """
    for problem in _broken_mesh(config, n_devices):
        raise UserError(problem)
    mesh = _declared(config)
    if config.distributed.dp_shard == -1:
        mesh["dp_shard"] = n_devices // math.prod(mesh.values())
    return mesh


def with_copies(config: JobConfig, mesh: Mesh) -> dict[str, int]:
    """The axes that devices are laid out in, where every device has as much of each parameter.

    Parameters are cut along `model.dim`. Of a dp_shard that does not divide it, the largest factor
    that does stays dp_shard, and the rest joins dp_replicate: parameters are split over the one and
    copied over the other, and the batch is split as before.

    Args:
        config: A config that `check` has passed.
        mesh: Its axes, as of `mesh_shape`.
    """
    shards = math.gcd(mesh["dp_shard"], config.model.dim // (mesh["cp"] * mesh["ep"]))
    copies = mesh["dp_shard"] // shards
    return {**mesh, "dp_replicate": mesh["dp_replicate"] * copies, "dp_shard": shards}


def seq_len_fits_model(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """The position table covers the sequence."""
    seq_len, longest = config.train.seq_len, config.model.max_seq_len
    if seq_len > longest:
        yield Problem(
            f"train.seq_len = {seq_len} exceeds model.max_seq_len = {longest}",
            (
                nearest("train.seq_len", longest, range(1, longest + 1)),
                one("model.max_seq_len", seq_len),
            ),
        )


def eval_has_a_source(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Evaluation has something to read."""
    if config.eval.enabled and not config.eval.sources():
        yield (
            "eval.enabled = true needs data: set eval.dataset_path, eval.hf_dataset_name or "
            "[[eval.datasets]], or eval.enabled = false"
        )


def best_metric_is_logged(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Checkpoints are ranked by what evaluation gives."""
    metric, known = config.checkpoint.best_metric, config.eval.metric_names()
    if config.eval.enabled and metric not in known and not _has_terms(config):
        near = get_close_matches(metric, known, n=1, cutoff=0.0)[0]
        yield (
            f'checkpoint.best_metric = "{metric}" is not a metric of [eval]; did you mean '
            f'"{near}"? There are {", ".join(known)}'
        )


def early_stop_metric_is_logged(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """What has to improve is measured."""
    stop, known = config.early_stop, config.eval.metric_names()
    if not stop.active or stop.patience_steps is None or not stop.metric.startswith("eval/"):
        return
    if not config.eval.enabled:
        yield (
            f'early_stop.metric = "{stop.metric}" needs eval.enabled = true; or go by "train/loss"'
        )
    elif stop.metric not in known and not _has_terms(config):
        near = get_close_matches(stop.metric, known, n=1, cutoff=0.0)[0]
        yield (
            f'early_stop.metric = "{stop.metric}" is not a metric of [eval]; did you mean "{near}"?'
        )


def _has_terms(config: JobConfig) -> bool:
    """Whether a loss or model of one's own may give more metrics, known once they are built."""
    own_loss = config.train.loss_fn not in CROSS_ENTROPIES
    return own_loss or config.model.model_type != "transformer"


def hugging_face_has_a_tokenizer(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Text is read with a tokenizer."""
    data = config.data
    if data.tokenizer_path:
        return
    for i, source in enumerate(data.datasets):
        if source.hf_name and not source.path:
            yield f'data.datasets[{i}].hf_name = "{source.hf_name}" needs data.tokenizer_path'
    if data.hf_dataset_name and not (data.datasets or data.dataset_path):
        yield f'data.hf_dataset_name = "{data.hf_dataset_name}" needs data.tokenizer_path'


def streaming_has_a_dataset(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """What streams is a Hugging Face dataset, and in an order that does without random access."""
    data = config.data
    if data.hf_streaming and data.datasets:
        yield (
            "data.hf_streaming = true does not mix: data.datasets are drawn from in random access; "
            "set it to false, and Hugging Face datasets are tokenized once"
        )
    elif data.hf_streaming and (data.dataset_path or not data.hf_dataset_name):
        yield (
            "data.hf_streaming = true is for data.hf_dataset_name alone: set it to false, or name "
            "a dataset and no data.dataset_path"
        )
    elif data.hf_streaming and data.order == "torch":
        yield (
            'data.order = "torch" shuffles the whole dataset, which data.hf_streaming = true never '
            'sees: set the one to "grain" or the other to false'
        )


def phases_weigh_what_there_is(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Weights of phases are those of sources, and some source is drawn from in each."""
    data = config.data
    names = [source.label for source in data.datasets]
    for i, phase in enumerate(data.all_phases):
        annealing = data.anneal_start_step
        key = "data.anneal_weights" if annealing else f"data.phases[{i}].dataset_weights"
        for name in phase.dataset_weights:
            if name not in names:
                yield f'{key} names "{name}", {_no_source(name, names)}'
        if names and not any(data.weights(phase).values()):
            yield f"{key} leave no source to draw from: give one a weight above 0"


def torch_ranks_share_a_microbatch(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """The ranks whose order is followed read as many rows of a microbatch each."""
    ranks = config.data.torch_ranks
    if ranks is None:
        return
    if not config.data.datasets or config.data.order != "torch":
        yield (
            f"data.torch_ranks = {ranks} is for the order of a mixture: leave it out, or set "
            'data.datasets and data.order = "torch"'
        )
        return
    rows = config.train.microbatch_size(data_parallel(mesh))
    if rows % ranks:
        yield (
            f"data.torch_ranks = {ranks} must divide the {rows} sequences of a global microbatch: "
            "change train.global_batch_size or train.grad_accum_steps"
        )


def heads_divide_by_tp(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Each tensor-parallel rank has whole query heads."""
    yield from _divides(config, "model.n_heads", config.model.n_heads, mesh, "tp")


def kv_heads_divide_by_tp(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Each tensor-parallel rank has whole key/value heads."""
    if config.model.n_kv_heads:  # else they are as many as the query heads
        yield from _divides(config, "model.n_kv_heads", config.model.n_kv_heads, mesh, "tp")


def seq_len_divides_by_cp_and_tp(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Context-parallel ranks share the sequence, and between blocks tensor-parallel ones do."""
    yield from _divides(config, "train.seq_len", config.train.seq_len, mesh, "cp", "tp")


def ffn_dim_divides_by_tp(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Each tensor-parallel rank has as many feed-forward columns."""
    yield from _divides(config, "model.ffn_hidden_dim", config.model.ffn_dim, mesh, "tp")


def vocab_divides_by_pp_and_tp(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Each tensor-parallel rank of each stage has as many rows of embedding and head."""
    yield from _divides(config, "model.vocab_size", config.model.vocab_size, mesh, "pp", "tp")


def dim_divides_by_cp_and_ep(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Parameters are cut along the residual width; over dp_shard, too, if it can be.

    Sequences are spread over all of cp, and experts over all of ep, so that these cannot be cut
    themselves (`with_copies`).
    """
    yield from _divides(config, "model.dim", config.model.dim, mesh, "cp", "ep")


def cp_strategy(config: JobConfig) -> str:
    """`distributed.cp_strategy`, or what "auto" stands for."""
    d = config.distributed
    if d.cp_strategy != "auto":
        return d.cp_strategy
    return "ring" if config.model.n_heads % (d.cp * d.tp) else "ulysses"


def heads_divide_by_cp(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """With "ulysses", each context-parallel rank has as many of a tensor-parallel one's heads."""
    n_heads, product = config.model.n_heads, mesh["cp"] * mesh["tp"]
    if cp_strategy(config) == "ulysses" and n_heads % mesh["tp"] == 0 and n_heads % product:
        yield Problem(
            f'distributed.cp_strategy = "ulysses" splits heads: model.n_heads = {n_heads} must be '
            f"a multiple of distributed.cp * tp = {mesh['cp']} * {mesh['tp']} = {product}",
            (one("distributed.cp_strategy", "ring"), smaller_axis(config, "cp", mesh["cp"])),
        )


def seq_len_divides_by_parts_of_ring(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """With "ring", each context-parallel rank has two parts of a sequence."""
    length, parts = config.train.seq_len, 2 * mesh["cp"]
    if mesh["cp"] > 1 and cp_strategy(config) == "ring" and length % parts:
        unit = math.lcm(parts, mesh["cp"] * mesh["tp"])
        yield Problem(
            f"train.seq_len = {length} must be a multiple of 2 * distributed.cp = {parts} with "
            f'distributed.cp_strategy = "ring"',
            (multiples("train.seq_len", length, unit), smaller_axis(config, "cp", mesh["cp"])),
        )


def global_batch_divides(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """A global batch splits into whole microbatches, and these into whole shares per rank."""
    batch, accum = config.train.global_batch_size, config.train.grad_accum_steps
    dp = data_parallel(mesh)
    if batch and batch % (accum * dp):
        axes = BATCH_AXES if mesh["ep"] > 1 else BATCH_AXES[:2]
        sizes = " * ".join(str(mesh[axis]) for axis in axes)
        fitting = (steps for steps in divisors(batch) if batch % (steps * dp) == 0)
        yield Problem(
            f"train.global_batch_size = {batch} must be a multiple of train.grad_accum_steps * "
            f"distributed.{' * '.join(axes)} = {accum} * {sizes} = {accum * dp}",
            (
                multiples("train.global_batch_size", batch, accum * dp),
                nearest("train.grad_accum_steps", accum, fitting),
            ),
        )


def batch_sizes_agree(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Whoever writes both batch sizes means the same by them."""
    train, dp = config.train, data_parallel(mesh)
    total = train.batch_size * dp * train.grad_accum_steps
    wrote_both = train.global_batch_size and config.is_set("train.batch_size")
    if wrote_both and total != train.global_batch_size:
        share = train.microbatch_size(dp) // dp
        yield Problem(
            f"train.global_batch_size = {train.global_batch_size}, but train.batch_size = "
            f"{train.batch_size} on {dp} data-parallel ranks with train.grad_accum_steps = "
            f"{train.grad_accum_steps} makes {total}",
            (one("train.batch_size", share), one("train.global_batch_size", total)),
        )


def every_stage_has_layers(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """There is a layer for each virtual stage."""
    layers, chunks = config.model.n_layers, config.distributed.chunks
    if layers < mesh["pp"] * chunks:
        product, fewer = f" = {mesh['pp']}", smaller_axis(config, "pp", mesh["pp"])
        if chunks > 1:
            product = f" * pp_chunks = {mesh['pp']} * {chunks} = {mesh['pp'] * chunks}"
        lower = tuple({"distributed.pp_chunks": n} for n in range(chunks - 1, 1, -1))
        what = f"model.n_layers = {layers} is less than distributed.pp{product}"
        yield Problem(what, (fewer, lower))


def microbatches_fill_the_pipeline(config: JobConfig, mesh: Mesh) -> Iterator[str | Problem]:
    """Every stage has work at a time, and interleaving takes microbatches stage by stage."""
    pp = mesh["pp"]
    sizes = {f"train.batch_ramp[{i}]": s.accum for i, s in enumerate(config.train.stages()[:-1])}
    sizes["train.grad_accum_steps"] = config.train.grad_accum_steps
    for key, accum in sizes.items() if pp > 1 else ():
        is_stage = not key.endswith("_steps")
        what, unit = f"{key} = {accum}" + (" microbatches" if is_stage else ""), pp
        if accum < pp:
            what += f" leaves stages of distributed.pp = {pp} idle all the time"
            unit = pp if config.distributed.chunks > 1 else 1
        elif config.distributed.chunks > 1 and accum % pp:
            what += (
                f" must be a multiple of distributed.pp = {pp} with distributed.pp_schedule = "
                '"interleaved_1f1b"'
            )
        else:
            continue
        least = max(pp, _round_up(accum, unit))
        if is_stage:
            yield f"{what}: give it {least}"
        else:
            yield Problem(what, (multiples(key, least, unit),))


def stages_have_layers_of_one_stack(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Pipeline stages run one program, and so layers with the same parameters."""
    if len(config.model.stacks) > 1 and mesh["pp"] > 1:
        everywhere = {"model.moe_frequency": 1, "model.moe_first_dense_layers": 0}
        yield Problem(
            f"distributed.pp = {mesh['pp']} needs layers that all have experts, or none, and here "
            f"{sum(config.model.has_experts)} of {config.model.n_layers} have",
            (smaller_axis(config, "pp", mesh["pp"]), (everywhere,)),
        )


def expert_width_divides_by_tp(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Each tensor-parallel rank has as many columns of every expert."""
    if config.model.is_moe:
        yield from _divides(config, "model.moe_expert_dim", config.model.expert_dim, mesh, "tp")
    if config.model.shared_expert_dim:
        width = config.model.shared_expert_dim
        yield from _divides(config, "model.moe_shared_expert_dim", width, mesh, "tp")


def stages_with_biases_have_as_many_layers(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """A stage with a layer less has zeros in its place, which a bias at its end would learn."""
    model, parts = config.model, mesh["pp"] * config.distributed.chunks
    after = model.norm_type == "layernorm" and model.norm_placement != "pre"
    if mesh["pp"] > 1 and model.n_layers % parts and (model.o_bias or model.mlp_bias or after):
        what = "a layernorm after its parts" if after else "model.o_bias or mlp_bias"
        yield Problem(
            f"model.n_layers = {model.n_layers} must be a multiple of {parts} pipeline stages in a "
            f"model with {what}",
            (
                multiples("model.n_layers", model.n_layers, parts),
                smaller_axis(config, "pp", mesh["pp"]),
            ),
        )


def experts_divide_by_ep(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Expert-parallel ranks have as many experts each, and there are experts."""
    if mesh["ep"] > 1 and not config.model.is_moe:
        yield Problem(
            f"distributed.ep = {mesh['ep']} needs experts",
            (
                smaller_axis(config, "ep", mesh["ep"]),
                multiples("model.num_experts", mesh["ep"], mesh["ep"]),
            ),
        )
    else:
        yield from _divides(config, "model.num_experts", config.model.num_experts, mesh, "ep")


def fp8_has_layers(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Some layer multiplies in 8 bits."""
    train, layers = config.train, config.model.n_layers
    start, end = train.num_layers_at_start_in_bf16, train.num_layers_at_end_in_bf16
    if train.mixed_precision == "fp8" and start + end >= layers:
        yield Problem(
            f"train.num_layers_at_start_in_bf16 + num_layers_at_end_in_bf16 = {start} + {end} "
            f'leave none of model.n_layers = {layers} for train.mixed_precision = "fp8"',
            (
                ({"train.num_layers_at_start_in_bf16": 0, "train.num_layers_at_end_in_bf16": 0},),
                one("train.mixed_precision", "bf16"),
            ),
        )


def experts_in_8_bits_have_no_stages(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Which layers stay in bf16 is known where a stage runs, and not where it is compiled."""
    train = config.train
    stay = any(part in "layers.mlp.experts" for part in train.fp8_exclude)
    wanted = config.model.is_moe and train.mixed_precision == "fp8" and not stay
    if mesh["pp"] > 1 and wanted:
        yield Problem(
            f'train.mixed_precision = "fp8" for experts with distributed.pp = {mesh["pp"]} is not '
            'built: name "experts" in train.fp8_exclude',
            (smaller_axis(config, "pp", mesh["pp"]),),
        )


def stages_offload_nothing(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Activations wait in a ring, for as many microbatches as are in flight; layers are split."""
    if mesh["pp"] > 1 and config.train.offload:
        yield Problem(
            f"train.offload = {json.dumps(config.train.offload)} with distributed.pp = "
            f"{mesh['pp']}: what a stage has stays on its device",
            (smaller_axis(config, "pp", mesh["pp"]),),
        )


def schedule_free_has_no_schedule(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Schedule-free AdamW averages instead of decaying."""
    name = config.scheduler.name
    if config.optimizer.name == "schedule_free_adamw" and name != "none":
        yield (
            f'optimizer.name = "schedule_free_adamw" needs scheduler.name = "none", not "{name}": '
            "it warms up by optimizer.schedule_free_warmup_steps and averages instead of decaying"
        )


def moments_in_8_bits_are_ours(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """What an optimizer of the user's own keeps, and how, is up to it."""
    name = config.optimizer.name
    if "optimizer" in config.train.offload and name not in OPTIMIZERS.ours:
        yield Problem(
            f'train.offload = ["optimizer"] is not for optimizer.name = "{name}": of those that '
            "are registered, moments stay on the device",
        )
    if config.train.opt_state_dtype == EIGHT_BIT and name not in OPTIMIZERS.ours:
        yield Problem(
            f'train.opt_state_dtype = "8bit" is not for optimizer.name = "{name}": of those that '
            f"have it ({', '.join(OPTIMIZERS.ours)}) it is none",
            (one("train.opt_state_dtype", "float32"),),
        )


RULES: tuple[Rule, ...] = (
    seq_len_fits_model,
    eval_has_a_source,
    hugging_face_has_a_tokenizer,
    streaming_has_a_dataset,
    phases_weigh_what_there_is,
    torch_ranks_share_a_microbatch,
    best_metric_is_logged,
    early_stop_metric_is_logged,
    heads_divide_by_tp,
    kv_heads_divide_by_tp,
    seq_len_divides_by_cp_and_tp,
    heads_divide_by_cp,
    seq_len_divides_by_parts_of_ring,
    ffn_dim_divides_by_tp,
    vocab_divides_by_pp_and_tp,
    dim_divides_by_cp_and_ep,
    global_batch_divides,
    batch_sizes_agree,
    every_stage_has_layers,
    microbatches_fill_the_pipeline,
    stages_have_layers_of_one_stack,
    stages_with_biases_have_as_many_layers,
    experts_divide_by_ep,
    expert_width_divides_by_tp,
    fp8_has_layers,
    experts_in_8_bits_have_no_stages,
    stages_offload_nothing,
    schedule_free_has_no_schedule,
    moments_in_8_bits_are_ours,
)
"""All rules that need no more than the configuration and the mesh."""


def _declared(config: JobConfig) -> dict[str, int]:
    """The axes as written, with 1 for a dp_shard that is still open."""
    return {axis: max(1, getattr(config.distributed, axis)) for axis in AXES}


def _mesh_problems(config: JobConfig, n_devices: int) -> Iterator[Problem]:
    sizes = _declared(config)
    total, is_open = math.prod(sizes.values()), config.distributed.dp_shard == -1
    if n_devices == total or (is_open and n_devices % total == 0):
        return
    axes = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": 1}
    product = " * ".join(f"distributed.{axis} = {size}" for axis, size in axes.items())
    needed = f"a multiple of {total}" if is_open else f"{total}"
    yield Problem(
        f"{product} needs {needed} devices, not {n_devices}", other_axes(sizes, n_devices)
    )


def _divides(config: JobConfig, key: str, value: int, mesh: Mesh, *axes: str) -> Iterator[Problem]:
    """Yields a problem unless `value` splits evenly over the product of `axes`."""
    sizes = {axis: mesh[axis] for axis in axes if mesh[axis] > 1}
    size = math.prod(sizes.values())
    if value % size == 0:
        return
    product = f"{' * '.join(map(str, sizes.values()))} = {size}" if len(sizes) > 1 else f"{size}"
    yield Problem(
        f"{key} = {value} must be a multiple of distributed.{' * '.join(sizes)} = {product}",
        (
            multiples(key, value, size),
            *(smaller_axis(config, axis, n) for axis, n in sizes.items()),
        ),
    )


def _no_source(name: str, names: list[str]) -> str:
    if not names:
        return "but data.datasets is empty: list the sources there"
    near = get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f'which is no source; did you mean "{near}"? There are {", ".join(names)}'


def _round_up(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
