"""`python -m jaxforge.generate RUN --prompt TEXT [--prompt TEXT ...]`: text from a trained model.

RUN is a run directory, or one of its checkpoints (`RUN/checkpoints/step_100`).
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from jaxforge import run_directory
from jaxforge.checkpoint.manager import Checkpoints, find
from jaxforge.cli import run_main
from jaxforge.config.job import JobConfig
from jaxforge.data.tokenizer import Tokenizer
from jaxforge.errors import UserError
from jaxforge.model.sampling import Sampling, generate
from jaxforge.model.transformer import Model, Params, build_model, matmul_precision
from jaxforge.telemetry.console import setup_logging

_REPLACEMENT = "�"  # what an unfinished character decodes to


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each prompt with its continuation; a single one appears as it is generated."""
    args = _parser().parse_args(argv)
    how = _sampling(args)
    setup_logging(Console(stderr=True))
    run, step = find(Path(args.run))
    config, tokenizer = run_directory.read_config(run), run_directory.read_tokenizer(run)
    prompts = [_encode(tokenizer, text, config, args.max_tokens) for text in args.prompt or [""]]
    model = build_model(config)
    params = load_params(run, step, config, model)
    eos_id = None if args.ignore_eos else tokenizer.eos_id
    turns = generate(model, params, prompts, args.max_tokens, how, eos_id=eos_id, seed=args.seed)
    printers = [_Printer(tokenizer, prompt, live=len(prompts) == 1) for prompt in prompts]
    with matmul_precision(config):
        for tokens in turns:
            for printer, token in zip(printers, tokens, strict=True):
                if token is not None:
                    printer.add(token)
    for number, printer in enumerate(printers, 1):
        if len(printers) > 1:
            print(f"--- {number}")
        printer.finish()
    return 0


def load_params(run: Path, step: int, config: JobConfig, model: Model) -> Params:
    """The parameters of a checkpoint, and nothing else, on the first device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), model.abstract
    )
    checkpoints = Checkpoints(run, config.checkpoint, read_only=True)
    params = checkpoints.restore_params(like, step)
    checkpoints.close()
    return params


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxforge.generate",
        description="Continues prompts with a trained model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--prompt", action="append", help="text to continue; repeatable")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep this much probability")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after end-of-text")
    return parser


def _sampling(args: argparse.Namespace) -> Sampling:
    for name, good, allowed in (
        ("temperature", args.temperature >= 0, "0 or more"),
        ("top-k", args.top_k >= 0, "0 or more"),
        ("top-p", 0 < args.top_p <= 1, "above 0, at most 1"),
        ("max-tokens", args.max_tokens > 0, "1 or more"),
    ):
        if not good:
            raise UserError(f"--{name}: expected {allowed}")
    return Sampling(args.temperature, args.top_k, args.top_p)


def _encode(tokenizer: Tokenizer, text: str, config: JobConfig, max_tokens: int) -> list[int]:
    """Token ids of a prompt; an empty one starts from end-of-text, as every document does."""
    ids = tokenizer.encode(text)
    if not ids:
        if tokenizer.eos_id is None:
            raise UserError("the tokenizer has no end-of-text token to start from; give a --prompt")
        ids = [tokenizer.eos_id]
    limit = config.model.max_seq_len
    if len(ids) + max_tokens > limit:
        raise UserError(
            f"a prompt of {len(ids)} tokens and --max-tokens {max_tokens} exceed "
            f"model.max_seq_len = {limit}; shorten the one or lower the other"
        )
    return ids


@dataclasses.dataclass
class _Printer:
    """Text of one prompt and its continuation; live, characters appear once they are whole."""

    tokenizer: Tokenizer
    ids: list[int]
    live: bool
    shown: int = 0

    def __post_init__(self) -> None:
        self.ids = list(self.ids)
        self._show()

    def add(self, token: int) -> None:
        self.ids.append(token)
        self._show()

    def finish(self) -> None:
        print(self.tokenizer.decode(self.ids)[self.shown :])

    def _show(self) -> None:
        text = self.tokenizer.decode(self.ids)
        if self.live and not text.endswith(_REPLACEMENT):
            sys.stdout.write(text[self.shown :])
            sys.stdout.flush()
            self.shown = len(text)


if __name__ == "__main__":
    raise SystemExit(run_main(functools.partial(main, None)))
