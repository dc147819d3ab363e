"""`jaxforge lm_eval RUN --tasks NAME ...`: evaluate on tasks of lm_eval.

RUN is a run directory, or one of its checkpoints. Settings such as `--distributed.tp=2` define the
device mesh; by default all devices are used (`dp_shard`). Other arguments are options of lm_eval's
command `run`.
"""

import argparse
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Sequence

from jaxforge.checkpoint.weights import WEIGHTS
from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser, add_weights_option
from jaxforge.errors import UserError

_ADAPTER = ("max_length", "max_gen_toks", "add_bos_token", "prefix_token_id", "seed")
"""Arguments of the adapter in --model_args."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tasks, whose results lm_eval prints and writes; return the exit code."""
    args, further = parser().parse(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm_eval is not installed: pip install 'jaxforge[lm-eval]'")
    _run([*_model(args, further), *_tasks(args), *(x for x in further if not _is_setting(x))])
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "lm_eval",
        takes_settings=True,
        uses_runs=True,
        allows_unknown=True,
        usage="%(prog)s RUN --tasks NAME ... [options of lm_eval] [--section.key=value ...]",
        description="Evaluate a trained model on tasks of EleutherAI's lm_eval.",
        epilog="Options of lm_eval, such as --num_fewshot, --limit, --gen_kwargs, "
        "--apply_chat_template and --log_samples, and settings of the run's config, such as "
        "--distributed.tp=2, are accepted.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--step", type=int, help="checkpoint to evaluate (default: the newest)")
    add_weights_option(parser)
    add("--tasks", nargs="+", required=True, metavar="NAME", help="tasks or task groups")
    add("--include_path", metavar="DIR", help="directory of custom tasks")
    add("--output_path", metavar="DIR", help="directory for results as JSON")
    add("--batch_size", "--batch-size", type=int, default=32, metavar="N",
        help="sequences per batch, over all devices (default: 32)")  # fmt: skip
    add("--model_args", nargs="+", default=[], metavar="KEY=VALUE",
        help=f"further arguments of the model: {', '.join(_ADAPTER)}")  # fmt: skip
    return parser


def _tasks(args: argparse.Namespace) -> list[str]:
    """Return the options of lm_eval that help shows."""
    paths = {"--include_path": args.include_path, "--output_path": args.output_path}
    words = [word for name, path in paths.items() if path for word in (name, path)]
    return ["--tasks", ",".join(args.tasks), *words]


def _model(args: argparse.Namespace, further: Sequence[str]) -> list[str]:
    """Return lm_eval's arguments for the model."""
    arguments = {"run": args.run} | ({"step": args.step} if args.step is not None else {})
    arguments |= {"weights": args.weights} if args.weights != WEIGHTS[0] else {}
    settings = [argument[2:].partition("=")[::2] for argument in further if _is_setting(argument)]
    words = [
        argument.partition("=")[::2] for part in args.model_args for argument in part.split(",")
    ]
    arguments |= dict(words) | dict(settings)
    # As JSON: lm_eval would split another form at commas within values.
    return ["--model", "jaxforge", "--model_args", json.dumps(arguments),
            "--batch_size", str(args.batch_size)]  # fmt: skip


def _is_setting(argument: str) -> bool:
    """Return whether an argument is `--section.key=value`; lm_eval's options contain no dot."""
    return argument.startswith("--") and "." in argument.partition("=")[0]


def _run(options: Sequence[str]) -> None:
    """Run lm_eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    import jaxforge.tools.lm_eval  # noqa: F401  # registers the model
    from jaxforge.telemetry.console import begin_command

    begin_command()
    limit_output_to_first_process()
    # `cli_evaluate` parses the arguments of the process.
    sys.argv = ["lm_eval", "run", *options]
    cli_evaluate()


def limit_output_to_first_process() -> None:
    """Let only one process print and write, because all processes have the same results.

    lm_eval uses this variable for processes that share a model (its tensor parallelism).
    """
    import jax

    if jax.process_count() > 1:
        os.environ["LOCAL_RANK"] = str(jax.process_index())


entry = functools.partial(run_main, main, uses_devices=True, outlives_reader=True)
