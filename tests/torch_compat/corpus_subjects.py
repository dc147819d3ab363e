"""Records, states of an unfinished `prepare` and saved logits, to be damaged."""

import contextlib
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from jaxforge.commands import prepare
from jaxforge.data import token_file
from jaxforge.data.corpus import manifest as corpus_manifest
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.records import TextField
from jaxforge.data.teacher_logits import (
    FILE_NAME,
    Manifest,
    SavedLogits,
    SavedSet,
    checksums,
    file_name,
)

TEXTS = [f"document {i} " * 9 for i in range(30)]
OPTIONS = ["--output", "out", "--tokenizer", "byte", "--unit-bytes", "1500", "--workers", "1"]
EXAMPLE = {"input_ids": np.arange(24, dtype=np.int32).reshape(6, 4) % 7}


def write_arrow(directory: Path) -> None:
    """Write records in the formats of Arrow, compressed and not."""
    import pyarrow
    from pyarrow import feather, parquet

    directory = directory / "arrow"
    directory.mkdir(parents=True)
    table = pyarrow.table({"text": TEXTS, "number": list(range(len(TEXTS)))})
    with pyarrow.ipc.new_stream(directory / "stream.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    feather.write_feather(table, directory / "a.feather", compression="uncompressed", chunksize=7)
    feather.write_feather(table, directory / "b.feather", compression="lz4", chunksize=7)
    parquet.write_table(table, directory / "c.parquet", row_group_size=7)


def read_arrow(directory: Path) -> dict[str, str]:
    """Read the records as `prepare` does."""
    return {
        f"files {source.name}": repr([part.text for part in text_parts([source])])
        for source in find_inputs([directory], content=TextField())
    }


def write_partial(directory: Path) -> None:
    """Write the state of a `prepare` after one of two tasks has finished."""
    records = directory.parent / "input.jsonl"
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    state = directory / "prepare"
    state.mkdir(parents=True)
    (state / "input").symlink_to(records.resolve())  # a copy of the state has the same input
    with contextlib.chdir(state):
        for options in (["--slurm", "2"], ["--share", "0/2"]):
            assert prepare.main([str(records.resolve()), *OPTIONS, *options]) == 0


def read_partial(directory: Path) -> dict[str, str]:
    """Finish a copy of the state; return a hash of the tokens in each file."""
    with tempfile.TemporaryDirectory() as copy:
        state = Path(copy) / "state"
        subprocess.run(["cp", "-a", directory, state], check=True)  # also pipes and vast files
        with contextlib.chdir(state):
            assert prepare.main([str((state / "input").resolve()), *OPTIONS]) == 0
        manifest = corpus_manifest.Manifest.read(state / "out" / "train")
        assert manifest is not None
        return {
            f"corpus {shard.file}": _verified(state / "out" / "train" / shard.file, manifest)
            for shard in manifest.shards
        }


def _verified(path: Path, manifest: corpus_manifest.Manifest) -> str:
    """Return a hash of the tokens of a file, which are verified as in a run."""
    file = token_file.inspect(path, "", manifest)
    tokens = np.asarray(file.map())
    assert file.hashes is not None
    file.hashes.check_from(tokens, 0)
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def write_logits(directory: Path) -> None:
    """Write saved logits of six sequences, in two files."""
    directory = directory / "logits"
    directory.mkdir(parents=True)
    settings = {"train.seq_len": 4, "data.pack_sequences": False, "data.eos_token_id": None,
                "data.overlong": "cut"}  # fmt: skip
    manifest = Manifest("t", {"w": ["float32", 7]}, 16, 3, "float32", settings, 4,
                        [SavedSet("d", 6, "x")])  # fmt: skip
    rng, records = np.random.default_rng(0), np.zeros(6, manifest.record)
    records["ids"] = rng.integers(0, 16, records["ids"].shape)
    records["logits"] = -np.sort(rng.random(records["logits"].shape))
    records["checksum"][:, 0] = checksums(EXAMPLE, records)
    for number in range(2):
        np.save(directory / file_name(0, number), records[4 * number : 4 * number + 4])
    (directory / FILE_NAME).write_text(json.dumps(manifest.to_json()))


def read_logits(directory: Path) -> dict[str, str]:
    """Read all logits as a run does."""
    manifest = Manifest.read(directory)
    logits = SavedLogits(directory, manifest, 0, min(manifest.top_k, 3))
    logits.check_files()
    n = min(manifest.datasets[0].sequences, 6)
    example = {name: array[:n] for name, array in EXAMPLE.items()}
    fields = logits.read(range(n), example)
    return {f"logits {name}": repr(array.tolist()) for name, array in fields.items()}
