"""Completion of prompts by a trained model: the command `jaxforge generate`."""

import argparse
import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax

from jaxforge.cli.running import check_parent_directory
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.errors import UserError, file_error
from jaxforge.inference import conversation
from jaxforge.inference.trained import open_run
from jaxforge.model.decoding import Completion, Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.runs import run_directory
from jaxforge.storage import urls
from jaxforge.tasks.prompts import (
    RESULTS,
    STDIN,
    Prompt,
    continuation,
    encode,
    read_prompts,
)
from jaxforge.telemetry.console import begin_command

log = logging.getLogger(__name__)

Record = dict[str, Any]
"""Prompt with its fields and the fields of its completion."""

_REPLACEMENT = "�"  # decoded from an incomplete character
WINDOW = 8  # batches sorted by length together, which bounds the delay of a result


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print prompts with their continuations, or write them as JSON Lines."""
    begin_command()
    # Before the model is opened, which takes long: a mistake in the prompts is reported first.
    prompts = _prompts(args)
    trained = open_run(urls.path(args.run), overrides, step=args.step, weights=args.weights)
    tokenizer = run_directory.read_tokenizer(trained.run)
    if args.no_bos:
        tokenizer = tokenizer.without_bos()
    if not prompts:
        _check_terminal()
    model = trained.config.model
    ids = [
        encode(tokenizer, prompt, model.max_seq_len, args.max_tokens, vocab_size=model.vocab_size)
        for prompt in prompts
    ]
    eos_ids = () if args.ignore_eos else tokenizer.eos_ids
    rows = min(args.batch_size, max(1, len(prompts)))
    sampling = Sampling(args.temperature, args.top_k, args.top_p, tokenizer.vocab_size)
    with trained.in_use() as params:
        decoder = Decoder(trained.model, params, args.max_tokens, sampling, eos_ids, args.seed,
                          trained.mesh, rows)  # fmt: skip
        if not prompts:
            conversation.talk(decoder, tokenizer)
        elif args.prompts or args.output:
            _write(args.output, results(decoder, prompts, ids, tokenizer))
        elif len(prompts) == 1:
            _stream(decoder, ids[0], tokenizer)
        else:
            _print(results(decoder, prompts, ids, tokenizer))
    return 0


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts to continue; none for a conversation."""
    if args.prompts and args.prompt:
        raise UserError("--prompt and --prompts exclude each other: add the texts to the file")
    for name in ("prompts", "output"):
        if value := getattr(args, name):
            urls.local(value, f"--{name}", "copy it from or to there")
    if args.output and args.output.exists():
        raise UserError(f"--output {args.output} exists: name a new file, or remove it first")
    check_parent_directory("--output", args.output)
    if args.prompts == STDIN and jax.process_count() > 1:
        raise UserError("--prompts - is for one process: of several, each would read its own input")
    if args.prompts:
        return read_prompts(args.prompts)
    empty = [""] if args.output else []
    return [Prompt(text, "--prompt") for text in args.prompt or empty]


def _check_terminal() -> None:
    if not conversation.is_possible() or jax.process_count() > 1:
        raise UserError(
            "without a prompt there is a conversation, which needs a terminal and one process: "
            "give --prompt TEXT, --prompts FILE, or --prompts - to read prompts from standard input"
        )


def _stream(decoder: Decoder, prompt: list[int], tokenizer: Tokenizer) -> None:
    """Print a prompt and stream its continuation, in whole characters."""
    ids, shown = list(prompt), 0
    # None, before any token: the prompt is shown while the first step compiles.
    turns: Iterator[list[int | None]] = itertools.chain([[None]], decoder.stream([prompt]))
    for (token,) in turns:
        ids += [] if token is None else [token]
        text = tokenizer.decode(ids)
        if not text.endswith(_REPLACEMENT):
            _say(text[shown:])
            shown = len(text)
    _say(tokenizer.decode(ids)[shown:] + "\n")


def results(
    decoder: Decoder, prompts: Sequence[Prompt], ids: Sequence[list[int]], tokenizer: Tokenizer
) -> Iterator[list[Record]]:
    """Yield lists of results in the order of the prompts, as soon as they are complete."""
    done: dict[int, Record] = {}
    shown, tokens, start = 0, 0, time.perf_counter()
    for numbers in split_by_length([len(prompt) for prompt in ids], decoder.rows):
        completions = decoder.complete([ids[number] for number in numbers], numbers)
        for number, completion in zip(numbers, completions, strict=True):
            done[number] = _record(prompts[number], ids[number], completion, tokenizer)
        # Results up to the first gap can be shown: batches are sorted by length.
        end = next(number for number in itertools.count(shown) if number not in done)
        yield [done.pop(number) for number in range(shown, end)]
        shown, tokens = end, tokens + sum(len(completion.tokens) for completion in completions)
    seconds = time.perf_counter() - start
    log.info("%d prompts, %d tokens generated in %.1f s, compilation included: %.0f tokens/s",
             len(ids), tokens, seconds, tokens / seconds)  # fmt: skip


def _record(prompt: Prompt, ids: list[int], completion: Completion, tokenizer: Tokenizer) -> Record:
    """Return the fields of the prompt and `prompts.RESULTS`."""
    text = continuation(tokenizer, ids, completion.tokens)
    values = (text, completion.tokens, completion.finish_reason)
    return {"prompt": prompt.text, **prompt.fields, **dict(zip(RESULTS, values, strict=True))}


def split_by_length(lengths: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Yield the prompt numbers of each batch, of similar length within a window of batches."""
    for first in range(0, len(lengths), window := WINDOW * rows):
        numbers = range(first, min(first + window, len(lengths)))
        by_length = sorted(numbers, key=lambda number: lengths[number])
        yield from (by_length[i : i + rows] for i in range(0, len(by_length), rows))


def _print(results: Iterator[list[Record]]) -> None:
    for number, record in enumerate(itertools.chain.from_iterable(results), 1):
        _say(f"--- {number}\n{record['prompt']}{record['completion']}\n")


def _write(path: Path | None, results: Iterator[list[Record]]) -> None:
    """Write a line per prompt; whole lines only, even if the process is killed."""
    first = next(results)  # a failure before this leaves no empty file behind
    try:
        with _open(path) as file:
            for records in itertools.chain([first], results):
                lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
                file.write("".join(lines).encode())
                file.flush()
    except OSError as error:
        raise file_error(f"--output {path}", error) from error


def _open(path: Path | None) -> contextlib.AbstractContextManager[BinaryIO]:
    # Every process computes all results, and one writes them.
    if jax.process_index() > 0:
        return open(os.devnull, "wb")
    if path is None:
        return contextlib.nullcontext(sys.stdout.buffer)
    # "x": a file that was created since `_prompts` looked is not overwritten.
    return path.open("xb")


def _say(text: str) -> None:
    if jax.process_index() == 0:
        sys.stdout.write(text)
        sys.stdout.flush()
