"""Execution of `jaxforge prepare`: documents to token shards, tokenizer and a config.

inputs (`corpus.inputs`) ─► plan ─► output ─► tokenizer
─► units (`corpus.unit_worker`) ─► manifests (`corpus.assembly`) ─► train.toml
"""

import argparse
import functools
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from jaxforge.data.corpus import formats
from jaxforge.data.corpus.conversations import Conversations, Preferences, fingerprint
from jaxforge.data.corpus.documents import (
    TextPart,
    first_bytes,
    is_split_inside,
    split_of,
    text_parts,
)
from jaxforge.data.corpus.huggingface import HuggingFace, load_dataset
from jaxforge.data.corpus.inputs import Unit, find_inputs, links_out, plan_units, sliced
from jaxforge.data.corpus.manifest import ENTRY_DTYPE, FILE_NAME, Options
from jaxforge.data.corpus.maps import Map, Mapped, load_maps
from jaxforge.data.corpus.parts import progress_shown
from jaxforge.data.corpus.records import Content, Input, TextField
from jaxforge.data.corpus.tokenizer import BPE_VOCAB_SIZE, Tokenizer, train_bpe
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.unit_worker import (
    CorpusJob,
    assemble,
    begin_job,
    has_parts,
    run_units,
    table,
)
from jaxforge.data.corpus.writer import check_split, token_dtype
from jaxforge.errors import UserError, file_error
from jaxforge.storage import atomic_directory, urls
from jaxforge.storage.atomic_directory import AtomicDirectory, Plan
from jaxforge.tools.starting import slurm_array
from jaxforge.tools.starting.config import FILE_NAME as CONFIG
from jaxforge.tools.starting.config import config_for_data, in_epochs
from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.sizes import PreparedData, Size

_MANY_EPOCHS = 50  # beyond which a model knows its text by heart
_PLANNED = ("text_field", "source_field", "map", "tokenizer", "no_bos", "vocab_size", "format",
            "dtype", "shard_tokens", "validation_fraction", "validation_tokens", "max_bytes",
            "max_record_bytes", "unit_bytes")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prepare a directory, in full or not at all; return the exit code.

    Args:
        args: parsed command line.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used.
    """
    machine = Machine.parse(args.machine) if args.machine else Machine.here()
    named = None if args.tokenizer == "bpe" else _named_tokenizer(args)
    content = _content(args, named)
    maps = load_maps(args.map)
    inputs = _inputs(args, Mapped(content, maps) if maps else content)
    units = _units(args, inputs)
    plan = _plan(args, inputs, named, maps)
    options_for = functools.partial(_options, args, maps)
    if args.share:
        return slurm_array.run_share(args, plan, units, options_for, _workers(args))
    with _open_output(args, plan) as destination:
        tokenizer = named or _bpe(args, units, destination)
        # Before the units: tasks of a Slurm array load it from there.
        tokenizer.save(destination.out / "tokenizer")
        options = options_for(tokenizer.vocab_size)
        job = begin_job(destination, len(units), tokenizer, options)
        if args.slurm:
            # The job after the array makes the output visible.
            destination.is_complete = False
            print(slurm_array.write_script(args, len(units)))
            return 0
        _run(args, job, units, destination)
        totals = assemble(job, tokenizer, args.tokenizer)
        size = _write_config(destination.out, args.output, machine)
    print(table(totals, tokenizer), end="\n\n")
    if size.epochs > _MANY_EPOCHS:
        print(_few_tokens(size))
    print(_next(args.output, size, needs_model=args.preferences))
    return 0


def _named_tokenizer(args: argparse.Namespace) -> Tokenizer:
    tokenizer = load_tokenizer(args.tokenizer)
    if tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {args.tokenizer} names no end-of-text token, which ends documents. Put "
            'a tokenizer_config.json with "eos_token" next to its tokenizer.json'
        )
    return tokenizer.without_bos() if args.no_bos else tokenizer


def _content(args: argparse.Namespace, tokenizer: Tokenizer | None) -> Content:
    if args.conversations and tokenizer:
        return (Preferences if args.preferences else Conversations)(tokenizer)
    return TextField(args.text_field, args.source_field or "")


def _inputs(args: argparse.Namespace, content: Content) -> list[Input]:
    """Return the inputs to read, in order."""
    inputs: list[Input] = []
    if args.input:
        usual = formats.globs(text=not args.conversations)
        globs = args.glob.split(",") if args.glob else usual
        inputs += find_inputs(
            args.input, globs, args.exclude, content, args.max_record_bytes, args.separator or b""
        )
        if links := links_out(args.input, inputs):
            _say(
                f"{len(links):,} file(s) are links out of INPUT, and are read: {links[0]} is "
                f"{links[0].resolve()}; leave such out with --exclude"
            )
    if args.hf_dataset:
        dataset = load_dataset(args.hf_dataset, args.hf_config, args.hf_split)
        name = ":".join(filter(None, [args.hf_dataset, args.hf_config, args.hf_split]))
        inputs.append(HuggingFace.on_disk(name, dataset, content))
    if args.conversations:
        _check_records(inputs)
    inputs = first_bytes(inputs, args.max_bytes)
    all_text = all(source.text_size is not None for source in inputs)
    if all_text and not is_split_inside(inputs):  # otherwise known only after reading
        splits = [split_of(source.name, args.validation_fraction) for source in inputs]
        held_out = splits.count("validation")
        check_split(len(splits) - held_out, held_out, args.validation_fraction)
    return inputs


def _check_records(inputs: Iterable[Input]) -> None:
    for source in inputs:
        if source.is_text:
            raise UserError(
                f"{source.where} is read as plain text, and holds no conversations: give files of "
                f"records ({', '.join(formats.suffixes())})"
            )


def _units(args: argparse.Namespace, inputs: Sequence[Input]) -> list[Unit]:
    """Return the units of work: one if what is written depends on what was read before."""
    splits_file = args.validation_fraction and is_split_inside(inputs)
    # These limits count what was read before: the order of inputs matters.
    if args.max_bytes or args.validation_tokens or splits_file:
        return [Unit(0, tuple(inputs))]
    return plan_units(sliced(inputs, args.unit_bytes), args.unit_bytes)


def _plan(
    args: argparse.Namespace,
    inputs: Iterable[Input],
    tokenizer: Tokenizer | None,
    maps: Iterable[Map],
) -> Plan:
    """Return the options and inputs on which the content of DIR depends."""
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _PLANNED}
    options["--separator"] = args.separator and args.separator.decode(errors="replace")
    options |= {f"--map {each.spec}": f"source {each.fingerprint[:12]}" for each in maps}
    options["the tokenizer's sha256"] = tokenizer and tokenizer.fingerprint
    if args.conversations and tokenizer:
        options["the chat template's sha256"] = fingerprint(tokenizer)
    if args.preferences:
        options["--preferences"] = True
    return {"options": options, "inputs": [source.identity for source in inputs]}


def _options(args: argparse.Namespace, maps: Iterable[Map], vocab_size: int) -> Options:
    return Options(
        dtype=ENTRY_DTYPE if args.conversations else token_dtype(args.dtype, vocab_size),
        file_format=args.format,
        shard_tokens=args.shard_tokens,
        validation_fraction=args.validation_fraction,
        validation_tokens=args.validation_tokens or 0,
        max_bytes=args.max_bytes,
        skip_bad=args.skip_bad,
        conversations=args.conversations,
        preferences=args.preferences,
        rules=tuple(each.rule for each in maps),
    )


@contextmanager
def _open_output(args: argparse.Namespace, plan: Plan) -> Iterator[AtomicDirectory]:
    """Open the output, on a local disk or in a bucket.

    Raises:
        UserError: see `atomic_directory`; or tasks of a Slurm array are writing the output.
    """
    marker = f"train/{FILE_NAME}"
    with atomic_directory.atomic_directory(
        args.output, plan, marker=marker, overwrite=args.overwrite, say=_say
    ) as opened:
        assert opened is not None
        slurm_array.check_shares(opened)
        yield opened


def _bpe(
    args: argparse.Namespace, units: Sequence[Unit], destination: AtomicDirectory
) -> Tokenizer:
    """Return a BPE of the training documents, or the one that an interrupted run has trained."""
    # Finished parts hold ids of this tokenizer.
    if has_parts(destination):
        return load_tokenizer(destination.out / "tokenizer")
    return trained_bpe(args, [source for unit in units for source in unit.inputs], _say)


def _workers(args: argparse.Namespace) -> int:
    return args.workers or os.cpu_count() or 1


def _run(
    args: argparse.Namespace, job: CorpusJob, units: Sequence[Unit], destination: AtomicDirectory
) -> None:
    """Prepare the units; after a failure without progress, leave nothing to resume from."""
    try:
        with progress_shown(sum(unit.files for unit in units)) as show:
            run_units(job, units, _workers(args), show)
    except BaseException:
        # Nothing durable: the next command may have other options.
        if not urls.in_bucket(job.out) and not job.parts.finished():
            destination.journal = None
        raise


def _write_config(directory: Path, output: Path, machine: Machine) -> Size:
    """Write the config into `directory`, the future `output`; return the run's size."""
    prepared = PreparedData.read(directory, output)
    text, size = config_for_data(
        prepared, machine, Path("runs", prepared.directory.name).absolute()
    )
    try:
        (directory / CONFIG).write_text(text, encoding="utf-8")
    except OSError as error:
        raise file_error(f"cannot write {directory / CONFIG}", error) from error
    return size


def _few_tokens(size: Size) -> str:
    return (
        f"note: the text is too short to learn from. In {size.max_steps} updates each token is "
        f"read {size.epochs:,.0f} times, and the model repeats the text. Give more text\n"
    )


def _next(output: Path, size: Size, *, needs_model: bool) -> str:
    """Return a summary of the output, and the next command."""
    path = output.absolute() / CONFIG
    command = f"jaxforge train --config {shlex.quote(str(path))}"
    if urls.in_bucket(output):
        command = f"copy {path} to this directory\n  jaxforge train --config {CONFIG}"
    if needs_model:
        command = (
            f"set [model] in {path} to the shape of your model MODEL (a run, or a directory of "
            f"Hugging Face)\n  {command} --checkpoint.load_path=MODEL"
        )
    return (
        f"{path}: {size.parameters / 1e6:.3g}M parameters, {size.max_steps:,} updates of "
        f"{size.tokens:,} tokens, {in_epochs(size.epochs)}\n"
        f"Next:\n  {command}"
    )


def _say(text: str) -> None:
    # Without markup: in paths, "[name]" is not a style.
    Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)


_BYTES_PER_TOKEN = 500  # minimum bytes of training text per BPE token


def trained_bpe(
    args: argparse.Namespace, inputs: Sequence[Input], say: Callable[[str], None]
) -> Tokenizer:
    """Return a BPE of the training documents.

    Args:
        args: parsed command line.
        inputs: the inputs, in order.
        say: receives a message about the vocabulary.
    """
    read = functools.partial(
        text_parts,
        inputs,
        validation_fraction=args.validation_fraction,
        max_bytes=args.max_bytes,
        skip_bad=args.skip_bad,
    )
    vocab_size = args.vocab_size or suggested_vocab_size(_text_size(args, inputs, read))
    say(f"training the BPE tokenizer: {_why_so_many(args, vocab_size)} …")
    return train_bpe((part.text for part in read() if part.split == "train"), vocab_size)


def _text_size(
    args: argparse.Namespace, inputs: Sequence[Input], read: Callable[[], Iterable[TextPart]]
) -> int:
    """Return the bytes of text, or at least those that the largest vocabulary needs."""
    sizes = [source.text_size for source in inputs]
    if None not in sizes:
        size = sum(filter(None, sizes))
        return min(size, args.max_bytes or size)
    size = 0
    for part in read():
        size += part.size
        if size >= _BYTES_PER_TOKEN * BPE_VOCAB_SIZE:
            break
    return size


def suggested_vocab_size(text_size: int) -> int:
    """Return the BPE vocabulary size for a number of bytes of text.

    It is the largest power of two with `_BYTES_PER_TOKEN` bytes of text for each token, and at
    least 512.
    """
    fitting = 1 << max(512, text_size // _BYTES_PER_TOKEN).bit_length() - 1
    return min(BPE_VOCAB_SIZE, fitting)


def _why_so_many(args: argparse.Namespace, vocab_size: int) -> str:
    if args.vocab_size:
        return f"{vocab_size:,} tokens"
    if vocab_size == BPE_VOCAB_SIZE:
        return f"{vocab_size:,} tokens, the default for much text (set by --vocab-size)"
    return (
        f"{vocab_size:,} tokens, for at least {_BYTES_PER_TOKEN} bytes of text per token "
        "(set by --vocab-size)"
    )
