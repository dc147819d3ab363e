"""`python -m jaxforge.train --config FILE [--section.key=value ...]`: trains, or goes on training.

A run is one directory, `checkpoint.dir`: `config.toml` (resolved), `metrics.jsonl`, `logs/`,
`tokenizer/`, `checkpoints/`. The same command on the same directory resumes from its newest
checkpoint. `--help` lists every key; `training.exits` lists the exit codes.
"""

import functools
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxforge import run_directory
from jaxforge.checkpoint.manager import Checkpoints, Source, starting_state
from jaxforge.cli import run_main
from jaxforge.config import help, load, rules, torch_only
from jaxforge.config.job import JobConfig
from jaxforge.data import loader
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model, build_model, matmul_precision, parameter_count
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.parallel import compilation, host_memory, multihost
from jaxforge.parallel.mesh import data_parallel_size, make_mesh
from jaxforge.parallel.xla_flags import Option
from jaxforge.telemetry.console import add_log_file, banner, human, setup_logging
from jaxforge.telemetry.measures import Work
from jaxforge.telemetry.outlets import check_libraries, open_outlets
from jaxforge.telemetry.profiler import Profiler
from jaxforge.telemetry.tracker import Start, Tracker
from jaxforge.training.evaluation import Evaluator, summary
from jaxforge.training.exits import Exit, Signals
from jaxforge.training.exporting import Exporter
from jaxforge.training.hooks import Hook, HookRunner
from jaxforge.training.loop import Trainer
from jaxforge.training.progress import Progress
from jaxforge.training.state import TrainState
from jaxforge.training.step import Batch, Controls, TrainStep, make_train_step

log = logging.getLogger("jaxforge.train")  # not __name__, which is __main__ under `python -m`


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, returns the exit code."""
    config = parse_command_line(sys.argv[1:] if argv is None else argv)
    return 0 if config is None else run(config).value


def parse_command_line(argv: Sequence[str]) -> JobConfig | None:
    """`--config FILE` (or `--config=FILE`) and overrides; None when it was only `--help`."""
    if {"-h", "--help"} & set(argv):
        print(f"{__doc__}\n")
        help.print_help(_console())
        return None
    arguments, path = list(argv), None
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            path, arguments[i : i + 2] = arguments[i + 1], []
            break
        if argument.startswith("--config="):
            path = arguments.pop(i).removeprefix("--config=")
            break
    if path is None:
        raise UserError("say what to train: --config FILE (configs/quickstart.toml is an example)")
    return load.load_config(path, arguments)


def run(config: JobConfig, hooks: Sequence[Hook] = ()) -> Exit:
    """Trains from the newest checkpoint of the run directory, or from the start.

    Args:
        config: what `parse_command_line` or `config.load.load_config` gave.
        hooks: your own code, called in order at each event.
    """
    console = _console()
    setup_logging(console)
    host_memory.keep_freed_memory()
    multihost.initialize()
    rules.check(config, jax.device_count())
    compilation.use_cache(config.train)
    mesh = make_mesh(config)
    with (
        Signals(config.train.shutdown_timeout_sec) as signals,
        jax.set_mesh(mesh),
        matmul_precision(config),
    ):
        trainer = build(config, mesh, HookRunner([*hooks, *_exporting(config)]), console)
        reason = None
        try:
            reason = trainer.train(signals)
        finally:
            trainer.close(reason)
    return reason


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)  # 80 would wrap in files and pipes


def build(config: JobConfig, mesh: Mesh, hooks: HookRunner, console: Console) -> Trainer:
    """Everything a run needs, in the order in which a user's mistakes should surface.

    Nothing is written before the data has been checked.
    """
    check_libraries(config.metrics)
    profiler = Profiler(config.profiling, Path(config.checkpoint.dir))
    flags = compilation.accepted_flags(config.train)
    dataset = loader.open_training_data(config)
    eval_data = loader.open_eval_data(config) if config.eval.enabled else {}
    model = build_model(config)
    optimizer = build_optimizer(config, model.axes)
    checkpoints = _open_run_directory(config, model)
    state, progress = starting_state(config, checkpoints, model, optimizer, mesh, _open_foreign)
    progress.run_id = config.metrics.wandb_run_id or progress.run_id
    samples = config.train.microbatch_size(data_parallel_size(mesh)) * config.train.grad_accum_steps
    evaluate = _evaluation(config, mesh, model, eval_data) if eval_data else None
    _announce(console, config, model, mesh, samples)
    tracker = _tracker(console, config, progress, samples * config.train.seq_len)
    remaining = max(0, config.train.max_steps - progress.step)
    batches = loader.training_batches(config, mesh, dataset, progress.samples, remaining)
    collect = (*config.metrics.collect, *hooks.collect)
    step = make_train_step(model, optimizer, config, mesh, collect=collect)
    train_step, batches = _compile(step, state, batches, flags) if remaining else (step, batches)
    return Trainer(
        config=config,
        state=state,
        progress=progress,
        train_step=train_step,
        batches=batches,
        samples_per_step=samples,
        evaluate=evaluate,
        checkpoints=checkpoints,
        tracker=tracker,
        profiler=profiler,
        hooks=hooks,
    )


def _open_run_directory(config: JobConfig, model: Model) -> Checkpoints:
    directory = Path(config.checkpoint.dir)
    run_directory.prepare(directory, config)
    add_log_file(directory)
    for answer in torch_only.answers(config):
        log.info("%s", answer)
    resolved = config.model_dump(mode="json")
    return Checkpoints(directory, config.checkpoint, model.axes, resolved, stack=model.stack)


def _open_foreign(path: str, config: JobConfig) -> Source:
    from torch_compat.restore import open_foreign  # only for runs that start from PyTorch

    return open_foreign(path, config)


def _exporting(config: JobConfig) -> list[Hook]:
    wanted = config.checkpoint.export_interval or config.checkpoint.export_last
    return [Exporter(config.checkpoint)] if wanted else []


def _compile(
    step: jax.stages.Wrapped,
    state: TrainState,
    batches: Iterator[Batch],
    flags: dict[str, Option],
) -> tuple[TrainStep, Iterator[Batch]]:
    """The step as one executable, made before the first step: it can never be compiled twice."""
    first = next(batches)
    compiled = compilation.compile_step(step.lower(state, first, Controls()), flags)
    return compiled, itertools.chain([first], batches)


def _evaluation(
    config: JobConfig, mesh: Mesh, model: Model, datasets: dict[str, loader.Dataset]
) -> Callable[[TrainState], dict[str, float]]:
    tokenizer = run_directory.find_tokenizer(Path(config.checkpoint.dir))
    evaluator = Evaluator(config, mesh, model, datasets, tokenizer)
    evaluator.check_reports(config.checkpoint.best_metric)
    return lambda state: summary(evaluator(state.params, config.eval.steps))


def _tracker(
    console: Console, config: JobConfig, progress: Progress, tokens_per_step: int
) -> Tracker:
    outlets = open_outlets(console, config, progress.run_id, progress.step)
    start = Start(progress.step, progress.tokens, progress.skipped)
    work, extras = Work.of(config, tokens_per_step), config.metrics.collect
    return Tracker(outlets, work, start, config.train.max_steps, extras)


def _announce(console: Console, config: JobConfig, model: Model, mesh: Mesh, samples: int) -> None:
    m, t = config.model, config.train
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    device = jax.devices()[0]
    d = config.distributed
    schedule = f", {d.pp_schedule}" if d.pp > 1 else ""
    rows = {
        "model": f"{m.n_layers} layers, dim {m.dim}, {m.n_heads}/{m.kv_heads} heads of "
        f"{m.head_size}, ffn {m.ffn_dim}, vocabulary {m.vocab_size:,}",
        "parameters": f"{human(parameter_count(model.abstract))} in {t.param_dtype}, "
        f"computing in {t.mixed_precision}",
        "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform}), "
        f"{jax.process_count()} process(es)",
        "mesh": axes or "one device",
        "step": f"{samples} sequences x {t.seq_len} tokens = {samples * t.seq_len:,} tokens, "
        f"in {t.grad_accum_steps} microbatch(es); gradients reduced per {t.grad_sync}{schedule}",
        "kernels": f"attention: {model.how.attention}, loss: {t.loss_fn}, "
        f"checkpointing: {t.activation_checkpointing}",
        "data": config.data.dataset_path
        or config.data.hf_dataset_name
        or "synthetic random tokens (no data.dataset_path)",
        "run": str(Path(config.checkpoint.dir).absolute()),
    }
    if jax.process_index() == 0:
        banner(console, rows)


if __name__ == "__main__":
    raise SystemExit(run_main(functools.partial(main, None)))
