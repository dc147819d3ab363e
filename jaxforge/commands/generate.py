"""`python -m jaxforge.generate RUN [--prompt TEXT ...]`: text from a trained model.

Without a prompt it is a conversation.

RUN is a run directory, or one of its checkpoints (`RUN/checkpoints/step_100`). Settings such as
`--distributed.tp=2` lay the model out over several devices; by default all take part (`dp_shard`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.cli.sampling_options import check
from jaxforge.commands.command_line import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints prompts with their continuations, or writes them down as JSON Lines; or converses."""
    args, overrides = parser().parse(argv)
    check(vars(args), spelt=lambda name: f"--{name.replace('_', '-')}")
    from jaxforge.inference import completion  # here, as JAX and all that needs it take a second

    return completion.run(args, overrides)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "generate",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN [options] [--section.key=value ...]",
        description="Continues prompts with a trained model; without any, a conversation with it.",
        epilog="Settings of the run's config, such as --distributed.tp=2, may follow.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--step", type=int, help="the checkpoint to use; not set: the newest")
    add("--prompt", action="append", help="text to continue; repeatable")
    add("--prompts", metavar="FILE", type=Path,
        help='text, a prompt a line; or .jsonl, objects with a "prompt"; "-": standard '
        "input")  # fmt: skip
    add("--output", metavar="FILE.jsonl", type=Path,
        help="new file of results; with --prompts alone, they are printed")  # fmt: skip
    add("--batch-size", type=int, default=32, help="prompts at a time")
    add("--max-tokens", type=int, default=128, help="tokens to generate")
    add("--temperature", type=float, default=1.0, help="0: the likeliest token")
    add("--top-k", type=int, default=0, help="keep the k likeliest; 0: all")
    add("--top-p", type=float, default=1.0, help="keep this much probability")
    add("--seed", type=int, default=0, help="seed of the draws")
    add("--no-bos", action="store_true", help="no BOS before prompts, though the tokenizer adds it")
    add("--ignore-eos", action="store_true", help="go on after end-of-text")
    return parser


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
