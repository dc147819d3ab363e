"""Tar archives of samples, and hostile ones."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import documents
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.errors import UserError
from tests.data.corpus.test_maps import documents as prepared

JPEG = b"\xff\xd8" * 3000
MEMBERS = [
    ("books/1.json", json.dumps({"text": "not this", "n": 1}).encode()),
    ("books/1.jpg", JPEG),
    ("books/1.txt", "wörds of one".encode()),
    ("README", b"no sample"),
    ("books/.hidden.txt", b"no sample"),
    ("books/2.json", json.dumps({"text": "words of two"}).encode()),
    ("a.dir/3.TXT", b"three"),
    ("books/2.txt", b"the same key again"),
    ("x" * 150 + "/4.txt", b"four"),
]
TEXTS = ["wörds of one", "words of two", "three", "the same key again", "four"]


def tar(members, **options):
    """Return an archive; a member is a name and a content, or a TarInfo and a content."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", **options) as archive:
        archive.add(os.path.dirname(__file__), "directory", recursive=False)
        for member, content in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


def write(path, data):
    path.write_bytes(data)
    return path


def run(*args):
    return prepare.main([*map(str, args), "--workers", "1"])


def refused(path, tmp_path, *options):
    """Return the message of a refused archive, and check that no file was written."""
    before = {p for p in tmp_path.rglob("*") if "partial" not in p.name}
    with pytest.raises(UserError) as error:
        run(path, "--output", tmp_path / "out", *options)
    assert {p for p in tmp_path.rglob("*") if "partial" not in p.name} - before <= {
        tmp_path / ".out.lock"
    }
    return str(error.value)


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("name", ["a.tar", "a.TAR.GZ", "a.tgz"])
def test_samples_are_documents(tmp_path, name, kind):
    data = tar(MEMBERS, format=kind)
    is_plain = name.lower().endswith(".tar")
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / name, data if is_plain else gzip.compress(data))
    run(tmp_path / "in", "--output", tmp_path / "out")
    assert prepared(tmp_path / "out") == TEXTS


def test_webdataset_writer_is_read(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
        for i, text in enumerate(TEXTS):
            sink.write({"__key__": f"{i:04}", "txt": text, "json": {"n": i}, "cls": i})
    run(tmp_path / "a.tar", "--output", tmp_path / "out")
    assert prepared(tmp_path / "out") == TEXTS


def test_long_texts_of_archives_are_split(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_BYTES", 4)
    (source,) = find_inputs([write(tmp_path / "a.tar", tar(MEMBERS))])
    every = list(text_parts([source]))
    assert "".join(part.text for part in every) == "".join(TEXTS)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("1.txt", b"two"), r"a\.tar:2: sample '1': it has two members \.txt"),
        (("2.jpg", JPEG), r"a\.tar:2: sample '2' has no \.txt and no \.json \(it has: jpg\)"),
        (("2.json", b"[1]"), r"a\.tar:2: sample '2': \.json is not a JSON object"),
        (("2.json", b"{"), r"a\.tar:2: sample '2': \.json is not JSON"),
        (("2.json", b'{"content": "x"}'), r'a\.tar:2: no text in "text"'),
        (("2.txt", b"x" * 2000), r"a\.tar:2: sample '2': \.txt is larger than 1,000 bytes; raise"),
        (("../../2\x1b[31m.jpg", b""), r"sample '\.\./\.\./2\\x1b\[31m' has no \.txt"),
    ],
)
def test_bad_sample_is_named_or_skipped(tmp_path, member, message):
    members = [("0.txt", b"first"), ("1.txt", b"one"), member, ("3.txt", b"last")]
    if member[0] != "1.txt":
        del members[1]
    path = write(tmp_path / "a.tar", tar(members))
    options = ("--max-record-bytes", "1000")
    shown = refused(path, tmp_path, *options)
    assert re.search(message, shown)
    run(path, "--output", tmp_path / "out", "--skip-bad", *options)
    assert prepared(tmp_path / "out") == ["first", "last"]


def test_names_of_members_write_no_file(tmp_path):
    names = ["../../outside.txt", "/etc/absolute.txt", "C:\\windows.txt", "a/../../b.txt"]
    link = tarfile.TarInfo("link.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    device = tarfile.TarInfo("device.txt")
    device.type = tarfile.CHRTYPE
    inside = tmp_path / "inside"
    inside.mkdir()
    members = [(name, b"text") for name in names] + [(link, b""), (device, b"")]
    run(write(inside / "a.tar", tar(members)), "--output", inside / "out")
    assert prepared(inside / "out") == ["text"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


def sparse(kind):
    if kind == "old":
        info = tarfile.TarInfo("1.txt")
        info.type = tarfile.GNUTYPE_SPARSE
        return tar([(info, b"")])
    info = tarfile.TarInfo("1.txt")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 40)}
    return tar([(info, b"1\n0\n1\n")])


@pytest.mark.parametrize("kind", ["old", "pax"])
def test_sparse_member_is_refused(tmp_path, kind):
    path = write(tmp_path / "a.tar", sparse(kind))
    assert "the member '1.txt' is sparse, as no text is" in refused(path, tmp_path)


def header(name, size, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", [100, 512, 1000, 1900, -1024, -600])
def test_truncated_archive_is_refused(tmp_path, packed, end):
    parts = (header(f"{i}.txt", 700) + b"x" * 700 + bytes(324) for i in range(2))
    data = b"".join([*parts, bytes(1024)])[:end]
    name = "a.tar.gz" if packed else "a.tar"
    path = write(tmp_path / name, gzip.compress(data) if packed else data)
    assert f"{name} is truncated: it ends without the mark of its end" in refused(path, tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"words " * 200, "is not a tar archive, or damaged (invalid header)"),
        (gzip.compress(tar(MEMBERS), mtime=0), "(it is compressed by gzip: name it .tar.gz)"),
        (gzip.compress(b"", mtime=0), "(it is compressed by gzip: name it .tar.gz)"),
        (lzma.compress(tar(MEMBERS)), "(it is compressed by xz: decompress it, or"),
        (bz2.compress(tar(MEMBERS)), "(it is compressed by bzip2: decompress it, or"),
        (header("1.jpg", 1 << 60) + b"x" * 512, "is truncated"),
        (header("1.txt", 1 << 60) + b"x" * 512, "is truncated"),
        (header("x", 1 << 40, tarfile.XHDTYPE), "(a header has 1,099,511,627,776 bytes)"),
        (header("x", 1 << 40, tarfile.GNUTYPE_LONGNAME), "(a header has 1,099,511,627,776 bytes)"),
        (header("x", 20, tarfile.XHDTYPE) + b"999 path=x\n".ljust(512, b"\0"), "is truncated"),
        (header("x", 20, tarfile.XHDTYPE) + b"0 path=xx\n".ljust(512, b"\0"), "(invalid header)"),
        (header("x", 9, tarfile.XHDTYPE) + b"9 size=x\n".ljust(512, b"\0") + header("1.txt", 1),
         "is truncated"),
        (header("x", 9, tarfile.XHDTYPE) + b"9 size=x\n".ljust(512, b"\0") + header("1.txt", 1)
         + b"x".ljust(512, b"\0") + bytes(1024), "damaged after '1.txt' (invalid header)"),
        (header("1.txt", 0) + b"x" * 512 + bytes(1024), "damaged after '1.txt' (invalid header)"),
        (2000 * (header("x", 11, tarfile.XHDTYPE) + b"11 path=xx\n".ljust(512, b"\0")),
         "maximum recursion depth"),
    ],
)  # fmt: skip
def test_damaged_archive_has_one_message(tmp_path, data, message):
    path = write(tmp_path / "a.tar", data)
    assert message in refused(path, tmp_path, "--skip-bad")


def test_archive_bomb_is_refused_in_bounded_memory(tmp_path):
    """300 MiB of zeros in 300 kB, as a member that is not read, and as one that is."""
    for name in ("1.jpg", "1.txt"):
        path = tmp_path / f"{name}.tar.gz"
        with gzip.open(path, "wb", compresslevel=9) as file:
            file.write(header(name, 300 << 20))
            for _ in range(300):
                file.write(bytes(1 << 20))
        code = (
            "import resource, sys\n"
            "from jaxforge.commands import prepare\n"
            "from jaxforge.data.corpus import files\n"
            "from jaxforge.tools.starting import preparation\n"
            "files._QUICKLY_UNPACKED = 0  # as for a larger archive\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "try:\n    prepare.main(sys.argv[1:])\n"
            "except Exception as error:\n"
            "    print(error, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code, str(path), "--output", str(tmp_path / "o"), "--skip-bad"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "bytes unpack to more than 250 times as much" in ran.stdout, ran
        assert int(ran.stdout.split()[-1]) < 100


def test_samples_have_fields_for_maps(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(
        "def f(r):\n    return {'text': f\"{r['__key__']} {r.get('n')} {r['text']}\"}\n"
    )
    archive = write(tmp_path / "a.tar", tar(MEMBERS[:1] + MEMBERS[2:3] + [("9.txt", b"caf\xe9")]))
    run(archive, "--output", tmp_path / "out", "--map", f"{path}:f")
    assert prepared(tmp_path / "out") == ["books/1 1 wörds of one", "9 None caf\ufffd"]
    assert Manifest.read(tmp_path / "out" / "train").statistics.rules[0].changed == 2
