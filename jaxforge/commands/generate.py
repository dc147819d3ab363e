"""`jaxforge generate RUN [--prompt TEXT ...]`: generate text with a trained model.

Without a prompt, the command starts a conversation.

RUN is a run directory, or one of its checkpoints (`RUN/checkpoints/step_100`). Settings such as
`--distributed.tp=2` define the device mesh; by default all devices are used (`dp_shard`).
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.cli.sampling_options import check
from jaxforge.commands.command_line import CommandParser, add_weights_option


def main(argv: Sequence[str] | None = None) -> int:
    """Print or save continuations of prompts, or start a conversation; return the exit code."""
    args, overrides = parser().parse(argv)
    check(vars(args), spelt=lambda name: f"--{name.replace('_', '-')}")
    from jaxforge.inference import completion  # imported here, because JAX takes a second

    return completion.run(args, overrides)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "generate",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN [options] [--section.key=value ...]",
        description="Continue prompts with a trained model, or chat with it without prompts.",
        epilog="Settings of the run's config, such as --distributed.tp=2, are accepted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--step", type=int, help="checkpoint to use; by default the newest")
    add_weights_option(parser)
    add("--prompt", action="append", help="text to continue; repeatable")
    add("--prompts", metavar="FILE", type=Path,
        help='text file with a prompt per line, or .jsonl with "prompt" keys; "-" for standard '
        "input")  # fmt: skip
    add("--output", metavar="FILE.jsonl", type=Path,
        help="new file for the results; by default they are printed")  # fmt: skip
    add("--batch-size", type=int, default=32, help="prompts per batch")
    add("--max-tokens", type=int, default=128, help="maximum number of tokens to generate")
    add("--temperature", type=float, default=1.0, help="0: the most likely token")
    add("--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: all")
    add("--top-p", type=float, default=1.0, help="probability of the tokens to sample")
    add("--seed", type=int, default=0, help="random seed of sampling")
    add("--no-bos", action="store_true", help="omit the tokenizer's BOS before prompts")
    add("--ignore-eos", action="store_true", help="continue after the end-of-text token")
    return parser


entry = functools.partial(run_main, main, uses_devices=True)
