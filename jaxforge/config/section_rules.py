"""Rules between sections of a configuration (`rules.py`)."""

import math
from collections.abc import Iterator

from jaxforge.cli.suggestions import choices
from jaxforge.config.axes import Mesh, data_parallel
from jaxforge.config.eval import (
    BEST_METRIC,
    EARLY_STOP_METRIC,
    TASKS_PREFIX,
    higher_is_better,
    unknown_direction,
)
from jaxforge.config.job import JobConfig, short_toml
from jaxforge.config.optimizer import BUILT_IN
from jaxforge.config.section import Location, facts
from jaxforge.config.train import CROSS_ENTROPIES, EIGHT_BIT
from jaxforge.storage import urls

_REPORT_SEC = 20  # after train.hang_timeout: all processes report a hang, process 0 ends last


def adapters_have_model(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that adapters load the model that they adapt."""
    if config.lora.rank and "model" in config.checkpoint.exclude_from_loading:
        yield (
            f"lora.rank = {config.lora.rank} adapts the model of checkpoint.load_path, and "
            '"model" in checkpoint.exclude_from_loading leaves it out: remove one of them'
        )


def new_indexers_belong_to_the_model(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse new indexers for a model without any, and with adapters, whose base is frozen."""
    if "indexer" not in config.checkpoint.exclude_from_loading:
        return
    asked = '"indexer" in checkpoint.exclude_from_loading'
    if not config.model.latent_attention.has_indexer:
        yield f"{asked} has no effect without model.latent_attention.index_heads: remove it"
    elif config.lora.rank:
        yield (
            f"{asked} asks for new indexers, and lora.rank = {config.lora.rank} would freeze them: "
            "remove one of them"
        )


def objective_has_one_loss(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse a registered loss with an objective that defines its own."""
    train = config.train
    if train.objective != "next_token" and train.loss_fn not in CROSS_ENTROPIES:
        yield (
            f'train.objective = "{train.objective}" defines the loss, and train.loss_fn = '
            f'"{train.loss_fn}" defines another one: remove train.loss_fn'
        )


def distillation_has_teacher(config: JobConfig, mesh: Mesh) -> Iterator[str]:
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
        yield (
            f"distillation.top_k = {section.top_k} exceeds model.vocab_size = {entries}: lower it"
        )


def dpo_has_pairs_and_reference(config: JobConfig, mesh: Mesh) -> Iterator[str]:
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
    # The loss of pairs has no mean over tokens to which such terms could be added.
    if weight := config.train.z_loss_weight:
        yield f"{dpo} has no z-loss: set train.z_loss_weight = {weight:g} to 0"
    if depth := config.model.mtp_depth:
        yield (
            f"{dpo} does not train modules of multi-token prediction: set model.mtp_depth = "
            f"{depth} to 0"
        )


def seq_len_fits_model(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require sequences of at most the model's maximum length."""
    seq_len, longest = config.train.seq_len, config.model.max_seq_len
    if seq_len > longest:
        yield (
            f"train.seq_len = {seq_len} exceeds model.max_seq_len = {longest}: lower the first, or "
            "raise the second"
        )


def tokens_of_an_update_fit_int32(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require fewer than 2^31 tokens per update, which devices count in 32 bits."""
    train = config.train
    rows = train.microbatch_size(data_parallel(mesh))
    sequences = train.update_sequences(train.grad_accum_steps * rows)
    # Counters of tokens on the devices are int32, as x64 is off.
    if sequences * train.seq_len >= 2**31:
        size = "global_batch_size" if train.global_batch_size else "batch_size"
        yield (
            f"an update of {sequences:,} sequences of train.seq_len = {train.seq_len:,} has "
            f"{sequences * train.seq_len:,} tokens, which must be less than 2^31: lower "
            f"train.{size} or train.grad_accum_steps"
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


def eos_is_in_vocabulary(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that the end-of-document token is in the vocabulary."""
    eos, vocab_size = config.data.eos_token_id, config.model.vocab_size
    if eos is not None and eos >= vocab_size:
        yield (
            f"data.eos_token_id = {eos} must be less than model.vocab_size = {vocab_size}: change "
            "one of them"
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


def used_average_exists(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require an average of the parameters if it is to be exported or evaluated."""
    has_tasks = config.eval.enabled and config.eval.has_tasks
    for key in ("checkpoint.export_weights", *(("eval.tasks_weights",) if has_tasks else ())):
        if config.settings[key] == "ema" and not config.train.averages_weights:
            yield f'{key} = "ema" requires train.ema_decay, which is 0: set it, or {key} to "raw"'


def fp8_has_layers(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require at least one layer with 8-bit products."""
    train, layers = config.train, config.model.n_layers
    start, end = train.num_layers_at_start_in_bf16, train.num_layers_at_end_in_bf16
    if train.mixed_precision == "fp8" and start + end >= layers:
        yield (
            f"train.num_layers_at_start_in_bf16 + num_layers_at_end_in_bf16 = {start} + {end} "
            f'leave none of model.n_layers = {layers} for train.mixed_precision = "fp8": lower them'
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


def moment_storage_is_supported(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse offloaded or 8-bit moments where no loop updates them part by part.

    Registered optimizers define their own state, and SOAP rotates whole matrices.
    """
    name = config.optimizer.name
    if config.optimizer.traits.updates_by_rows:
        return
    # Moments move between host and device part by part, within the update.
    if "optimizer" in config.train.offload:
        yield (
            f'train.offload = ["optimizer"] does not support optimizer.name = "{name}": its '
            "moments stay on the device"
        )
    if config.train.opt_state_dtype == EIGHT_BIT:
        names = ", ".join(each for each, traits in BUILT_IN.items() if traits.updates_by_rows)
        yield (
            f'train.opt_state_dtype = "8bit" does not support optimizer.name = "{name}", only '
            f"{names}: change one of them"
        )


def logits_can_be_clipped(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse QK-Clip where logits are not proportional to the weights of queries and keys."""
    model, asked = config.model, f"optimizer.qk_clip = {config.optimizer.qk_clip}"
    if config.optimizer.qk_clip is None:
        return
    # QK-Clip scales the weights: each of these breaks the proportion of logits to them.
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


def hang_is_reported_before_the_end(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that a hang is reported before JAX ends the processes of the job."""
    heartbeat, timeout = config.distributed.heartbeat_timeout_sec, config.train.hang_timeout
    # When its own heartbeat expires, JAX ends processes without a report.
    if timeout and timeout > heartbeat - _REPORT_SEC:
        yield (
            f"train.hang_timeout = {timeout:g} requires distributed.heartbeat_timeout_sec of at "
            f"least {math.ceil(timeout) + _REPORT_SEC}, not {heartbeat}, so that processes report "
            "a hang before JAX ends them: change one of them"
        )


def locations_are_supported(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse URLs that are malformed, or that a key does not accept (`facts.Location`).

    A URL is never interpreted as a local file name.
    """
    locations = dict(facts(JobConfig, Location))
    for key, line, value in _strings(config):
        location, fault = locations.get(key), urls.fault(value)
        # Text of other keys may look like a URL, such as a prompt.
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


def eval_has_source(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require a data source or tasks for evaluation."""
    section = config.eval
    if section.enabled and not section.sources() and not section.has_tasks:
        yield (
            "eval.enabled = true requires data: set eval.datasets or eval.tasks, or "
            "eval.enabled = false"
        )


def captures_have_source(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require an evaluation set for captured activations."""
    if config.eval.activations_interval and not config.eval.datasets:
        yield (
            f"eval.activations_interval = {config.eval.activations_interval} requires data: set "
            "eval.datasets, or eval.activations_interval = 0"
        )


def captured_layers_exist(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that captured layers exist in the model."""
    last = config.model.n_layers - 1
    absent = [n for n in config.eval.activations_layers if n > last]
    if config.eval.activations_interval and absent:
        yield (
            f"eval.activations_layers: layer {absent[0]} does not exist: the layers of "
            f"model.n_layers = {last + 1} are 0 to {last}"
        )


def best_metric_is_logged(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that the metric that ranks checkpoints is logged."""
    metric, known = config.checkpoint.best_metric, _evaluation_metrics(config)
    if not config.eval.enabled:
        return
    if metric.startswith(TASKS_PREFIX):
        yield from _tasks_are_named(BEST_METRIC, config)
    # Losses and functions of users name their terms, so an unknown name may be right.
    elif metric not in known and not _has_terms(config):
        near = choices(metric, known)
        yield f'checkpoint.best_metric = "{metric}" is not a metric of [eval]{near}'
    elif config.checkpoint.keep_best_n and not config.eval.sources():
        yield (
            f'checkpoint.keep_best_n ranks by "{metric}", which requires an evaluation set: set '
            "eval.datasets, or checkpoint.keep_best_n = 0"
        )


def early_stop_metric_is_logged(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that the early-stop metric is logged."""
    stop, known = config.early_stop, _evaluation_metrics(config)
    if not stop.uses_metric:
        return
    # Names of step metrics are known after the first step (`EarlyStop.check_metric`).
    if not stop.metric.startswith("eval/"):
        if stop.metric.partition("/")[0] not in _STEP_METRIC_GROUPS:
            near = choices(stop.metric, (*_STEP_METRICS, *known))
            yield f'early_stop.metric = "{stop.metric}" is not a metric of a run{near}'
        elif higher_is_better(stop.metric, stop.mode) is None:
            yield unknown_direction(EARLY_STOP_METRIC, stop.metric)
    elif not config.eval.enabled:
        yield (
            f'early_stop.metric = "{stop.metric}" requires eval.enabled = true; or use "train/loss"'
        )
    elif stop.metric.startswith(TASKS_PREFIX):
        yield from _tasks_are_named(EARLY_STOP_METRIC, config)
    elif not config.eval.sources():
        yield (
            f'early_stop.metric = "{stop.metric}" requires an evaluation set: set '
            'eval.datasets, or use "train/loss"'
        )
    elif stop.metric not in known and not _has_terms(config):
        near = choices(stop.metric, known)
        yield f'early_stop.metric = "{stop.metric}" is not a metric of [eval]{near}'


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


_STEP_METRICS = ("train/loss", "train/grad_norm", "train/lr", "smoothed/loss")
"""Metrics that every logged step has."""
_STEP_METRIC_GROUPS = {
    "train", "smoothed", "terms", "loss", "data", "dpo", "distillation", "model", "moe",
    "attention", "gpu", "goodput",
}  # fmt: skip
"""First parts of the names of metrics that a logged step may have."""


def _tasks_are_named(key: str, config: JobConfig) -> Iterator[str]:
    """Yield a problem if a key names a metric of a task, and the config has no tasks."""
    if not config.eval.has_tasks:
        yield (
            f'{key} = "{config.settings[key]}" is a metric of a task, and there are no tasks: set '
            "eval.tasks or eval.tasks_core"
        )


def _evaluation_metrics(config: JobConfig) -> tuple[str, ...]:
    return config.eval.metric_names(has_average=config.train.averages_weights)


def _has_terms(config: JobConfig) -> bool:
    """Return whether a loss, evaluation function or model may add metrics, known once built."""
    train = config.train
    # Names of further metrics are known only once loss and model are built.
    is_custom = train.loss_fn not in CROSS_ENTROPIES or train.objective != "next_token"
    return bool(is_custom or config.eval.functions) or config.model.model_type != "transformer"
