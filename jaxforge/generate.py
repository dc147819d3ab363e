"""`python -m jaxforge.generate RUN [--prompt TEXT ...]`: text from a trained model.

Without a prompt it is a conversation.

RUN is a run directory, or one of its checkpoints (`RUN/checkpoints/step_100`). Settings such as
`--distributed.tp=2` lay the model out over several devices; by default all take part (`dp_shard`).
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli import run_main
from jaxforge.command_line import CommandParser
from jaxforge.errors import UserError

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: x >= 0, "0 or more"),
    "top_k": (lambda x: x >= 0, "0 or more"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, at most 1"),
    "max_tokens": (lambda x: x > 0, "1 or more"),
    "batch_size": (lambda x: x > 0, "1 or more"),
    "seed": (lambda x: -(2**63) <= x < 2**63, f"{-(2**63)} to {2**63 - 1}"),
}


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


def check(values: Mapping[str, Any], spelt: Callable[[str], str]) -> None:
    """Looks whether numbers are in their ranges.

    Args:
        values: by name, some of `temperature`, `top_k`, `top_p`, `max_tokens`, `batch_size`,
            `seed`.
        spelt: what a name is called where the values come from.

    Raises:
        UserError: one is not.
    """
    for name, (is_good, allowed) in _RANGES.items():
        if name in values and not is_good(values[name]):
            raise UserError(f"{spelt(name)}: expected {allowed}")


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
