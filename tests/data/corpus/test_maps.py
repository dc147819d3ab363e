"""Maps of records: their results, counts, errors, and resumed runs."""

import json
import re

import numpy as np
import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import ingest
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.corpus.maps import Map
from jaxforge.errors import UserError
from tests.data.corpus.interruptions import Interrupted, snapshot

END = 256
FUNCTIONS = """
def drop_short(record):
    return record if len(record["text"]) > 3 else None

def shout(record):
    record["text"] = record["text"].upper()
    return record

shout.rule = "upper case"

def empty(record):
    return {**record, "text": ""}

def fail(record):
    if record.get("n") == 2:
        raise KeyError("colour")
    return record

def number(record):
    return 7
"""
TEXTS = ["one", "four", "FIVE", "six", "seven"]


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)))
    return path


def run(*args):
    return prepare.main([*map(str, args), "--workers", "1"])


def documents(output, split="train"):
    shards = sorted((output / split).glob("shard*.npy"))
    data = np.concatenate([np.load(shard) for shard in shards]).tolist()
    text = bytes(i if i < END else 0 for i in data).decode()
    return text.split("\0")[:-1]


def rules(output, split="train"):
    manifest = Manifest.read(output / split)
    return [(r.rule, r.unchanged, r.changed, r.dropped) for r in manifest.statistics.rules]


def test_maps_apply_in_order_and_are_counted(lines, functions, tmp_path, capsys):
    maps = ("--map", f"{functions}:drop_short", "--map", f"{functions}:shout")
    run(lines, "--output", tmp_path / "out", *maps)
    assert documents(tmp_path / "out") == ["FOUR", "FIVE", "SEVEN"]
    assert rules(tmp_path / "out") == [("drop_short", 3, 0, 2), ("upper case", 1, 2, 0)]
    printed = capsys.readouterr().out
    assert "map drop_short   3 unchanged, 0 changed, 2 dropped" in printed
    assert "map upper case   1 unchanged, 2 changed, 0 dropped" in printed


def test_dropped_records_count_in_their_split(lines, functions, tmp_path):
    options = ("--validation-fraction", "0.5", "--output")
    run(lines, *options, tmp_path / "plain")
    run(lines, *options, tmp_path / "out", "--map", f"{functions}:drop_short")
    for split in ("train", "validation"):
        texts = documents(tmp_path / "plain", split)
        assert documents(tmp_path / "out", split) == [t for t in texts if len(t) > 3]
        n_long = sum(len(t) > 3 for t in texts)
        assert rules(tmp_path / "out", split) == [("drop_short", n_long, 0, len(texts) - n_long)]


def test_maps_apply_to_text_files_as_records(functions, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in (("a", b"\xef\xbb\xbfone text"), ("b", b"two"), ("c", b"caf\xe9 au lait")):
        (tmp_path / "texts" / f"{name}.txt").write_bytes(text)
    maps = ("--map", f"{functions}:drop_short", "--map", f"{functions}:shout")
    run(tmp_path / "texts", "--output", tmp_path / "out", *maps)
    assert documents(tmp_path / "out") == ["ONE TEXT", "CAF\ufffd AU LAIT"]
    with pytest.raises(
        UserError, match=r"a\.txt:1: the record is larger than 5 bytes; raise --max"
    ):
        run(tmp_path / "texts", "--output", tmp_path / "b", "--max-record-bytes", "5", *maps)


def test_empty_results_leave_no_document_but_a_count(lines, functions, tmp_path):
    more = tmp_path / "b.jsonl"
    more.write_text('{"text": "kept as it is"}\n')
    with pytest.raises(UserError, match="the inputs hold no text"):
        run(lines, "--output", tmp_path / "none", "--map", f"{functions}:empty")
    run(lines, more, "--output", tmp_path / "out", "--map", f"{functions}:drop_short")
    assert rules(tmp_path / "out") == [("drop_short", 4, 0, 2)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fail", r"a\.jsonl:3: --map .*py:fail raised KeyError: 'colour' \(.*functions\.py:16\)"),
        ("number", r"a\.jsonl:1: --map .*:number returned 7; it must return the record"),
        ("missing", r"functions\.py has no function missing; it has .*drop_short"),
        ("shouts", r'functions\.py has no function shouts; did you mean "shout"\?'),
    ],
)  # fmt: skip
def test_failing_map_is_named(lines, functions, tmp_path, function, message):
    with pytest.raises(UserError, match=message):
        run(lines, "--output", tmp_path / "out", "--map", f"{functions}:{function}")
    assert not (tmp_path / "out").exists()


def test_two_maps_with_one_name_are_refused(lines, functions, tmp_path):
    twice = ("--map", f"{functions}:shout") * 2
    with pytest.raises(UserError, match='another --map counts as "upper case", too'):
        run(lines, "--output", tmp_path / "out", *twice)


def interrupt(args, monkeypatch, batches=2):
    """Interrupt a command after some batches."""
    encode, calls = ingest.encode, []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) > batches:
            raise Interrupted
        return encode(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ingest, "encode", stop)
        with pytest.raises(Interrupted):
            run(*args)


def test_resumed_run_has_counts_of_whole_run(lines, functions, tmp_path, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_PARTS", 1)
    maps = ("--map", f"{functions}:drop_short", "--map", f"{functions}:shout",
            "--unit-bytes", "60")  # fmt: skip
    interrupt((lines, "--output", tmp_path / "out", *maps), monkeypatch)
    assert list(tmp_path.glob(".out.partial/parts/*.json"))
    run(lines, "--output", tmp_path / "out", *maps)
    run(lines, "--output", tmp_path / "whole", *maps)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_run_with_changed_function_starts_over(lines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ingest, "BATCH_PARTS", 1)
    versions = [tmp_path / name / "my_map.py" for name in ("one", "two")]
    for path, word in zip(versions, ("first", "second"), strict=True):
        path.parent.mkdir()
        path.write_text(f'def f(record):\n    return {{"text": "{word}"}}\n')
    options = ("--output", tmp_path / "out", "--map", "my_map:f", "--unit-bytes", "60")
    monkeypatch.syspath_prepend(versions[0].parent)
    interrupt((lines, *options), monkeypatch)
    for module in ("_module", "_function"):  # caches of a process; a rerun is a new process
        getattr(__import__("jaxforge.data.corpus.maps", fromlist=["maps"]), module).cache_clear()
    monkeypatch.delitem(__import__("sys").modules, "my_map")
    monkeypatch.syspath_prepend(versions[1].parent)
    run(lines, *options)
    assert re.search(
        r"starting over: --map my_map:f was source \w+, and is", capsys.readouterr().err
    )
    assert documents(tmp_path / "out") == ["second"] * 5


def test_conversations_are_mapped(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(
        "def no_secrets(record):\n    return None if 'secret' in record['completion'] else record\n"
    )
    rows = [("a", "secret"), ("a", "first"), ("b", "one"), ("a", "again"), ("b", "two")]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    maps = ("--map", f"{path}:no_secrets", "--conversations")
    run(lines, "--output", tmp_path / "out", *maps)
    entries = np.load(tmp_path / "out" / "train" / "shard_00000.npy") & 0xFFFF
    assert bytes(i for i in entries.tolist() if i < END).decode() == "afirstboneaagainbtwo"
    assert rules(tmp_path / "out") == [("no_secrets", 4, 0, 1)]


def test_fingerprint_covers_named_module_of_partial(tmp_path):
    hashes = []
    for i in range(2):
        path = tmp_path / f"{i}" / "f.py"
        path.parent.mkdir()
        path.write_text(
            "import functools\n\ndef cut(record, n):\n    return {'text': record['text'][:n]}\n\n"
            f"short = functools.partial(cut, n={i})\n"
        )
        hashes.append(Map(f"{path}:short").fingerprint)
    assert hashes[0] != hashes[1]
