"""Training of the tokenizer of `jaxforge prepare --tokenizer bpe`."""

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence

from jaxforge.data.corpus.documents import TextPart, text_parts
from jaxforge.data.corpus.records import Input
from jaxforge.data.corpus.tokenizer import BPE_VOCAB_SIZE, Tokenizer, train_bpe

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
