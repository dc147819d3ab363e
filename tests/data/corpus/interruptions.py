"""Interrupted preparations, and what they leave on disk."""

import json
import time

from jaxforge.data.corpus import ingest


class Interrupted(BaseException):
    """Interruption as sudden as Ctrl-C."""


def snapshot(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "train.toml"  # which has the paths of this one
    }


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)


def stop_encoding(monkeypatch):
    """Return `stop(n)`: n batches are encoded, the next raises; None: all are encoded.

    `stop` returns the list of encoded batches.
    """
    encode, encoded = ingest.encode, []

    def stop(limit):
        encoded.clear()

        def limited(tokenizer, texts, dtype):
            if limit is not None and len(encoded) == limit:
                raise Interrupted
            encoded.append(texts)
            return encode(tokenizer, texts, dtype)

        monkeypatch.setattr(ingest, "encode", limited)
        return encoded

    return stop


def write_records(directory, files):
    """Write files of 20 records each, some of them empty."""
    for i in range(files):
        records = [{"text": f"file {i} record {j} " * (j % 17)} for j in range(20)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{i:03}.jsonl").write_text(text)
