"""Config and table of a dialled run: each value with its reason, and the cost."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import make_config
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.parallel.mesh import abstract_mesh, describe_mesh
from jaxforge.telemetry.numbers import duration, human
from jaxforge.tools.starting import dial_target
from jaxforge.tools.starting.config import (
    Line,
    Tables,
    in_epochs,
    starter_tables,
    to_text,
    values_of,
    vocabulary_source,
    with_settings,
)
from jaxforge.tools.starting.dial import (
    MUP_LR,
    MUP_WIDTH,
    STABLE,
    WARMUP,
    Dial,
    Wish,
    model_settings,
    optimal_rate,
    sequences,
    shape,
)
from jaxforge.tools.starting.dial_target import Split, Target
from jaxforge.tools.starting.sizes import (
    CPU_FLOPS,
    EPOCHS,
    TOKENS_PER_PARAMETER,
    PreparedData,
    windows,
)

_LOG_LINES = 1000


class DialledRun(NamedTuple):
    """A complete run.

    Attributes:
        dial: sizes that do not depend on the machine.
        wish: the request.
        target: the machine.
        config: the resolved config.
        split: microbatches of an update.
        tables: lines of the file.
    """

    dial: Dial
    wish: Wish
    target: Target
    config: JobConfig
    split: Split
    tables: Tables

    @property
    def tokens(self) -> int:
        """Tokens of the run, a whole number of updates."""
        train = self.config.train
        assert train.global_batch_size is not None
        return train.max_steps * train.global_batch_size * train.seq_len

    @property
    def flops(self) -> int:
        """Model FLOPs of the run."""
        return self.tokens * self.dial.flops_per_token


def dialled_run(dial: Dial, wish: Wish, target: Target, data: PreparedData | None) -> DialledRun:
    """Return the run of a dial on a machine.

    Args:
        dial: sizes that do not depend on the machine.
        wish: the request.
        target: the machine.
        data: the data; None if they are not prepared yet.

    Raises:
        UserError: a setting of the user is invalid, or the model does not fit the machine.
    """
    seq_len = dial.config.train.seq_len
    batch = sequences(dial.batch_tokens, seq_len, target.n_devices)
    requested = wish.overrides.get("train.global_batch_size")
    if isinstance(requested, int) and requested > 0:  # other values are refused below
        batch = requested
    steps = max(1, round(dial.tokens / (batch * seq_len)))
    tables = _tables(dial, wish, target, data, batch, steps)
    # Without a split first: the split depends on what the user has set.
    config = make_config(values_of(tables), wish.settings)
    split = dial_target.split_batch(config, target)
    config = make_config(values_of(tables), [*wish.settings, *_as_settings(split)])
    tables = {**tables, "train": [*tables["train"], *_split_lines(split)]}
    return DialledRun(dial, wish, target, config, split, with_settings(tables, wish.settings))


def file_text(run: DialledRun) -> str:
    """Return the text of the config file."""
    about = (
        f"{human(run.dial.parameters)} parameters, {human(run.tokens)} tokens, "
        f"{run.flops:.3g} FLOPs, for {run.target.name}\n(jaxforge init --depth {run.dial.depth}; "
        "docs/dial.md has the formulas)."
    )
    return to_text(about, run.tables)


def table_of_cost(run: DialledRun) -> Table:
    """Return the table of sizes, memory and time of the run, estimated from its shapes."""
    table = Table(box=None, header_style="bold")
    for name, style in (("cost", "dim"), ("", None), ("from", None)):
        table.add_column(name, style=style, overflow="fold")
    mesh = abstract_mesh(run.config, run.target.n_devices)
    capacity, n_devices = gigabytes(run.target.device.capacity), run.target.n_devices
    per_parameter = f"{run.tokens / run.dial.parameters:.3g} for each parameter"
    per_token = f"{run.dial.flops_per_token:.4g} for each token, attention in full (as train/mfu)"
    rows = [
        ("machine", run.target.name, f"mesh: {describe_mesh(mesh.shape)}"),
        ("parameters", human(run.dial.parameters), "embedding and head included"),
        ("tokens", human(run.tokens), per_parameter),
        ("FLOPs", f"{run.flops:.3g}", per_token),
        ("memory of a device", gigabytes(run.split.memory), f"of {capacity}, by shapes"),
    ]
    seconds = dial_target.update_seconds(run.config, run.target)
    if seconds is None:
        rows.append(("time", "unknown", f"the speed of {run.target.name}"))
    else:
        total = seconds * run.config.train.max_steps
        hours = f"{total * n_devices / 3600:,.3g}"
        source = f"{dial_target.SHARE_OF_PEAK:.0%} causal MFU, as in published runs"
        if run.target.is_cpu:
            source = f"{CPU_FLOPS / 1e9:.0f} GFLOP/s a core; a short run measures it"
        rows += [
            ("time of an update", duration(seconds), source),
            ("time of the run", duration(total), "without evaluations and checkpoints"),
            ("device hours", hours, f"{n_devices} device(s); jaxforge plan compiles the step"),
        ]
    for row in rows:
        table.add_row(*row)
    return table


def _tables(
    dial: Dial, wish: Wish, target: Target, data: PreparedData | None, batch: int, steps: int
) -> dict[str, list[Line]]:
    return starter_tables(
        list(_model(dial, wish, data)),
        list(_length(dial, wish, target, data, batch, steps)),
        Line("lr", MUP_LR, _why_rate(dial)),
        Path("runs", f"d{dial.depth}"),
        is_on_cpu=target.is_cpu,
        log_interval=max(1, steps // _LOG_LINES),
        data=data,
        scheduler=[
            Line("name", "wsd", "constant rate: the run can be extended before the decay"),
            Line("warmup_steps", WARMUP, "percentages are of max_steps"),
            Line("stable_steps", STABLE, "then a linear decay over the last 20 %"),
            Line("wsd_decay_type", "linear"),
            Line("min_lr_ratio", 0.0),
        ],
        distributed=[Line("dp_shard", -1, "FSDP over all devices")],
    )


def _model(dial: Dial, wish: Wish, data: PreparedData | None) -> Iterator[Line]:
    reasons = {
        "dim": "64 for each layer, rounded up to a multiple of 128 (nanochat)",
        "n_layers": "the dial",
        "n_heads": f"heads of {dial.config.model.head_size}",
        "ffn_hidden_dim": "8/3 of dim, rounded to a multiple of 128 (SwiGLU of Llama)",
        "vocab_size": vocabulary_source(data),
        "init_std": f"of the muP model of width {MUP_WIDTH} (docs/mup.md)",
        "mup_base_width": "the width at which init_std and lr were measured",
    }
    for key, value in {**shape(dial.depth), **model_settings(wish)}.items():
        yield Line(key, value, reasons.get(key, ""))


def _length(
    dial: Dial, wish: Wish, target: Target, data: PreparedData | None, batch: int, steps: int
) -> Iterator[Line]:
    law = f"{human(dial.batch_tokens)} by 0.2920 C^0.3271 (arXiv:2401.02954)"
    at_least = ", at least one sequence for each device" if batch == target.n_devices else ""
    tokens = human(batch * dial.config.train.seq_len)
    yield Line("seq_len", wish.seq_len)
    yield Line("global_batch_size", batch, f"{tokens} tokens; {law}{at_least}")
    yield Line("max_steps", steps, _why_so_long(dial, data, batch, steps))


def _why_so_long(dial: Dial, data: PreparedData | None, batch: int, steps: int) -> str:
    seq_len = dial.config.train.seq_len
    ratio = dial.tokens / dial.parameters
    source = " (Chinchilla, arXiv:2203.15556)" if round(ratio) == TOKENS_PER_PARAMETER else ""
    text = f"{human(dial.tokens)} tokens, {ratio:.3g} for each parameter{source}"
    if data is None:
        return text
    epochs = steps * batch / max(1, windows(data.train, seq_len))
    return f"{text}, {in_epochs(epochs)}" + (
        f": more than {EPOCHS} help little" if epochs > EPOCHS else ""
    )


def _why_rate(dial: Dial) -> str:
    hidden = MUP_LR * MUP_WIDTH / dial.config.model.dim
    standard = optimal_rate(dial.compute_of_law)
    return (
        f"best muP rate at width {MUP_WIDTH} (docs/mup.md): {hidden:.2g} in hidden matrices; "
        f"0.3118 C^-0.1250 is {standard:.2g}"
    )


def _split_lines(split: Split) -> list[Line]:
    why = f"{split.rows} sequence(s) of a device at a time"
    remat = "none" if split.remat == "none" else f"so that {split.rows} sequence(s) fit"
    return [
        Line("grad_accum_steps", split.accum, why),
        Line("activation_checkpointing", split.remat, "" if remat == "none" else remat),
    ]


def _as_settings(split: Split) -> list[str]:
    return [
        f"--train.activation_checkpointing={split.remat}",
        f"--train.grad_accum_steps={split.accum}",
    ]
