"""Rank at which the replay of a step lists a document that was planted in it.

    python benchmarks/poison.py [--quick]

A model is trained on the source of Python's library. In 18 steps of the last third of the training,
one of about ten documents is overwritten with noise: six kinds, three times each. These steps are
replayed in one pass, and their documents are ordered as by `jaxforge replay --step N --around 1`:
the planted document should be first. This takes about seven minutes on two idle cores.
"""

import random
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import results

from jaxforge.commands import prepare, train
from jaxforge.data.corpus.manifest import FILE_NAME
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.order import GrainOrder
from jaxforge.parallel import multihost
from jaxforge.tools.replay.account import rank_documents
from jaxforge.tools.replay.documents import Document, find_documents, token_loss_function
from jaxforge.tools.replay.past import open_past

VOCAB, SEQ, BATCH, STEPS = 4096, 256, 8, 600
WINDOW = SEQ + 1
TIMES = 3
TOKENS = 60, 200  # of a planted document
SEED = 0
CONFIG = """
[model]
dim = 192
n_layers = 4
n_heads = 6
vocab_size = {vocab}
max_seq_len = {seq}
[train]
batch_size = {batch}
seq_len = {seq}
max_steps = {steps}
mixed_precision = "fp32"
[optimizer]
lr = 2e-3
[scheduler]
name = "cosine"
warmup_steps = 40
[data]
dataset_path = "{here}/data/train"
tokenizer_path = "{here}/data/tokenizer"
pack_sequences = true
[checkpoint]
dir = "{here}/run"
interval = 20
keep_last_n = 0
[metrics]
log_interval = 10
"""


def characters(text: str, rng: random.Random) -> str:
    """Return random printable characters."""
    return "".join(chr(rng.randrange(33, 127)) for _ in text)


def shuffled(text: str, rng: random.Random) -> str:
    """Return the words of the document in random order."""
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


def greek(text: str, _: random.Random) -> str:
    """Return the text with its letters replaced by another alphabet."""
    letters = {ord("a") + i: 0x3B1 + i % 25 for i in range(26)}
    return text.lower().translate(letters)


def misread(text: str, rng: random.Random) -> str:
    """Return text in UTF-8, misread as Latin-1."""
    return greek(text, rng).encode().decode("latin-1")


def repeated(text: str, rng: random.Random) -> str:
    """Return a repeated character."""
    return chr(rng.randrange(33, 127)) * len(text)


KINDS: dict[str, Callable[[str, random.Random], str] | None] = {
    "random characters": characters,
    "its words shuffled": shuffled,
    "random tokens": None,
    "another alphabet": greek,
    "misread encoding": misread,
    "one character repeated": repeated,
}
"""What becomes of a document's text; random tokens have none."""


@dataclass
class Planted:
    """Planted document.

    Attributes:
        kind: kind of noise, of `KINDS`.
        step: step that reads the document, from 1.
        row: row of the batch.
        start: first token in the row.
        end: end of the tokens in the row.
    """

    kind: str
    step: int
    row: int
    start: int
    end: int


def prepared(here: Path) -> Tokenizer:
    """Return the tokens of the library's sources, in one file."""
    root = sysconfig.get_path("stdlib")
    left_out = ("site-packages/*", "test/*", "*/test/*", "*/tests/*", "idlelib/*", "lib2to3/*",
                "encodings/*", "pydoc_data/*")  # fmt: skip
    prepare.main([
        root, "--output", f"{here}/data", "--glob", "*.py", "--tokenizer", "bpe",
        "--vocab-size", str(VOCAB), *(f"--exclude={document}" for document in left_out),
    ])  # fmt: skip
    return load_tokenizer(f"{here}/data/tokenizer")


def plant(here: Path, tokenizer: Tokenizer, kinds: list[str], steps: int) -> list[Planted]:
    """Overwrite a document in each of several steps of the last third of the training."""
    (path,) = here.glob("data/train/*.npy")
    tokens, rng = np.load(path), random.Random(SEED)
    order = GrainOrder(len(tokens) // WINDOW, SEED, True)
    assert steps * BATCH <= len(tokens) // WINDOW  # else some were read before
    result = []
    for i, kind in enumerate(kinds):
        step, row = steps - (len(kinds) - 1 - i) * (steps // 3) // len(kinds), rng.randrange(BATCH)
        at = order[(step - 1) * BATCH + row] * WINDOW
        n = rng.randint(*TOKENS)
        start = rng.randrange(1, SEQ - n)
        noise = _noise(kind, tokens[at + start :][:n], tokenizer, rng)
        end = start + len(noise)
        tokens[at + start - 1] = tokens[at + end] = tokenizer.eos_id
        tokens[at + start : at + end] = noise
        result.append(Planted(kind, step, row, start, end))
    np.save(path, tokens)
    (path.parent / FILE_NAME).unlink()  # its hashes are of the shard before
    return result


def _noise(kind: str, real: np.ndarray, tokenizer: Tokenizer, rng: random.Random) -> np.ndarray:
    make = KINDS[kind]
    if make is None:
        ids = [document for document in range(VOCAB) if document != tokenizer.eos_id]
        return np.array(rng.choices(ids, k=len(real)))
    text = make(tokenizer.decode(real.tolist()), rng)
    return np.array(tokenizer.encode(text)[: len(real)])


@dataclass
class Measured:
    """Documents of a step, as `jaxforge replay` finds them.

    Attributes:
        documents: documents of the step.
        losses: losses of their tokens.
        before: documents of the previous step.
    """

    documents: list[Document]
    losses: np.ndarray
    before: list[Document]


def measure(run: Path, planted: list[Planted], eos: int | None) -> Iterator[Measured]:
    """Replay the steps that read a planted document, in one pass."""
    steps = [document.step for document in planted]
    with open_past(run, steps[-1]) as past:
        walk = past.walk(steps[0] - 1)
        losses_of, before = token_loss_function(past.model, past.mesh), []
        while steps:
            step = walk.progress.step + 1
            if step in (steps[0], steps[0] - 1):
                losses = losses_of(walk.state.variables, walk.batch)
                documents = find_documents(jax.device_get(walk.batch), losses, eos)
            if step == steps[0]:
                print(f"step {step} of {planted[-1].step}", flush=True)
                yield Measured(documents, losses, before)
                del steps[0]
            elif step == steps[0] - 1:
                before = documents
            if steps:
                walk.advance()


def rank(item: Planted, measured: Measured) -> dict[str, object]:
    """Return the rank of the planted document among those of its step."""
    documents = rank_documents(measured.documents, measured.losses, measured.before)
    (at,) = (
        i
        for i, other in enumerate(documents)
        if other.row == item.row and other.start <= item.start < other.end
    )
    others = [other.loss for other in documents if other is not documents[at]]
    return {
        "planted": item.kind,
        "step": item.step,
        "tokens": documents[at].tokens,
        "loss": round(documents[at].loss, 2),
        "losses of the others": f"{min(others):.2f} to {max(others):.2f}",
        "place": f"{at + 1} of {len(documents)}",
    }


def prepare_and_train(here: Path, kinds: list[str], steps: int) -> list[Planted]:
    """Plant documents in the data and train a run."""
    planted = plant(here, prepared(here), kinds, steps)
    config = CONFIG.format(vocab=VOCAB, seq=SEQ, batch=BATCH, steps=steps, here=here)
    (here / "run.toml").write_text(config)
    train.main(["--config", f"{here}/run.toml", f"--train.seed={SEED}"])
    return planted


def main() -> None:
    """Train, replay and write the ranks."""
    quick = results.arguments(__doc__).parse_args().quick
    kinds, steps = (list(KINDS), 60) if quick else ([*KINDS] * TIMES, STEPS)
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        planted = prepare_and_train(here, kinds, steps)
        multihost.initialize()
        eos = load_tokenizer(here / "data/tokenizer").eos_id
        rows = [
            rank(document, result)
            for document, result in zip(planted, measure(here / "run", planted, eos), strict=True)
        ]
    raise SystemExit(report(rows, write=not quick))


def report(rows: list[dict[str, object]], *, write: bool) -> int:
    """Print and write the ranks; return an exit code."""
    print(*rows, sep="\n")
    first = sum(str(row["place"]).startswith("1 ") for row in rows)
    print(f"first in {first} of {len(rows)}")
    if write:
        notes = [f"named first in {first} of {len(rows)} cases"]
        results.write_json("poison", rows, ("jax", "flax", "optax"), notes=notes)
    return 0


if __name__ == "__main__":
    main()
