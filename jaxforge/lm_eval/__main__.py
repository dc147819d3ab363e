"""`python -m jaxforge.lm_eval RUN --tasks NAME ...`: lm_eval's tasks, with its own options.

RUN is a run directory, or one of its checkpoints. Settings such as `--distributed.tp=2` lay the
model out over several devices; by default all take part (`dp_shard`). Whatever else is on the
command line is an option of lm_eval's command `run`.
"""

import argparse
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from jaxforge.cli import run_main
from jaxforge.errors import UserError
from jaxforge.parallel import host_memory, multihost
from jaxforge.telemetry.console import setup_logging

_OURS = ("max_length", "max_gen_toks", "add_bos_token", "prefix_token_id", "seed")
"""Arguments of the adapter that stand in --model_args."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tasks; lm_eval prints and writes what they came to."""
    args, others = _parser().parse_known_args(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm_eval is not installed: pip install 'jaxforge[lm-eval]'")
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    multihost.initialize()
    _leave_results_to_the_first()
    _run([*_model(args, others), *(one for one in others if not _is_setting(one))])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxforge.lm_eval",
        usage="%(prog)s RUN --tasks NAME ... [options of lm_eval] [--section.key=value ...]",
        description="Evaluates a trained model on tasks of EleutherAI's lm_eval.",
        epilog="Options of lm_eval, such as --num_fewshot, --limit, --include_path, --gen_kwargs, "
        "--output_path and --log_samples, may follow, and settings of the run's config, such as "
        "--distributed.tp=2.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--step", type=int, help="the checkpoint to evaluate (default: the newest)")
    add("--batch_size", "--batch-size", type=int, default=32, metavar="N",
        help="sequences at a time, over all devices (default: 32)")  # fmt: skip
    add("--model_args", nargs="+", default=[], metavar="KEY=VALUE",
        help=f"more of the model's arguments: {', '.join(_OURS)}")  # fmt: skip
    return parser


def _model(args: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """How lm_eval is told of the model."""
    own = {"run": args.run} | ({"step": args.step} if args.step is not None else {})
    settings = [one[2:].partition("=")[::2] for one in others if _is_setting(one)]
    given = [one.partition("=")[::2] for part in args.model_args for one in part.split(",")]
    arguments = own | dict(given) | dict(settings)
    return ["--model", "jaxforge", "--model_args", json.dumps(arguments),
            "--batch_size", str(args.batch_size)]  # fmt: skip


def _is_setting(argument: str) -> bool:
    """Whether it is `--section.key=value`; no option of lm_eval has a point in its name."""
    return argument.startswith("--") and "." in argument.partition("=")[0]


def _leave_results_to_the_first() -> None:
    """Lets one process print and write: all have the same answers.

    By this variable lm_eval knows processes that hold one model together (its tensor parallelism).
    """
    if jax.process_count() > 1:
        os.environ["LOCAL_RANK"] = str(jax.process_index())


def _run(options: Sequence[str]) -> None:
    from lm_eval.__main__ import cli_evaluate

    import jaxforge.lm_eval.adapter  # noqa: F401  # which registers the model

    sys.argv = ["lm_eval", "run", *options]
    cli_evaluate()


if __name__ == "__main__":
    raise SystemExit(run_main(functools.partial(main, None), uses_devices=True))
