"""Maps of records: their results, counts, errors, and resumed runs."""

import json
import pickle
import re
from collections import Counter

import numpy as np
import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import ingest, repeats
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.corpus.maps import Map
from jaxforge.errors import UserError
from tests.data.corpus.interruptions import Interrupted, snapshot

END = 256
FUNCTIONS = """
from jaxforge.data.corpus.maps import drop_repeated

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

@drop_repeated
def first_letter(record):
    return [record["text"][:1].encode()]

@drop_repeated
def every_letter(record):
    return [letter.encode() for letter in record["text"]]

@drop_repeated
def no_bytes(record):
    return [record["text"]]
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
        ("fail", r"a\.jsonl:3: --map .*py:fail raised KeyError: 'colour' \(.*functions\.py:18\)"),
        ("number", r"a\.jsonl:1: --map .*:number returned 7; it must return the record"),
        ("no_bytes", r"a\.jsonl:1: --map .*:no_bytes returned the key 'one', and keys must"),
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
    """Interrupt a command after some batches, with a commit after each."""
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


@pytest.mark.parametrize("function", ["drop_short", "first_letter"])
def test_resumed_run_has_counts_of_whole_run(lines, functions, tmp_path, monkeypatch, function):
    monkeypatch.setattr(ingest, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(ingest, "BATCH_PARTS", 1)
    maps = ("--map", f"{functions}:{function}", "--map", f"{functions}:shout")
    interrupt((lines, "--output", tmp_path / "out", *maps), monkeypatch)
    assert json.loads((tmp_path / ".out.partial/parts/000000.journal").read_text())["place"][1] == 2
    run(lines, "--output", tmp_path / "out", *maps)
    run(lines, "--output", tmp_path / "whole", *maps)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_run_with_changed_function_starts_over(lines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ingest, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(ingest, "BATCH_PARTS", 1)
    versions = [tmp_path / name / "my_map.py" for name in ("one", "two")]
    for path, word in zip(versions, ("first", "second"), strict=True):
        path.parent.mkdir()
        path.write_text(f'def f(record):\n    return {{"text": "{word}"}}\n')
    options = ("--output", tmp_path / "out", "--map", "my_map:f")
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


WORDS = np.random.default_rng(0).choice(list("abcdefgh"), (60, 3))
"""Texts of three letters; most letters repeat."""


def expected_without_repeats(texts, keys):
    """Return the texts whose keys are keys of no earlier text."""
    seen, result = set(), []
    for text in texts:
        if not seen & set(keys(text)):
            result.append(text)
        seen |= set(keys(text))
    return result


@pytest.mark.parametrize("range_entries", [7, 1 << 21])
@pytest.mark.parametrize("unit_bytes", [40, 300, 1 << 28])
def test_repeated_keys_are_found_over_all_inputs(
    functions, tmp_path, monkeypatch, unit_bytes, range_entries
):
    units = ("--unit-bytes", str(unit_bytes))
    monkeypatch.setattr("jaxforge.data.corpus.repeats.RANGE_ENTRIES", range_entries)
    texts = ["".join(row) for row in WORDS]
    (tmp_path / "in").mkdir()
    for i in range(0, 60, 7):
        part = "".join(json.dumps({"text": text}) + "\n" for text in texts[i : i + 7])
        (tmp_path / "in" / f"{i:02}.jsonl").write_text(part)
    repeated = sum(count - 1 for count in Counter(text[0] for text in texts).values())
    expected = expected_without_repeats(texts, lambda text: text[:1])
    assert len(expected) == 60 - repeated
    run(tmp_path / "in", "--output", tmp_path / "out", "--map", f"{functions}:first_letter", *units)
    assert documents(tmp_path / "out") == expected
    assert rules(tmp_path / "out") == [("first_letter", len(expected), 0, repeated)]
    if unit_bytes == 300:  # with several keys for a record, and after another such map
        both = ("--map", f"{functions}:first_letter", "--map", f"{functions}:every_letter")
        run(tmp_path / "in", "--output", tmp_path / "both", *both, *units)
        assert documents(tmp_path / "both") == expected_without_repeats(expected, str)


def test_conversations_are_mapped_and_deduplicated(tmp_path, monkeypatch):
    path = tmp_path / "f.py"
    path.write_text(
        "from jaxforge.data.corpus.maps import drop_repeated\n\n"
        "def no_secrets(record):\n"
        "    return None if 'secret' in record['completion'] else record\n\n"
        "@drop_repeated\ndef prompt(record):\n    return [record['prompt'].encode()]\n"
    )
    rows = [("a", "secret"), ("a", "first"), ("b", "one"), ("a", "again"), ("b", "two")]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    survey, sent = repeats._survey, []
    monkeypatch.setattr(
        repeats, "_survey", lambda *args: (sent.append(pickle.dumps(args)), survey(*args))[1]
    )
    maps = ("--map", f"{path}:no_secrets", "--map", f"{path}:prompt", "--conversations")
    run(lines, "--output", tmp_path / "out", *maps)
    entries = np.load(tmp_path / "out" / "train" / "shard_00000.npy") & 0xFFFF
    assert bytes(i for i in entries.tolist() if i < END).decode() == "afirstbone"
    assert rules(tmp_path / "out") == [("no_secrets", 4, 0, 1), ("prompt", 2, 0, 2)]
    assert sent


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


@pytest.mark.processes
def test_repeats_do_not_depend_on_workers(functions, tmp_path):
    (tmp_path / "in").mkdir()
    for i, row in enumerate(WORDS[:20]):
        (tmp_path / "in" / f"{i:02}.txt").write_text("".join(row))
    command = [str(tmp_path / "in"), "--map", f"{functions}:first_letter"]
    command += ["--unit-bytes", "9", "--output"]
    run(*command, tmp_path / "one")
    assert prepare.main([*command, str(tmp_path / "two"), "--workers", "2"]) == 0
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_interrupted_pass_repeats_unfinished_units_only(functions, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for i, row in enumerate(WORDS[:6]):
        (tmp_path / "in" / f"{i}.txt").write_text("".join(row))
    write, units = repeats._save, []

    def interrupted(path, entries):
        units.extend([path.name] if path.name.startswith("keys_") else [])
        if len(units) == 4:
            raise Interrupted
        write(path, entries)

    monkeypatch.setattr(repeats, "_save", interrupted)
    command = (tmp_path / "in", "--map", f"{functions}:first_letter", "--unit-bytes", "1")
    command += ("--output",)
    with pytest.raises(Interrupted):
        run(*command, tmp_path / "out")
    run(*command, tmp_path / "out")
    assert units == [f"keys_{i:05}.npy" for i in (0, 1, 2, 3, 3, 4, 5)]
    run(*command, tmp_path / "whole")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


@pytest.mark.parametrize("option", [["--slurm", "2"], ["--share", "0/2"]])
def test_repeats_over_a_slurm_array_are_refused(option, functions, tmp_path):
    (tmp_path / "in.txt").write_text("text")
    words = [tmp_path / "in.txt", "--map", f"{functions}:first_letter", "--output", tmp_path / "o"]
    with pytest.raises(UserError, match="--engine local or ray, not --slurm"):
        prepare.main([*map(str, words), *option])
