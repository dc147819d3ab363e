"""Starter configs as tables of a commented file: sized for data, or from a preset."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.prepared import (
    TOKENIZER,
    TRAIN,
    VALIDATION,
    PreparedData,
    longest_sequence,
    windows,
)
from jaxforge.tools.starting.presets import Preset
from jaxforge.tools.starting.sizes import SHAPES
from jaxforge.tools.starting.sizing import (
    EPOCHS,
    TOKENS_PER_PARAMETER,
    Size,
    choose_size,
    learning_rate,
)
from jaxforge.tools.starting.toml_file import Line, Tables, to_text

FILE_NAME = "train.toml"
"""Name of the config in a prepared directory."""

LARGE_VOCABULARY = 16_384
"""Entries from which on logits dominate the memory."""

_EVAL_BATCHES = 20
_LOG_LINES = 100
_PLACEHOLDER = "data/mine"


def config_for_data(prepared: PreparedData, machine: Machine, run: Path) -> tuple[str, Size]:
    """Return a complete config for prepared data.

    Args:
        prepared: the data.
        machine: the target machine.
        run: the run directory.

    Returns:
        The file's text, and the size of the run.
    """
    size = choose_size(prepared, machine)
    tables: Tables = {
        "model": list(_model(prepared, size)),
        "train": list(_train(prepared, machine, size)),
        "optimizer": [Line("lr", learning_rate(size.parameters), "AdamW's peak for this size")],
        "scheduler": _scheduler(),
        "data": list(data_lines(prepared)),
        "eval": list(eval_lines(prepared, size.seq_len)),
        "checkpoint": [*checkpoint_lines(run), *_base_model(prepared)],
        "metrics": [Line("log_interval", max(1, size.max_steps // _LOG_LINES))],
    }
    about = (
        f"{_in_millions(size.parameters)} parameters on {prepared.directory.name}, sized for "
        f"{machine} by jaxforge prepare.\n    jaxforge train --config "
        f"{prepared.directory / FILE_NAME}"
    )
    if prepared.train.preferences:
        about += (
            "\nTo learn from pairs of answers, set the shape of your model, and"
            " checkpoint.load_path to it."
        )
    elif prepared.train.conversations:
        about += (
            "\nThis trains from random weights. To fine-tune a model, set its shape and"
            " checkpoint.load_path as in\nconfigs/fine_tuning.toml."
        )
    return to_text(about, tables), size


def config_of_preset(name: str, preset: Preset, prepared: PreparedData | None) -> str:
    """Return the config of a preset.

    Args:
        name: name of the preset.
        preset: the preset.
        prepared: the data; None if they are not prepared yet.
    """
    vocab_size = prepared.train.vocab_size if prepared else preset.model["vocab_size"]
    model: dict[str, Any] = {**preset.model, "vocab_size": vocab_size}
    comments = {"vocab_size": "the tokenizer's" if prepared else "that of your tokenizer"}
    tables: Tables = {
        "model": [Line(key, value, comments.get(key, "")) for key, value in model.items()],
        "train": list(_preset_train(preset, prepared)),
        "optimizer": [Line("lr", preset.lr)],
        "scheduler": _scheduler(),
        "distributed": [
            *(Line(key, value) for key, value in preset.distributed.items()),
            Line("dp_shard", -1, "FSDP over the remaining devices"),
        ],
        "data": list(data_lines(prepared)) if prepared else placeholder_data(),
        "eval": list(eval_lines(prepared, preset.seq_len)) if prepared else [],
        "checkpoint": checkpoint_lines(Path("runs", name)),
        "metrics": [Line("log_interval", 10)],
    }
    about = f"{name}: {preset.about}, on {preset.machine} (jaxforge init --preset {name})."
    return to_text(about, tables)


def _model(prepared: PreparedData, size: Size) -> Iterator[Line]:
    why = f"{_in_millions(size.parameters)} parameters: {_why_so_large(size)}"
    for key, value in size.shape._asdict().items():
        yield Line(key, value, why)
        why = ""
    yield Line("vocab_size", prepared.train.vocab_size, "the tokenizer's")
    yield Line("max_seq_len", size.seq_len)
    yield Line("tie_embeddings", True, "embedding and head share a matrix")


def _why_so_large(size: Size) -> str:
    if size.shape == SHAPES[0]:
        return "the smallest, for little text"
    if size.limit == "data":
        return f"{TOKENS_PER_PARAMETER} tokens each would be more than {EPOCHS} epochs"
    if size.limit == "time":
        return "the largest for the time of such a machine"
    return f"the data have {TOKENS_PER_PARAMETER} tokens for each"


def _train(prepared: PreparedData, machine: Machine, size: Size) -> Iterator[Line]:
    mean = round(prepared.train.tokens / prepared.train.documents)
    yield Line("seq_len", size.seq_len, f"a document has {mean:,} tokens on average")
    yield Line("global_batch_size", size.batch, f"sequences: {size.tokens:,} tokens an update")
    if size.accum > 1:
        yield Line("grad_accum_steps", size.accum, "microbatches, so that each fits in memory")
    yield Line("max_steps", size.max_steps, _why_so_long(prepared, machine, size))
    if machine.is_cpu:
        yield Line("mixed_precision", "fp32", "CPUs have no fast bfloat16")
    else:
        yield Line("mixed_precision", "bf16", "weights, moments and gradients stay in float32")
        if prepared.train.vocab_size >= LARGE_VOCABULARY:
            yield Line("loss_fn", "chunked_cross_entropy", "logits are never all in memory")
    if prepared.train.preferences:
        yield Line("objective", "dpo", "[dpo] has its settings")
    yield Line("seed", 42, "of weights and data")


def _why_so_long(prepared: PreparedData, machine: Machine, size: Size) -> str:
    tokens = _in_millions(size.max_steps * size.tokens)
    read = f"{tokens} tokens, {in_epochs(size.epochs)}"
    return {
        "parameters": f"{read}: {TOKENS_PER_PARAMETER} for each parameter (Chinchilla)",
        "data": f"{read}: further epochs help little",
        "time": f"{read}: {'ten minutes' if machine.is_cpu else 'a day'} or so on {machine}",
        "least": f"{read}: the fewest updates that show learning",
    }[size.limit]


def _scheduler() -> list[Line]:
    return [
        Line("name", "cosine"),
        Line("warmup_steps", "2%", "percentages are of max_steps"),
    ]


def data_lines(prepared: PreparedData) -> Iterator[Line]:
    """Yield the lines of `[data]` for prepared data."""
    yield Line("dataset_path", prepared.at(TRAIN))
    if prepared.pattern != "*.npy":
        yield Line("file_pattern", prepared.pattern)
    yield Line("tokenizer_path", prepared.at(TOKENIZER))
    if not prepared.train.conversations:
        yield Line("pack_sequences", True, "attention does not cross from one document to the next")


def placeholder_data() -> list[Line]:
    """Return the lines of `[data]` for data that are not prepared yet."""
    return [
        Line("dataset_path", f"{_PLACEHOLDER}/{TRAIN}",
             f"yours: jaxforge prepare TEXT --output {_PLACEHOLDER} --tokenizer bpe"),
        Line("pack_sequences", True, "attention does not cross from one document to the next"),
    ]  # fmt: skip


def eval_lines(prepared: PreparedData, seq_len: int) -> Iterator[Line]:
    """Yield the lines of `[eval]` for the held-out set of prepared data."""
    held_out = prepared.validation
    if held_out is None:
        return
    if not held_out.conversations and longest_sequence(held_out) < seq_len:
        yield Line("enabled", False, f"{held_out.tokens:,} held-out tokens are too few")
        return
    yield Line("enabled", True)
    pattern = {} if prepared.pattern == "*.npy" else {"file_pattern": prepared.pattern}
    yield Line("datasets", {"dataset_path": prepared.at(VALIDATION), **pattern})
    yield Line("interval", "10%")
    yield Line("steps", _EVAL_BATCHES, "batches at most, the same in each evaluation")


def checkpoint_lines(run: Path) -> list[Line]:
    """Return the lines of `[checkpoint]` for a run directory."""
    return [
        Line("dir", str(run), "the run directory, from which the same command resumes"),
        Line("interval", "10%"),
    ]


def _base_model(prepared: PreparedData) -> Iterator[Line]:
    if prepared.train.preferences:
        # No load_path: only the user knows the model, which is the reference, too.
        yield Line("exclude_from_loading", ["optimizer", "progress"], "a new run begins")


def _preset_train(preset: Preset, prepared: PreparedData | None) -> Iterator[Line]:
    per_update = preset.batch * preset.seq_len
    yield Line("seq_len", preset.seq_len)
    yield Line("global_batch_size", preset.batch, f"sequences: {per_update:,} tokens an update")
    if preset.accum > 1:
        why = (
            f"microbatches: {preset.batch // preset.accum} sequences on {preset.devices} device(s)"
        )
        yield Line("grad_accum_steps", preset.accum, why)
    steps, why = preset.max_steps, f"{TOKENS_PER_PARAMETER} tokens for each parameter"
    if preset.active:
        why = f"{TOKENS_PER_PARAMETER} tokens for each active parameter"
    if preset.steps:
        why = "ten minutes or so"
    if prepared:
        most = max(1, EPOCHS * windows(prepared.train, preset.seq_len) // preset.batch)
        if most < steps:
            steps, why = most, f"{EPOCHS} epochs: further epochs help little"
    yield Line("max_steps", steps, why)
    yield Line("mixed_precision", "fp32" if preset.is_on_cpu else "bf16")
    if preset.model["vocab_size"] >= LARGE_VOCABULARY:
        yield Line("loss_fn", "chunked_cross_entropy", "logits are never all in memory")
    yield Line("seed", 42, "of weights and data")


def in_epochs(epochs: float) -> str:
    """Format a number of epochs."""
    return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


def _in_millions(n: int) -> str:
    return f"{n / 1e6:,.0f}M" if n >= 10**7 else f"{n / 1e6:.2g}M"
