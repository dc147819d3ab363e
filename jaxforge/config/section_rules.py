"""Rules between sections of a configuration (`rules.py`)."""

import math
from collections.abc import Iterator

from jaxforge.cli.suggestions import choices
from jaxforge.config.axes import Mesh, data_parallel
from jaxforge.config.facts import Location, facts
from jaxforge.config.job import JobConfig, short_toml
from jaxforge.config.optimizer import BUILT_IN
from jaxforge.config.problems import Problem, nearest
from jaxforge.config.train import CROSS_ENTROPIES, EIGHT_BIT, SHORTEST_HANG_TIMEOUT
from jaxforge.storage import urls

_TRIED = 256  # shorter sequences
_REPORT_SEC = 20  # after train.hang_timeout: all processes report a hang, process 0 ends last


def adapters_have_model(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Require that adapters load the model that they adapt."""
    if config.lora.rank and "model" in config.checkpoint.exclude_from_loading:
        yield Problem(
            f"lora.rank = {config.lora.rank} adapts the model of checkpoint.load_path, and "
            '"model" in checkpoint.exclude_from_loading leaves it out',
            {"lora.rank": 0},
        )


def objective_has_one_loss(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Refuse a registered loss with an objective that defines its own."""
    train = config.train
    if train.objective != "next_token" and train.loss_fn not in CROSS_ENTROPIES:
        yield Problem(
            f'train.objective = "{train.objective}" defines the loss, and train.loss_fn = '
            f'"{train.loss_fn}" defines another one',
            {"train.loss_fn": CROSS_ENTROPIES[0]},
        )


def distillation_has_teacher(config: JobConfig, mesh: Mesh) -> Iterator[str | Problem]:
    """Require the teacher of a distillation or its logits, at most as many as tokens exist."""
    section, entries = config.distillation, config.model.vocab_size
    if config.train.objective != "distillation":
        return
    if section.teacher is None and section.logits is None:
        yield (
            'train.objective = "distillation" requires a teacher: set distillation.teacher to its '
            "checkpoint, or distillation.logits to its saved logits"
        )
    if section.teacher is not None and section.logits is not None:
        yield "distillation.teacher and distillation.logits are both set: remove one of them"
    if section.top_k > entries:
        yield Problem(
            f"distillation.top_k = {section.top_k} exceeds model.vocab_size = {entries}",
            {"distillation.top_k": entries},
        )


def dpo_has_pairs_and_reference(config: JobConfig, mesh: Mesh) -> Iterator[str | Problem]:
    """Require data and a reference for DPO, without terms of the cross-entropy, which it lacks."""
    data, dpo = config.data, 'train.objective = "dpo"'
    if config.train.objective != "dpo":
        return
    if config.dpo.reference is None and config.checkpoint.load_path is None:
        yield (
            f"{dpo} requires a trained model: set checkpoint.load_path to it, and dpo.reference if "
            "the reference is another model"
        )
    elif config.dpo.reference is None and config.lora.adapter is not None:
        yield (
            f"{dpo} with lora.adapter starts from an adapted model: set dpo.reference to a run "
            "with its merged weights, or to the base model"
        )
    if not (data.dataset_path or data.datasets):
        yield (
            f"{dpo} requires pairs of answers: set data.dataset_path to the output of jaxforge "
            "prepare --preferences"
        )
    if weight := config.train.z_loss_weight:
        what = f"{dpo} has no z-loss: train.z_loss_weight = {weight:g}"
        yield Problem(what, {"train.z_loss_weight": 0.0})
    if depth := config.model.mtp_depth:
        yield Problem(
            f"{dpo} does not train modules of multi-token prediction: model.mtp_depth = {depth}",
            {"model.mtp_depth": 0},
        )


def seq_len_fits_model(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Require sequences of at most the model's maximum length."""
    seq_len, longest = config.train.seq_len, config.model.max_seq_len
    if seq_len > longest:
        yield Problem(
            f"train.seq_len = {seq_len} exceeds model.max_seq_len = {longest}",
            nearest("train.seq_len", longest, range(max(1, longest - _TRIED), longest + 1)),
            {"model.max_seq_len": seq_len},
        )


def tokens_of_an_update_fit_int32(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Require fewer than 2^31 tokens per update, which devices count in 32 bits."""
    train, dp = config.train, data_parallel(mesh)
    accum, longest = train.grad_accum_steps, (2**31 - 1) // train.seq_len
    rows = train.microbatch_size(dp)
    sequences = train.update_sequences(accum * rows)
    if sequences <= longest:
        return
    per_rank = longest // (accum * dp)
    smaller = ("global_batch_size", per_rank * accum * dp)
    if not train.global_batch_size:
        smaller = ("batch_size", per_rank)
    yield Problem(
        f"an update of {sequences:,} sequences of train.seq_len = {train.seq_len:,} has "
        f"{sequences * train.seq_len:,} tokens, which must be less than 2^31",
        *(
            {f"train.{key}": new}
            for key, new in (smaller, ("grad_accum_steps", longest // rows))
            if new
        ),
    )


def text_datasets_have_tokenizer(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require a tokenizer for text datasets."""
    data = config.data
    if data.tokenizer_path:
        return
    for i, source in enumerate(data.datasets):
        if source.hf_name and not source.path:
            yield f'data.datasets[{i}].hf_name = "{source.hf_name}" requires data.tokenizer_path'
    if data.hf_dataset_name and not (data.datasets or data.dataset_path):
        yield f'data.hf_dataset_name = "{data.hf_dataset_name}" requires data.tokenizer_path'


def eos_is_in_vocabulary(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Require that the end-of-document token is in the vocabulary."""
    eos, vocab_size = config.data.eos_token_id, config.model.vocab_size
    if eos is not None and eos >= vocab_size:
        yield Problem(
            f"data.eos_token_id = {eos} must be less than model.vocab_size = {vocab_size}",
            {"model.vocab_size": eos + 1},
        )


def streaming_has_dataset(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that streams are Hugging Face datasets, in an order without random access."""
    data = config.data
    if data.hf_streaming and data.datasets:
        yield (
            "data.hf_streaming = true does not support data.datasets, which require random access: "
            "set it to false to tokenize Hugging Face datasets once"
        )
    elif data.hf_streaming and (data.dataset_path or not data.hf_dataset_name):
        yield (
            "data.hf_streaming = true requires data.hf_dataset_name without data.dataset_path: set "
            "only data.hf_dataset_name, or set data.hf_streaming to false"
        )
    elif data.hf_streaming and data.order == "torch":
        yield (
            'data.order = "torch" shuffles the whole dataset, which data.hf_streaming = true does '
            'not load: set data.order to "grain" or data.hf_streaming to false'
        )


def phase_weights_name_sources(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that phase weights name sources, and leave at least one source in each phase."""
    data = config.data
    names = [source.label for source in data.datasets]
    for i, phase in enumerate(data.phases):
        key = f"data.phases[{i}].dataset_weights"
        for name in phase.dataset_weights:
            if name not in names:
                yield f'{key} names "{name}", {_no_source(name, names)}'
        if names and not any(data.weights(phase).values()):
            yield f"{key} are all 0: at least one source must have a weight above 0"


def torch_ranks_share_a_microbatch(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that data.torch_ranks divides the sequences of a global microbatch."""
    ranks = config.data.torch_ranks
    if ranks is None:
        return
    if not config.data.datasets or config.data.order != "torch":
        yield (
            f"data.torch_ranks = {ranks} applies only to mixtures: remove it, or set "
            'data.datasets and data.order = "torch"'
        )
        return
    rows = config.train.microbatch_size(data_parallel(mesh))
    if rows % ranks:
        yield (
            f"data.torch_ranks = {ranks} must divide the {rows} sequences of a global microbatch: "
            "change train.global_batch_size or train.grad_accum_steps"
        )


def used_average_exists(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Require an average of the parameters if it is to be exported or evaluated."""
    has_tasks = config.eval.enabled and config.eval.has_tasks
    for key in ("checkpoint.export_weights", *(("eval.tasks_weights",) if has_tasks else ())):
        if config.settings[key] == "ema" and not config.train.averages_weights:
            what = f'{key} = "ema" requires train.ema_decay, which is 0'
            yield Problem(what, {"train.ema_decay": 0.999}, {key: "raw"})


def fp8_has_layers(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Require at least one layer with 8-bit products."""
    train, layers = config.train, config.model.n_layers
    start, end = train.num_layers_at_start_in_bf16, train.num_layers_at_end_in_bf16
    if train.mixed_precision == "fp8" and start + end >= layers:
        yield Problem(
            f"train.num_layers_at_start_in_bf16 + num_layers_at_end_in_bf16 = {start} + {end} "
            f'leave none of model.n_layers = {layers} for train.mixed_precision = "fp8"',
            {"train.num_layers_at_start_in_bf16": 0, "train.num_layers_at_end_in_bf16": 0},
            {"train.mixed_precision": "bf16"},
        )


def schedule_free_has_no_schedule(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that schedule-free AdamW has no learning-rate schedule."""
    name = config.scheduler.name
    if config.optimizer.name == "schedule_free_adamw" and name != "none":
        yield (
            f'optimizer.name = "schedule_free_adamw" requires scheduler.name = "none", not '
            f'"{name}": it warms up by optimizer.schedule_free_adamw.warmup_steps and averages '
            "weights instead of decaying the rate"
        )


def moment_storage_is_supported(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Refuse offloaded or 8-bit moments where no loop updates them part by part.

    Registered optimizers define their own state, and SOAP rotates whole matrices.
    """
    name = config.optimizer.name
    if config.optimizer.traits.updates_by_rows:
        return
    if "optimizer" in config.train.offload:
        yield Problem(
            f'train.offload = ["optimizer"] does not support optimizer.name = "{name}": its '
            "moments stay on the device",
        )
    if config.train.opt_state_dtype == EIGHT_BIT:
        names = ", ".join(each for each, traits in BUILT_IN.items() if traits.updates_by_rows)
        yield Problem(
            f'train.opt_state_dtype = "8bit" does not support optimizer.name = "{name}", only '
            f"{names}",
            {"train.opt_state_dtype": "float32"},
        )


def logits_can_be_clipped(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse QK-Clip where logits are not proportional to the weights of queries and keys."""
    model, asked = config.model, f"optimizer.qk_clip = {config.optimizer.qk_clip}"
    if config.optimizer.qk_clip is None:
        return
    reasons = {
        "model.qk_norm": (model.qk_norm, "normalizes queries and keys, which bounds their logits"),
        "model.qk_l2_norm": (model.qk_l2_norm, "normalizes them, which bounds their logits"),
        "model.clip_qkv": (model.clip_qkv, "limits queries and keys after their projections"),
        "lora.rank": (config.lora.rank, "does not train the weights of queries and keys"),
        "model.mtp_depth": (model.mtp_depth, "has attention whose logits are not recorded"),
    }
    for key, (value, effect) in reasons.items():
        if value:
            yield (
                f"{asked} does not support {key} = {short_toml(value)}, which {effect}. Remove one "
                "of the two"
            )


def hang_is_reported_before_the_end(config: JobConfig, mesh: Mesh) -> Iterator[Problem]:
    """Require that a hang is reported before JAX ends the processes of the job."""
    heartbeat, timeout = config.distributed.heartbeat_timeout_sec, config.train.hang_timeout
    longest = heartbeat - _REPORT_SEC
    if timeout <= max(0, longest):
        return
    fitting = longest if longest >= SHORTEST_HANG_TIMEOUT else 0
    yield Problem(
        f"train.hang_timeout = {timeout:g} requires distributed.heartbeat_timeout_sec of at least "
        f"{math.ceil(timeout) + _REPORT_SEC}, not {heartbeat}, so that processes report a hang "
        "before JAX ends them",
        {"train.hang_timeout": fitting},
        {"distributed.heartbeat_timeout_sec": math.ceil(timeout) + _REPORT_SEC},
    )


def locations_are_supported(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse URLs that are malformed, or that a key does not accept (`facts.Location`).

    A URL is never interpreted as a local file name.
    """
    locations = dict(facts(JobConfig, Location))
    for key, line, value in _strings(config):
        location, fault = locations.get(key), urls.fault(value)
        if location is None or not urls.in_bucket(value):
            continue
        if location.urls == "none":
            yield f"{line} = {short_toml(value)} is not local: name {location.instead}"
        elif fault and (location.urls == "bucket" or "://" not in value):
            yield f"{line} = {fault}"


def runs_with_files_are_local(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse a run in a bucket with settings that write files next to it."""
    if not urls.in_bucket(config.checkpoint.dir):
        return
    run = f"checkpoint.dir = {short_toml(config.checkpoint.dir)}"
    if config.data.hf_streaming:
        yield f"data.hf_streaming = true stores its position in local files: not with {run}"
    if config.checkpoint.export_interval or config.checkpoint.export_last:
        yield (
            f"checkpoint.export_interval and export_last write local files: not with {run}; "
            "convert its checkpoints with `jaxforge convert`"
        )


def _no_source(name: str, names: list[str]) -> str:
    if not names:
        return "but data.datasets is empty: add the source there"
    return f"which is not a source{choices(name, names)}"


def _strings(config: JobConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, key with index, value) of every string, including strings in lists of tables."""
    for key, value in config.settings.items():
        if isinstance(value, str):
            yield key, key, value
        for i, table in enumerate(value if isinstance(value, tuple) else ()):
            for inner, text in table if hasattr(table, "model_fields_set") else ():
                if isinstance(text, str):
                    yield f"{key}.{inner}", f"{key}[{i}].{inner}", text
