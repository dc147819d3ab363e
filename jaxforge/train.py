"""`python -m jaxforge.train --config FILE [--section.key=value ...]`: trains, or goes on training.

A run is one directory, `checkpoint.dir`: `config.toml` (resolved), `metrics.jsonl`, `logs/`,
`tokenizer/`, `checkpoints/`. The same command on the same directory resumes from its newest
checkpoint. `--help` lists every key, `exit_codes` the exit codes.
"""

import functools
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from jaxforge import run_directory
from jaxforge.build import build_trainer
from jaxforge.cli import leave, run_main
from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.config.reading import help, load
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.data.epoch import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.health import out_of_memory
from jaxforge.health.watchdog import Limits, Watchdog
from jaxforge.model.transformer import matmul_precision
from jaxforge.parallel import compilation, host_memory, multihost
from jaxforge.parallel.mesh import make_mesh
from jaxforge.process import end_now
from jaxforge.run_lock import RunLock
from jaxforge.telemetry.console import setup_logging
from jaxforge.training.hooks import Hook
from jaxforge.training.preemption import Exit, Signals


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, returns the exit code."""
    config = parse_command_line(sys.argv[1:] if argv is None else argv)
    return 0 if config is None else run(config).code


def parse_command_line(argv: Sequence[str]) -> UnresolvedConfig | None:
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
    return load.load_unresolved(path, arguments)


def run(config: JobConfig | UnresolvedConfig, hooks: Sequence[Hook] = ()) -> Exit:
    """Trains from the newest checkpoint of the run directory, or from the start.

    Args:
        config: as read; lengths in epochs or tokens are turned into updates here.
        hooks: your own code, called in order at each event.
    """
    console = _console()
    setup_logging(console)
    host_memory.keep_freed_memory()
    known = config.known if isinstance(config, UnresolvedConfig) else config
    with Watchdog(Limits.of(known.train)) as watchdog:
        multihost.initialize(known.distributed.heartbeat_timeout_sec)
        with multihost.leaving_at_once_on_failure():
            return _run(config, hooks, console, watchdog)


def _run(
    config: JobConfig | UnresolvedConfig,
    hooks: Sequence[Hook],
    console: Console,
    watchdog: Watchdog,
) -> Exit:
    if isinstance(config, UnresolvedConfig):
        with watchdog.section("data"):  # for lengths in epochs
            config = config.resolve(jax.device_count(), sequences_per_epoch)
    rules.check(config, jax.device_count())
    compilation.use_cache(config.train)
    mesh = make_mesh(config)
    with (
        Signals(config.train.shutdown_timeout_sec) as signals,
        RunLock(run_directory.root(config)) as lock,
        jax.set_mesh(mesh),
        matmul_precision(config),
        out_of_memory.explained(config, mesh),
    ):
        trainer = build_trainer(config, mesh, hooks, console, watchdog, lock)
        reason = None
        try:
            reason = trainer.train(signals)
        finally:
            if reason is not Exit.UNHEALTHY:  # whatever waits for the devices may wait for ever
                with watchdog.section("end"):
                    trainer.close(reason)
    if reason is Exit.UNHEALTHY or signals.left_work:
        end_now(reason.code)  # nor must the compiler find the process half gone
    return reason


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)  # 80 would wrap in files and pipes


if __name__ == "__main__":
    leave(run_main(functools.partial(main, None), uses_devices=True))
