"""Starter configs as commented files: sized for data, of a preset, or dialled (`dial.py`).

Each is a list of `Line`: keys with values and their reasons. The sections that all have in common
are those of `starter_tables`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.config.job import toml
from jaxforge.config.reading.load import parse_overrides
from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.sizes import (
    EPOCHS,
    SHAPES,
    TOKENIZER,
    TOKENS_PER_PARAMETER,
    TRAIN,
    VALIDATION,
    PreparedData,
    Preset,
    Size,
    choose_size,
    learning_rate,
    longest_sequence,
    windows,
)

FILE_NAME = "train.toml"
"""Name of the config in a prepared directory."""

_LARGE_VOCABULARY = 16_384  # entries from which on logits dominate the memory
_EVAL_BATCHES = 20
_LOG_LINES = 100
_PLACEHOLDER = "data/mine"
_WIDTH = 100
_COMMENT = 26  # column of comments, unless the value is longer


class Line(NamedTuple):
    """Line of a table.

    Attributes:
        key: name of the key.
        value: value, formatted by `toml`.
        why: comment; "" for none.
    """

    key: str
    value: Any
    why: str = ""


Tables = Mapping[str, Sequence[Line]]
"""Lines by section; sections without lines are left out."""

_COSINE = (Line("name", "cosine"), Line("warmup_steps", "2%", "percentages are of max_steps"))


def starter_tables(
    model: Sequence[Line],
    length: Sequence[Line],
    rate: Line,
    run: Path,
    *,
    is_on_cpu: bool,
    log_interval: int,
    data: PreparedData | None,
    scheduler: Sequence[Line] = _COSINE,
    distributed: Sequence[Line] = (),
) -> dict[str, list[Line]]:
    """Return the sections of a starter config.

    Args:
        model: lines of `[model]`.
        length: lines of `[train]` from seq_len to max_steps.
        rate: peak learning rate.
        run: the run directory.
        is_on_cpu: compute in float32.
        log_interval: updates between two lines of metrics.
        data: the data; None if they are not prepared yet.
        scheduler: lines of `[scheduler]`.
        distributed: lines of `[distributed]`.
    """
    values = {line.key: line.value for line in (*model, *length)}
    train = [
        *length,
        Line("mixed_precision", "fp32", "CPUs have no fast bfloat16")
        if is_on_cpu
        else Line("mixed_precision", "bf16", "weights, moments and gradients stay in float32"),
    ]
    # Logits are [tokens, vocabulary] in float32.
    if values["vocab_size"] >= _LARGE_VOCABULARY:
        train.append(Line("loss_fn", "chunked_cross_entropy", "logits are never all in memory"))
    has_preferences = data is not None and data.train.preferences
    checkpoint = [
        Line("dir", str(run), "the run directory, from which the same command resumes"),
        Line("interval", "10%"),
    ]
    if has_preferences:
        train.append(Line("objective", "dpo", "[dpo] has its settings"))
        # No load_path: only the user knows the model, which is the reference, too.
        checkpoint.append(
            Line("exclude_from_loading", ["optimizer", "progress"], "a new run begins")
        )
    return {
        "model": list(model),
        "train": [*train, Line("seed", 42, "of weights and data")],
        "optimizer": [rate],
        "scheduler": list(scheduler),
        "distributed": list(distributed),
        "data": list(_data(data)),
        "eval": list(_eval(data, values["seq_len"])) if data else [],
        "checkpoint": checkpoint,
        "metrics": [Line("log_interval", log_interval)],
    }


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
    tables = starter_tables(
        list(_sized_model(prepared, size)),
        list(_sized_length(prepared, machine, size)),
        Line("lr", learning_rate(size.parameters), "AdamW's peak for this size"),
        run,
        is_on_cpu=machine.is_cpu,
        log_interval=max(1, size.max_steps // _LOG_LINES),
        data=prepared,
    )
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


def _sized_model(prepared: PreparedData, size: Size) -> Iterator[Line]:
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


def _sized_length(prepared: PreparedData, machine: Machine, size: Size) -> Iterator[Line]:
    mean = round(prepared.train.tokens / prepared.train.documents)
    yield Line("seq_len", size.seq_len, f"a document has {mean:,} tokens on average")
    yield Line("global_batch_size", size.batch, f"sequences: {size.tokens:,} tokens an update")
    if size.accum > 1:
        yield Line("grad_accum_steps", size.accum, "microbatches, so that each fits in memory")
    read = f"{_in_millions(size.max_steps * size.tokens)} tokens, {in_epochs(size.epochs)}"
    reasons = {
        "parameters": f"{TOKENS_PER_PARAMETER} for each parameter (Chinchilla)",
        "data": "further epochs help little",
        "time": f"{'ten minutes' if machine.is_cpu else 'a day'} or so on {machine}",
        "least": "the fewest updates that show learning",
    }
    yield Line("max_steps", size.max_steps, f"{read}: {reasons[size.limit]}")


def tables_of_preset(name: str, preset: Preset, prepared: PreparedData | None) -> Tables:
    """Return the sections of a preset.

    Args:
        name: name of the preset.
        preset: the preset.
        prepared: the data; None if they are not prepared yet.
    """
    vocab_size = prepared.train.vocab_size if prepared else preset.model["vocab_size"]
    model: dict[str, Any] = {**preset.model, "vocab_size": vocab_size}
    comments = {"vocab_size": vocabulary_source(prepared)}
    return starter_tables(
        [Line(key, value, comments.get(key, "")) for key, value in model.items()],
        list(_preset_length(preset, prepared)),
        Line("lr", preset.lr),
        Path("runs", name),
        is_on_cpu=preset.is_on_cpu,
        log_interval=10,
        data=prepared,
        distributed=[
            *(Line(key, value) for key, value in preset.distributed.items()),
            Line("dp_shard", -1, "FSDP over the remaining devices"),
        ],
    )


def _preset_length(preset: Preset, prepared: PreparedData | None) -> Iterator[Line]:
    per_update = preset.batch * preset.seq_len
    yield Line("seq_len", preset.seq_len)
    yield Line("global_batch_size", preset.batch, f"sequences: {per_update:,} tokens an update")
    if preset.accum > 1:
        rows = preset.batch // preset.accum
        why = f"microbatches: {rows} sequences on {preset.devices} device(s)"
        yield Line("grad_accum_steps", preset.accum, why)
    active = " active" if preset.active else ""
    steps, why = preset.max_steps, f"{TOKENS_PER_PARAMETER} tokens for each{active} parameter"
    if preset.steps:
        why = "ten minutes or so"
    if prepared:
        most = max(1, EPOCHS * windows(prepared.train, preset.seq_len) // preset.batch)
        if most < steps:
            steps, why = most, f"{EPOCHS} epochs: further epochs help little"
    yield Line("max_steps", steps, why)


def vocabulary_source(data: PreparedData | None) -> str:
    """Return the comment of `model.vocab_size`."""
    return "the tokenizer's" if data else "that of your tokenizer"


def _data(prepared: PreparedData | None) -> Iterator[Line]:
    if prepared is None:
        command = f"jaxforge prepare TEXT --output {_PLACEHOLDER} --tokenizer bpe"
        yield Line("dataset_path", f"{_PLACEHOLDER}/{TRAIN}", f"yours: {command}")
    else:
        yield Line("dataset_path", prepared.at(TRAIN))
        if prepared.pattern != "*.npy":
            yield Line("file_pattern", prepared.pattern)
        yield Line("tokenizer_path", prepared.at(TOKENIZER))
    if prepared is None or not prepared.train.conversations:
        yield Line("pack_sequences", True, "attention does not cross from one document to the next")


def _eval(prepared: PreparedData, seq_len: int) -> Iterator[Line]:
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


def values_of(tables: Tables) -> dict[str, dict[str, Any]]:
    """Return the values of a config."""
    return {name: {line.key: line.value for line in lines} for name, lines in tables.items()}


def with_settings(tables: Tables, settings: Sequence[str]) -> Tables:
    """Return the tables with settings such as "--model.dim=8" in place of the chosen values."""
    chosen: dict[str, dict[str, Any]] = {}
    for setting in parse_overrides(settings):
        *sections, last = map(str, setting.path)
        table: dict[str, Any] = chosen
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = setting.value
    return {
        name: [
            *(line for line in tables.get(name, ()) if line.key not in chosen.get(name, {})),
            # None removes a key, so that its default applies.
            *(Line(k, v, "given") for k, v in chosen.get(name, {}).items() if v is not None),
        ]
        for name in (*tables, *chosen)
    }


def to_text(about: str, tables: Tables) -> str:
    """Return the text of a config file.

    Args:
        about: first lines, written as comments.
        tables: sections of the file.
    """
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in about.splitlines())]
    for name, lines in tables.items():
        if lines:
            parts.append("\n".join([f"[{name}]", *map(_line, lines)]) + "\n")
    return "\n".join(parts)


def _line(line: Line) -> str:
    is_large = isinstance(line.value, int) and line.value >= 10**6
    text = f"{line.key} = {f'{line.value:_}' if is_large else toml(line.value)}"
    if not line.why:
        return text
    commented = f"{text:<{_COMMENT - 2}}  # {line.why}"
    return commented if len(commented) <= _WIDTH else f"# {line.why}\n{text}"


def in_epochs(epochs: float) -> str:
    """Format a number of epochs."""
    return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


def _in_millions(n: int) -> str:
    return f"{n / 1e6:,.0f}M" if n >= 10**7 else f"{n / 1e6:.2g}M"
