"""Execution of `jaxforge.prepare`: documents to token shards, tokenizer and a config."""

import argparse
import functools
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from jaxforge.data.corpus.assembly import assemble
from jaxforge.data.corpus.content import Content, TextField
from jaxforge.data.corpus.conversations import Conversations, fingerprint
from jaxforge.data.corpus.documents import (
    TextPart,
    first_bytes,
    is_split_inside,
    shuffled,
    split_of,
    text_parts,
)
from jaxforge.data.corpus.engines import run_units
from jaxforge.data.corpus.entries import ENTRY_DTYPE
from jaxforge.data.corpus.huggingface import load_dataset
from jaxforge.data.corpus.ingest import EMPTY_JOURNAL, Corpus, Options, check_split, ingest
from jaxforge.data.corpus.inputs import HuggingFace, find_inputs
from jaxforge.data.corpus.layouts import LAYOUTS, Layout
from jaxforge.data.corpus.maps import Map, Mapped, load_maps
from jaxforge.data.corpus.passes import find_repeated_records, needs_passes
from jaxforge.data.corpus.preferences import Preferences
from jaxforge.data.corpus.progress import Done, progress_shown
from jaxforge.data.corpus.records import Input
from jaxforge.data.corpus.summary import Totals, table
from jaxforge.data.corpus.text_files import RECORDS, TEXTS
from jaxforge.data.corpus.tokenizer import BPE_VOCAB_SIZE, Tokenizer, train_bpe
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.units import Unit, plan_units, sliced
from jaxforge.data.corpus.writer import token_dtype
from jaxforge.errors import UserError
from jaxforge.storage import urls
from jaxforge.storage.atomic_directory import AtomicDirectory, Plan
from jaxforge.tools.starting import corpus_page
from jaxforge.tools.starting.config import FILE_NAME as CONFIG
from jaxforge.tools.starting.config import config_for_data, in_epochs
from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.prepared import PreparedData
from jaxforge.tools.starting.sizing import Size
from jaxforge.tools.starting.slurm_array import write_script
from jaxforge.tools.starting.unit_preparation import (
    engine_of,
    map_of,
    new_job,
    open_output,
    run_share,
)


def run(args: argparse.Namespace) -> int:
    """Prepare a directory, in full or not at all; return the exit code.

    Args:
        args: parsed command line.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used.
    """
    machine = Machine.parse(args.machine) if args.machine else Machine.here()
    given = None if args.tokenizer == "bpe" else _given_tokenizer(args.tokenizer)
    if given and args.no_bos:
        given = given.without_bos()
    content = _content(args, given)
    maps = load_maps(args.map)
    mapped = Mapped(content, maps) if maps else None
    inputs = _inputs(args, mapped or content)
    units = _units(args, inputs)
    plan = _plan(args, inputs, given, maps)
    options_for = functools.partial(_options, args, maps)
    has_passes = mapped is not None and needs_passes(mapped)
    if has_passes:
        _check_passes(args)
    if args.share:
        return run_share(args, plan, units, options_for)
    with open_output(args, plan, _say) as destination:
        if mapped and has_passes:
            units = _without_repeated_records(args, units, mapped, destination)
        sources = [source for unit in units for source in unit.inputs]
        tokenizer = given or _bpe(args, sources, destination)
        tokenizer.save(destination.out / "tokenizer")
        options = options_for(tokenizer.vocab_size)
        if args.slurm:
            new_job(destination, len(units), tokenizer, options)
            destination.is_complete = False
            print(write_script(args, len(units)))
            return 0
        totals = _prepare(args, units, tokenizer, options, destination)
        size = _write_config(destination.out, args.output, machine)
    print(table(totals, tokenizer), end="\n\n")
    print(_next(args.output, size))
    return 0


def _content(args: argparse.Namespace, tokenizer: Tokenizer | None) -> Content:
    if args.conversations and tokenizer:
        return (Preferences if args.preferences else Conversations)(tokenizer)
    return _text_field(args)


def _units(args: argparse.Namespace, inputs: Sequence[Input]) -> list[Unit]:
    """Return the units of work: one if what is written depends on what was read before."""
    splits_file = args.validation_fraction and is_split_inside(inputs)
    if args.max_bytes or args.validation_tokens or splits_file:
        return [Unit(0, tuple(inputs))]
    return plan_units(sliced(inputs, args.unit_bytes), args.unit_bytes)


def _prepare(
    args: argparse.Namespace,
    units: Sequence[Unit],
    tokenizer: Tokenizer,
    options: Options,
    destination: AtomicDirectory,
) -> Totals:
    """Write the splits."""
    files = sum(unit.files for unit in units)
    has_parts = "units" in (destination.journal or {})
    is_local = args.engine == "local" and not urls.in_bucket(args.output)
    if len(units) == 1 and is_local and not has_parts:
        with progress_shown(files) as show:
            size = _text_size(units[0].inputs, args.max_bytes)
            corpus = ingest(
                units[0].inputs,
                tokenizer,
                options,
                destination,
                tokenizer_name=args.tokenizer,
                workers=args.workers or os.cpu_count() or 1,
                isolate=True,
                show=lambda corpus: show(_done(corpus, size)),
            )
        return Totals.of(corpus, options)
    job = new_job(destination, len(units), tokenizer, options)
    with progress_shown(files) as show:
        run_units(job, units, engine_of(args), vocab_size=tokenizer.vocab_size, show=show)
    return assemble(job, len(units), tokenizer, args.tokenizer)


def _done(corpus: Corpus, size: int | None) -> Done:
    """Return the progress of a corpus of `size` bytes of text."""
    fraction = corpus.size / size if size else None
    return Done(corpus.position.input, fraction, corpus.documents, corpus.tokens)


def _text_field(args: argparse.Namespace) -> TextField:
    layout_field = LAYOUTS[args.layout].source_field if args.layout else ""
    return TextField(args.text_field, args.source_field or layout_field)


def _check_passes(args: argparse.Namespace) -> None:
    """Check that all passes see the files of a map with `drop_repeated`.

    Raises:
        UserError: the output is in a bucket, or a Slurm array shares the units.
    """
    if urls.in_bucket(args.output) or args.slurm or args.share:
        raise UserError(
            "a --map that drops repeated records keeps its keys in files next to --output: give an "
            "--output on a disk that all machines share, and --engine local or ray, not --slurm"
        )


def _without_repeated_records(
    args: argparse.Namespace, units: Sequence[Unit], mapped: Mapped, destination: AtomicDirectory
) -> list[Unit]:
    """Run the passes of maps that drop repeated records; return the units without these."""
    if not _has_tokens(destination):  # nothing in the output is durable yet
        # Without a journal, a failure would remove the files of the passes.
        destination.commit(EMPTY_JOURNAL)
        shutil.rmtree(destination.out)
        destination.out.mkdir()
    return find_repeated_records(
        units,
        mapped,
        destination.state / "maps",
        map_of(args),
        skip_bad=args.skip_bad,
        show=_say,
    )


def _has_tokens(destination: AtomicDirectory) -> bool:
    """Return whether an interrupted run has begun to write tokens."""
    journal = destination.journal or EMPTY_JOURNAL
    return "units" in journal or bool(journal["splits"])


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def _inputs(args: argparse.Namespace, content: Content) -> list[Input]:
    """Return the inputs to read, in order."""
    inputs: list[Input] = []
    if args.input:
        usual = RECORDS if args.conversations else (*TEXTS, *RECORDS)
        layout = LAYOUTS[args.layout] if args.layout else Layout(usual)
        globs = args.glob.split(",") if args.glob else layout.globs
        inputs += find_inputs(
            args.input,
            globs,
            [*args.exclude, *layout.exclude],
            content,
            args.max_record_bytes,
            args.separator or b"",
        )
        layout.check(source.name for source in inputs)
    if args.hf_dataset:
        dataset = load_dataset(args.hf_dataset, args.hf_config, args.hf_split)
        name = ":".join(filter(None, [args.hf_dataset, args.hf_config, args.hf_split]))
        inputs.append(HuggingFace.on_disk(name, dataset, content))
    if args.conversations:
        _check_records(inputs)
    if args.shuffle_documents is not None:
        inputs = _shuffled(inputs, args.shuffle_documents)
    inputs = first_bytes(inputs, args.max_bytes)
    if _all_text(inputs) and not is_split_inside(inputs):  # otherwise known only after reading
        splits = [split_of(source.name, args.validation_fraction) for source in inputs]
        held_out = splits.count("validation")
        check_split(len(splits) - held_out, held_out, args.validation_fraction)
    return inputs


def _shuffled(inputs: Sequence[Input], seed: int) -> list[Input]:
    if not all(source.is_document for source in inputs):
        raise UserError(
            "--shuffle-documents is for text files: records keep their order. Remove it; "
            "training shuffles anyway (data.shuffle)"
        )
    return shuffled(inputs, seed)


def _check_records(inputs: Iterable[Input]) -> None:
    for source in inputs:
        if source.is_text:
            raise UserError(
                f"{source.where} is read as plain text, and holds no conversations: give JSONL, "
                "JSON, CSV, Parquet or Arrow files"
            )


def _all_text(inputs: Iterable[Input]) -> bool:
    return all(source.text_size is not None for source in inputs)


def _text_size(inputs: Sequence[Input], max_bytes: int | None) -> int | None:
    """Return the bytes of text to read; None if unknown."""
    if not _all_text(inputs):
        return max_bytes
    size = sum(source.text_size or 0 for source in inputs)
    return min(size, max_bytes or size)


_BYTES_PER_TOKEN = 500  # minimum bytes of training text per BPE token
_PLANNED = ("text_field", "source_field", "layout", "map", "tokenizer", "no_bos", "vocab_size",
            "format", "dtype", "shard_tokens", "validation_fraction", "validation_tokens",
            "max_bytes", "max_record_bytes", "unit_bytes")  # fmt: skip


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


def _bpe(
    args: argparse.Namespace, inputs: Sequence[Input], destination: AtomicDirectory
) -> Tokenizer:
    """Return a BPE of the training documents, or the one that an interrupted run has trained."""
    if _has_tokens(destination):
        return load_tokenizer(destination.out / "tokenizer")
    read = functools.partial(
        text_parts,
        inputs,
        validation_fraction=args.validation_fraction,
        max_bytes=args.max_bytes,
        skip_bad=args.skip_bad,
    )
    size = _text_size(inputs, args.max_bytes)
    if not args.vocab_size and not _all_text(inputs):
        size = _size_up_to(_BYTES_PER_TOKEN * BPE_VOCAB_SIZE, read())
    vocab_size = args.vocab_size or suggested_vocab_size(size or 0)
    _say(f"training the BPE tokenizer: {_why_so_many(args, vocab_size)} …")
    return train_bpe((part.text for part in read() if part.split == "train"), vocab_size)


def _size_up_to(limit: int, read: Iterable[TextPart]) -> int:
    """Return the bytes of text; reading stops as soon as there are at least `limit`."""
    size = 0
    for part in read:
        size += part.size
        if size >= limit:
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


def _given_tokenizer(spec: str) -> Tokenizer:
    tokenizer = load_tokenizer(spec)
    if tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {spec} names no end-of-text token, which ends documents. Put a "
            'tokenizer_config.json with "eos_token" next to its tokenizer.json'
        )
    return tokenizer


def _write_config(directory: Path, output: Path, machine: Machine) -> Size:
    """Write page and config into `directory`, the future `output`; return the run's size."""
    prepared = PreparedData.read(directory, output)
    corpus_page.write(prepared, directory)
    text, size = config_for_data(
        prepared, machine, Path("runs", prepared.directory.name).absolute()
    )
    try:
        (directory / CONFIG).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {directory / CONFIG}: {error.strerror}") from error
    return size


def _next(output: Path, size: Size) -> str:
    """Return a summary of the output, and the next command."""
    path = output.absolute() / CONFIG
    command = f"jaxforge train --config {shlex.quote(str(path))}"
    if urls.in_bucket(output):
        command = f"copy {path} to this directory\n  jaxforge train --config {CONFIG}"
    return (
        f"{path}: {size.parameters / 1e6:.3g}M parameters, {size.max_steps:,} updates of "
        f"{size.tokens:,} tokens, {in_epochs(size.epochs)}\n"
        f"Next:\n  {command}"
    )
