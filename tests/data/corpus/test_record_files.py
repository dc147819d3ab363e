"""Files of records under all their names, and inputs of a few KB that would take gigabytes."""

import gzip
import io
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from jaxforge.commands import prepare
from jaxforge.data.corpus import documents, files
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.formats import json_objects
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.records import TextField
from jaxforge.errors import UserError

TEXTS = ["one", 'two "quoted", with ünïcödé\n', "", "three ]}"]
OBJECTS = [{"n": i, "text": text, "more": {"a": [1, {}]}} for i, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(record) + "\n" for record in OBJECTS)
ARRAY = json.dumps(OBJECTS, ensure_ascii=False)
PRETTY = "\n".join(json.dumps(record, indent=2) for record in OBJECTS)
CSV = 'n,text\n0,one\n1,"two ""quoted"", with ünïcödé\n"\n2,\n3,three ]}\n'
END = 256


def table():
    return pyarrow.table({"n": [0, 1, 2, 3], "text": TEXTS})


def arrow(new, table):
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def parquet_of(table, **options):
    sink = io.BytesIO()
    parquet.write_table(table, sink, **options)
    return sink.getvalue()


FILES = {
    "a.jsonl": LINES.encode(),
    "a.JSONL": LINES.encode(),
    "a.ndjson": LINES.encode(),
    "a.json": LINES.encode(),
    "array.json": b"\xef\xbb\xbf" + ARRAY.encode(),
    "array.Json": json.dumps(OBJECTS, indent=1).encode(),
    "array.json.gz": gzip.compress(ARRAY.encode()),
    "pretty.json": PRETTY.encode(),
    "a.JSONL.GZ": gzip.compress(LINES.encode()),
    "a.ndjson.zst": zstandard.compress(LINES.encode()),
    "a.csv": CSV.encode(),
    "a.CSV.gz": gzip.compress(b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n", 1).encode()),
    "semicolons.csv": CSV.replace(",", ";").replace("; with", ", with").encode(),
    "tabs.csv": CSV.replace(",", "\t").replace("\t with", ", with").encode(),
    "a.tsv": CSV.replace(",", "\t").replace("\t with", ", with").encode(),
    "a.PARQUET": parquet_of(table(), row_group_size=3),
    "file.arrow": arrow(pyarrow.ipc.new_file, table()),
    "a.feather": arrow(pyarrow.ipc.new_file, table()),
    "stream.arrow": arrow(pyarrow.ipc.new_stream, table()),
}


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def run(*args):
    return prepare.main([*map(str, args), "--workers", "1"])


def texts(directory):
    tokens = np.load(directory / "train" / "shard_00000.npy").tolist()
    assert tokens.pop() == END
    return bytes(token if token != END else 0 for token in tokens).decode().split("\0")


@pytest.mark.parametrize("name", FILES)
def test_records_are_read_by_any_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(json_objects, "CHUNK", 7)  # values across chunks
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / name, FILES[name])
    run(tmp_path / "data", "--output", tmp_path / "out", "--text-field", "text")
    assert texts(tmp_path / "out") == [text for text in TEXTS if text]
    [source] = find_inputs([tmp_path / "data" / name])
    every = [record.content.read().decode() for record in source.records()]
    assert every == TEXTS
    with pytest.raises(
        UserError, match=r'"title".*(it has:? n, text.*--text-field text|--skip-bad)'
    ):
        run(tmp_path / "data", "--output", tmp_path / "bad", "--text-field", "title")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"', "record 2 "),
        ('[{"text": "a"} {"text": "b"}]', r"record 1 \(no comma\)"),
        ('[{"text": "a"},]', "record 2 "),
        ('[{"text": "a"}] x', "text after the array's end"),
        ('[{"text": "a"}', 'the array ends without "]"'),
        ('{"text":\n"a"}\n{"text": b}', "record 2 "),
        ('[{"text": ' + "[" * 100_000, "record 1 "),
        (b'[{"text": "a"}, {"text": "\xff"}]', "record 1 "),
    ],
)
def test_damaged_json_is_named(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(UserError, match=rf"a\.json: not JSON.*{message}.*--exclude|{message}"):
        run(path, "--output", tmp_path / "out", "--skip-bad")


@pytest.mark.parametrize("content", ["[]", "  ", '[{"text": ""}]'])
def test_json_without_text_is_refused(tmp_path, content):
    with pytest.raises(UserError, match="hold no text"):
        run(write(tmp_path / "a.json", content), "--output", tmp_path / "out")


def test_bad_elements_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(json_objects, "CHUNK", 1)  # within numbers
    write(tmp_path / "a.json", '[1, {"text": "a"}, "x", {"text": 3}, [], {"text": "b"}, 12]')
    with pytest.raises(UserError, match=r"a\.json:1: not a JSON object; .*--skip-bad"):
        run(tmp_path / "a.json", "--output", tmp_path / "out")
    run(tmp_path / "a.json", "--output", tmp_path / "out", "--skip-bad")
    assert texts(tmp_path / "out") == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,n\na,1,2\n", r"a\.csv:1: 3 fields, and the first row 2; "),
        ('text,n\n"a,1\n', r"not CSV in UTF-8 in row 1 \(unexpected end of data\)"),
        ("text,n\ncafé,1\n".encode("latin-1"), r"not CSV in UTF-8 in row 1 \(.*decode"),
        ("title,n\na,1\n", r'a\.csv has no column "text"; it has title, n'),
        ("text\n".encode("utf-16"), r"a\.csv is in UTF-16, .*iconv"),
    ],
)
def test_damaged_csv_is_named(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        run(write(tmp_path / "a.csv", content), "--output", tmp_path / "out")


@pytest.mark.parametrize("content", [LINES, ARRAY, f"\n {PRETTY}", f"\ufeff{LINES}"])
@pytest.mark.parametrize("name", ["a.txt", "dump"])
def test_json_in_text_file_is_refused(tmp_path, name, content):
    with pytest.raises(UserError, match=rf"{name} holds JSON, .*\.jsonl .*--exclude"):
        run(write(tmp_path / name, content), "--output", tmp_path / "out")


def test_message_about_a_record_names_few_of_its_fields():
    record = {"x" * 1000: 1, **{f"field_{i}": 1 for i in range(10**5)}}
    with pytest.raises(ValueError, match=r"field_28 and 99,971 more\)$") as error:
        TextField("text").document(record)
    assert len(str(error.value)) < 800


ADVICE = [
    ('{"id": "1", "content": "a"}\n', (), r'\(it has: id, content\); give --text-field content$'),
    ('{"body": "a"}\n', (), "; give --text-field body$"),
    ('{"n": 1, "lyrics": "a"}\n', (), "; give --text-field lyrics$"),
    ('{"meta": {"text": "a"}}\n', (), "--skip-bad"),
    ('{"id": 1}\n', ("--skip-bad",), "hold no text: --skip-bad left out all 1 records"),
    ('{"messages": []}\n', (), '"messages" are conversations: give --conversations$'),
    ('{"prompt": "a", "completion": "b"}\n', (), "are conversations: give --conversations$"),
    ('{"instruction": "a", "input": "", "output": "b"}\n', (),
     '"instruction" and "output" are conversations: give --conversations$'),
    ('{"id": 1}\n', (), "--skip-bad"),
    ('{"text": "a"}\n{"content": "a"}\n', (), r'jsonl:2: .*--skip-bad'),
    ('{"text": 1, "content": "a"}\n', (), r'no text in "text" \(1\); .*--skip-bad'),
]  # fmt: skip


@pytest.mark.parametrize(("content", "options", "message"), ADVICE)
def test_advice_names_the_option_that_reads_the_records(tmp_path, content, options, message):
    with pytest.raises(UserError, match=message):
        run(write(tmp_path / "a.jsonl", content), "--output", tmp_path / "out", *options)


def test_non_file_inputs_raise(tmp_path):
    with pytest.raises(UserError, match="/dev/null is neither a file nor a directory"):
        run("/dev/null", "--output", tmp_path / "out")
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        run(write(tmp_path / "empty.txt", b""), "--output", tmp_path / "out")


def test_invalid_utf8_in_table_is_bad_record(tmp_path):
    offsets, data = struct.pack("<4i", 0, 1, 3, 4), b"a\xff\xfeb"
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    )
    bad = pyarrow.table({"text": column})
    for name, content in (
        ("a.parquet", parquet_of(bad)),
        ("a.arrow", arrow(pyarrow.ipc.new_file, bad)),
    ):
        path, output = write(tmp_path / name, content), tmp_path / f"{name}.out"
        with pytest.raises(UserError, match=rf"{name}:2: not UTF-8 .*--skip-bad"):
            run(path, "--output", output)
        run(path, "--output", output, "--skip-bad")
        assert texts(output) == ["a", "b"]


@pytest.mark.parametrize("new", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
@pytest.mark.parametrize("offset", [-1, 2**31 - 1, 1 << 20])
@pytest.mark.parametrize("is_nested", [False, True])
def test_offsets_outside_of_the_data_raise(tmp_path, new, offset, is_nested):
    """A process that reads such values ends by a signal."""
    texts = pyarrow.array(["hello", "world"] * 20)
    column = pyarrow.array([[{"a": text}] for text in texts.to_pylist()]) if is_nested else texts
    content = arrow(new, pyarrow.table({"text": column}))
    expected = struct.pack("<4i", 0, 5, 10, 15)
    assert content.count(expected) > 0
    damaged = content.replace(expected, struct.pack("<4i", 0, offset, 10, 15))
    path = write(tmp_path / "a.arrow", damaged)
    with pytest.raises(UserError, match=r"cannot read .*a\.arrow: .*[Oo]ffset"):
        run(path, "--output", tmp_path / "out", "--skip-bad")


def test_value_without_python_object_is_bad_record(tmp_path):
    times = pyarrow.array([1 << 50], pyarrow.timestamp("s"))
    path = write(tmp_path / "a.arrow", arrow(pyarrow.ipc.new_file, pyarrow.table({"text": times})))
    with pytest.raises(UserError, match=r"a\.arrow:1: .*--skip-bad"):
        run(path, "--output", tmp_path / "out")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv"])
def test_column_with_two_meanings_raises(tmp_path, name):
    names, texts = ["text", "n", "text", "n"], pyarrow.array(["a", "b"])
    twice = pyarrow.Table.from_arrays([texts] * 4, names=names)
    content = {"a.parquet": parquet_of(twice), "a.arrow": arrow(pyarrow.ipc.new_file, twice),
               "a.csv": "text,n,text,n\na,b,a,b\n"}[name]  # fmt: skip
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=rf'{name} has 2 columns "text": rename .*--exclude'):
        run(path, "--output", tmp_path / "out", "--skip-bad")


LARGE = "x" * 5000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_records_beyond_the_limit_are_bad(tmp_path, name):
    content = ["a", LARGE, "b"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in content).encode()
    item = pyarrow.table({"text": content})
    data = {"jsonl": lines, "gz": gzip.compress(lines), "parquet": parquet_of(item),
            "arrow": arrow(pyarrow.ipc.new_file, item)}[name.rpartition(".")[2]]  # fmt: skip
    command = (write(tmp_path / name, data), "--output", tmp_path / "out", "--max-record-bytes")
    with pytest.raises(UserError, match=rf"{name}:2: the record is larger than 4,000 bytes; raise"):
        run(*command, 4000)
    run(*command, 4000, "--skip-bad")
    assert texts(tmp_path / "out") == ["a", "b"]
    run(*command, 6000, "--overwrite")
    assert texts(tmp_path / "out") == content


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_values_beyond_the_limit_end_the_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr(json_objects, "CHUNK", 100)
    data = json.dumps([{"text": "a"}, {"text": LARGE}]) if name == "a.json" else f"text\na\n{LARGE}"
    with pytest.raises(UserError, match=r"larger than 4,000 characters: see --max-record-bytes"):
        run(write(tmp_path / name, data), "--output", tmp_path / "out", "--max-record-bytes", 4000)


def bombs():
    """Some KB each, which unpack to 40 MB of text and more."""
    line = b'{"text": "' + b"a" * (40 << 20) + b'"}\n'
    large = "a" * (2 << 20)
    shared = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200), pyarrow.array([large]))
    whole = pyarrow.table({"text": [large] * 20})
    yield "line.jsonl.gz", gzip.compress(line)
    yield "line.jsonl.zst", zstandard.compress(line)
    yield "array.json.gz", gzip.compress(b"[" + line)
    yield "lines.jsonl.gz", gzip.compress(b'{"text": ""}\n' * (50 << 16))
    yield "values.jsonl.gz", gzip.compress(b'{"a": [' + b"{}," * (5 << 20) + b"{}]}\n")
    yield "shared.parquet", parquet_of(pyarrow.table({"text": shared}), compression="zstd")
    yield "plain.parquet", parquet_of(whole, compression="zstd", use_dictionary=False)
    yield "field.csv.gz", gzip.compress(b'text\n"' + b"a" * (40 << 20))


MEASURE = """
import resource, sys
from pathlib import Path
from jaxforge.cli.running import run_main
from jaxforge.commands import prepare
from jaxforge.tools.starting import preparation
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before, output = peak(), sys.argv[1]
for path in sys.argv[2:]:
    line = [path, "--output", output, "--skip-bad", "--workers", "1"]
    print(Path(path).name, run_main(lambda: prepare.main(line)), peak() - before)
"""


@pytest.mark.processes
def test_small_files_take_little_memory(tmp_path):
    paths = [str(write(tmp_path / name, data)) for name, data in bombs()]
    assert all(os.path.getsize(path) < 1 << 20 for path in paths)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "out"), *paths]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    results = [line.split() for line in ran.stdout.splitlines()]
    assert [name for name, *_ in results] == [os.path.basename(path) for path in paths]
    assert {code for _, code, _ in results} == {"2"}, ran.stdout + ran.stderr
    assert max(int(size) for *_, size in results) < 300, ran.stdout
    assert ran.stderr.count("error: ") == len(paths)


def test_long_lines_are_cut_at_spaces_and_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_BYTES", 30)
    monkeypatch.setattr(documents, "LINE_BYTES", 30)
    for text in ("word " * 100, "ü" * 200, "€" * 99 + " end\nshort\n", "x" * 500):
        [source] = find_inputs([write(tmp_path / "a.txt", text)])
        every = list(text_parts([source]))
        assert "".join(chunk.text for chunk in every) == text
        assert all(chunk.valid and chunk.size <= 60 for chunk in every)
        assert len(every) > len(text.encode()) / 80
        if text.startswith("word"):
            assert all(chunk.text.startswith((" word", "word")) for chunk in every)


def test_implausible_compression_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "UNSUSPICIOUS_BYTES", 1000)
    [source] = find_inputs([write(tmp_path / "a.jsonl", LINES)])
    source.check_growth(250 * source.size)
    with pytest.raises(UserError, match="unpack to more than 250 times"):
        source.check_growth(250 * source.size + 1)
    assert os.path.getsize(tmp_path / "a.jsonl") == source.size
