"""Damage to real checkpoints, at random but reproducible: of bits, of structure, of files.

Shared by the tests, which do some of it in seconds, and `benchmarks/fuzz.py`, which takes hours.
"""

import hashlib
import io
import json
import math
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torch_compat.formats.dcp_reader import METADATA

Random = np.random.Generator

NUMBERS = [-1, 0, 1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30,
           10**400, -(2**31), -(2**63), 1.5, -0.0, 1e308, math.inf, math.nan]  # fmt: skip
TEXTS = [
    "",
    "x",
    "../x",
    "/etc/passwd",
    "a" * 100_000,
    "\ud800",
    "\x1b[2J",
    "[/red]",
    "\0",
    "é\n𝄞",
    "%s%n",
]


def value(rng: Random) -> Any:
    """Something that belongs nowhere."""
    deep: Any = 0
    for _ in range(int(rng.integers(1, 900))):
        deep = [deep]
    kinds = [None, True, [], {}, deep, {"a": deep}, [0] * 50_000, {str(i): i for i in range(9999)}]
    every = [*NUMBERS, *TEXTS, *kinds]
    return every[rng.integers(len(every))]


_SAME_SIZE = [
    ["F32", "I32", "U32"], ["F16", "BF16", "I16", "U16"], ["F64", "I64", "U64"],
    ["U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"],
]  # fmt: skip

WITH_CHECKSUMS = "of_archive", "of_items"
"""Ways after which all checksums are right: what is read then is what the file says."""


def mutate(rng: Random, directory: Path) -> str:
    """Damages one file of a checkpoint; returns what was done."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink())
    path = files[rng.integers(len(files))]
    methods = [of_bytes, of_bytes, of_file, *_STRUCTURAL.get(path.suffix or path.name, [])]
    methods += [of_pickle, of_metadata, of_metadata] if path.name == METADATA else []
    methods += [of_json] * 2 if path.name == "metadata" else []
    method = methods[rng.integers(len(methods))]
    what = method(rng, path)
    return f"{path.relative_to(directory)}: {method.__name__}: {what}"


def of_bytes(rng: Random, path: Path) -> str:
    """Bits turned, bytes changed, taken out, repeated, cut off."""
    data = bytearray(path.read_bytes())
    end = _undetectable(path, data)
    what = ""
    for _ in range(int(rng.integers(1, 4))):
        if not end:
            return "empty"
        at, size = int(rng.integers(end)), int(2 ** rng.integers(0, 8))
        size = min(size, end - at)
        kind = int(rng.integers(9))
        what += f"{kind}@{at}+{size} "
        if kind <= 1:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            data[at] = int(rng.integers(256))
        elif kind == 3:
            data[at : at + size] = rng.bytes(size)
        elif kind == 4:
            number = (0, 1, 2**31 - 1, 2**32 - 1, 2**64 - 1)[rng.integers(5)]
            data[at : at + 8] = struct.pack("<Q", number)[: len(data[at : at + 8])]
        elif kind == 5:
            del data[at : at + size]
        elif kind == 6:
            data[at:at] = data[at : at + size]
        elif kind == 7:
            other = int(rng.integers(end))
            data[at : at + size] = data[other : other + size]
        else:
            del data[at:]
        end = min(end, len(data))
    path.write_bytes(data)
    return what


def of_file(rng: Random, path: Path) -> str:
    """Another kind of file, none, an empty one, a vast one, a link out, another file's content."""
    kind = int(rng.integers(8))
    if kind == 7:
        siblings = sorted(p for p in path.parent.iterdir() if p.is_file())
        path.write_bytes(siblings[rng.integers(len(siblings))].read_bytes())
    elif kind == 6:
        os.truncate(path, 2 ** int(rng.integers(10, 40)))
    else:
        path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to("/etc/passwd")
    elif kind == 4:
        path.touch()
    elif kind == 5:
        path.symlink_to(path.name)
    return str(kind)


def of_json(rng: Random, path: Path) -> str:
    """A value replaced, a key renamed, taken out or added; in safetensors, of the header."""
    data, before, after = path.read_bytes(), b"", b""
    if path.suffix == ".safetensors":
        end = 8 + struct.unpack("<Q", data[:8])[0]
        data, after = data[8:end], data[end:]
    document = json.loads(data)
    for _ in range(int(rng.integers(1, 3))):
        _change(rng, *_target(rng, document))
    text = json.dumps(document).encode()
    before = struct.pack("<Q", len(text)) if after or path.suffix == ".safetensors" else b""
    path.write_bytes(before + text + after)
    return text[:80].decode("ascii", "replace")


def of_dtypes(rng: Random, path: Path) -> str:
    """Tensors of safetensors with another dtype of the same size; scales with strange numbers."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header, numbers = json.loads(data[8:end]), bytearray(data[end:])
    names = [name for name in header if name != "__metadata__"]
    scales = [name for name in names if "scale" in name]
    names = scales if scales and rng.integers(2) else names
    name = names[rng.integers(len(names))]
    about = header[name]
    kinds = next(kinds for kinds in _SAME_SIZE if about["dtype"] in kinds)
    if about["dtype"] == "F32" and name in scales and rng.integers(2):
        strange = np.float32([np.nan, np.inf, -np.inf, 0, -1])[rng.integers(5)]
        begin = about["data_offsets"][0]
        numbers[begin : begin + 4] = strange.tobytes()
        what = str(strange)
    else:
        what = about["dtype"] = kinds[rng.integers(len(kinds))]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + numbers)
    return f"{name} = {what}"


def _target(rng: Random, document: Any) -> tuple[Any, Any]:
    """A container within it, and one of its keys."""
    key = None
    while True:
        keys = list(document) if isinstance(document, dict) else range(len(document))
        if not len(keys):
            return document, None
        key = keys[int(rng.integers(len(keys)))]
        inner = document[key]
        if not isinstance(inner, dict | list) or rng.random() < 0.2:
            return document, key
        document = inner


def _change(rng: Random, container: Any, key: Any) -> None:
    kind = int(rng.integers(5))
    if key is None and isinstance(container, list):
        container.append(value(rng))
    elif key is None:
        container["x"] = value(rng)
    elif kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[TEXTS[rng.integers(len(TEXTS))]] = container.pop(key)
    elif kind == 2:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        container[key] = container[keys[int(rng.integers(len(keys)))]]
    else:
        container[key] = value(rng)


def of_pickle(rng: Random, path: Path) -> str:
    """Instructions taken out, repeated, exchanged, and some that want the world."""
    data = path.read_bytes()
    result, what = _other_pickle(rng, data)
    path.write_bytes(result)
    return what


def _other_pickle(rng: Random, data: bytes) -> tuple[bytes, str]:
    locations = [at for _, _, at in pickletools.genops(data) if at is not None]
    chunks = [data[a:b] for a, b in zip(locations, [*locations[1:], len(data)], strict=True)]
    what = ""
    for _ in range(int(rng.integers(1, 4)) if len(chunks) > 3 else 0):
        at, other = (int(rng.integers(1, len(chunks))) for _ in range(2))
        kind = int(rng.integers(5))
        what += f"{kind}@{at} "
        if kind == 0:
            del chunks[at]
        elif kind == 1:
            chunks[at:at] = [chunks[at]] * int(2 ** rng.integers(0, 16))
        elif kind == 2:
            chunks[at], chunks[other] = chunks[other], chunks[at]
        elif kind == 3:
            chunks[at] = chunks[other]
        else:
            snippets = list(_snippets(rng))
            chunks.insert(at, snippets[rng.integers(len(snippets))])
    return b"".join(chunks), what


def _snippets(rng: Random) -> Iterator[bytes]:
    many = int(2 ** rng.integers(2, 18))
    yield b")" + b"\x85" * many  # nested tuples
    yield b")" + b"2\x86" * min(many, 90)  # shared ones
    yield b"]" * many
    yield b"(" * many
    yield b"\x8f" * many
    yield b"2" * many
    yield b"\x94" * many
    yield b"2s2u2e2a"
    yield b"\x8a\xff" + b"\xff" * 255
    yield b"\x8b" + struct.pack("<i", many) + b"\x7f" * many
    yield b"X" + struct.pack("<I", many) + b"a" * many
    yield b"r" + struct.pack("<I", many)
    yield b"j" + struct.pack("<I", int(rng.integers(300)))
    yield b"h" + bytes([int(rng.integers(256))]) + b"R"
    yield b"cbuiltins\neval\n"
    yield b"}" + b"2s" * 3
    yield b"N"
    yield b"("
    yield b"0"


def of_metadata(rng: Random, path: Path) -> str:
    """The table of a DCP with other names, sizes, offsets, files."""
    result = pickle.loads(path.read_bytes())  # our own, before anything was done to it
    items = list(result.storage_data.items())
    _, item = items[rng.integers(len(items))]
    keys = list(result.state_dict_metadata)
    key = keys[rng.integers(len(keys))]
    about = result.state_dict_metadata[key]
    other = value(rng)
    targets: list[tuple[Any, str]] = [
        *((item, name) for name in ("relative_path", "offset", "length")),
        *((result, name) for name in ("storage_data", "planner_data")),
    ]
    if hasattr(about, "chunks"):
        chunk = about.chunks[rng.integers(len(about.chunks))]
        targets += [(about, "size"), (about, "chunks"), (about, "properties"),
                    (chunk, "offsets"), (chunk, "sizes")]  # fmt: skip
        if rng.random() < 0.3:
            about.chunks = [chunk] * int(2 ** rng.integers(0, 14))
        if rng.random() < 0.3:
            other = tuple(int(n) for n in rng.integers(0, 9, 2))
    target, field = targets[rng.integers(len(targets))]
    if rng.random() < 0.3:
        other = getattr(items[rng.integers(len(items))][1], "offset")  # noqa: B009
    elif isinstance(getattr(target, field), int) and rng.random() < 0.5:
        other = getattr(target, field) + int(rng.integers(-70, 70))
    if rng.random() < 0.15:
        result.state_dict_metadata[str(value(rng))] = result.state_dict_metadata.pop(key)
    else:
        object.__setattr__(target, field, other)
    try:
        path.write_bytes(pickle.dumps(result))
    except RecursionError:  # Python cannot write it; `of_pickle` can
        return of_bytes(rng, path)
    return f"{field} = {str(other)[:60]}"


def of_archive(rng: Random, path: Path) -> str:
    """A file of `torch.save` whose pickle, or whose zip structure, is another one."""
    out, what = io.BytesIO(), ""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                data, what = _other_pickle(rng, data)
            kind = int(rng.integers(30))
            if kind == 0:
                continue
            name = "archive/other" if kind == 1 else entry.filename
            method = zipfile.ZIP_DEFLATED if kind == 2 else zipfile.ZIP_STORED
            new.writestr(name, data, method)
    path.write_bytes(out.getvalue())
    return what


def of_lines(rng: Random, path: Path) -> str:
    """Lines with a value replaced, a key renamed, taken out or added; lines that are none."""
    lines = path.read_bytes().split(b"\n")[:-1]
    at = int(rng.integers(len(lines)))
    if rng.integers(4):
        document = json.loads(lines[at])
        for _ in range(int(rng.integers(1, 4))):
            _change(rng, *_target(rng, document))
        lines[at] = json.dumps(document, ensure_ascii=bool(rng.integers(2))).encode(
            "utf-8", "surrogatepass"
        )
    else:
        lines[at] = json.dumps(value(rng)).encode()
    path.write_bytes(b"\n".join([*lines, b""]))
    return f"{at}: {lines[at][:80].decode('ascii', 'replace')}"


def of_toml(rng: Random, path: Path) -> str:
    """Lines repeated, exchanged, taken out, and lines that no config has."""
    lines = path.read_text().split("\n")
    deep, wide = int(2 ** rng.integers(1, 14)), int(2 ** rng.integers(1, 18))
    strange = [
        "a" + ".a" * deep + " = 1", "x = " + "[" * deep + "]" * deep, f"x = {'9' * deep}",
        "[[a]]\n" * wide, f"x = [{'1,' * wide}]", "x = {" + "a = {" * deep,
        '"""' + '\\"' * wide, f"x = '{'x' * wide}'",
        f'seed = "{TEXTS[rng.integers(len(TEXTS))]}"'.encode("utf-8", "replace").decode(),
        f"[model]\ndim = {NUMBERS[rng.integers(len(NUMBERS))]}",
    ]  # fmt: skip
    what = []
    for _ in range(int(rng.integers(1, 4))):
        at, other = (int(rng.integers(len(lines))) for _ in range(2))
        kind = int(rng.integers(5))
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 2:
            lines.insert(at, lines[other])
        else:
            lines.insert(at, strange[rng.integers(len(strange))])
        what.append(f"{kind}@{at} {lines[min(at, len(lines) - 1)][:40]}")
    path.write_text("\n".join(lines))
    return "; ".join(what)


def of_capsule(rng: Random, path: Path) -> str:
    """Entries that are damaged themselves, under hashes that are right, or among others."""
    with zipfile.ZipFile(path) as old:
        entries = {entry.filename: old.read(entry) for entry in old.infolist()}
    about = json.loads(entries.pop("capsule.json"))
    names = list(entries)
    name, what = names[rng.integers(len(names))], "about"
    kind = int(rng.integers(4))
    if kind == 0:
        _change(rng, *_target(rng, about))
    elif kind == 1:
        entries[f"configs/from_step_{NUMBERS[rng.integers(len(NUMBERS))]}.toml"] = entries[name]
    else:
        changed = path.with_name(name)
        changed.write_bytes(entries[name])
        methods = {".jsonl": of_lines, ".toml": of_toml}
        what = methods.get(changed.suffix, of_bytes)(rng, changed)
        entries[name] = changed.read_bytes()
        changed.unlink()
    if kind:
        about["files"] = {n: hashlib.sha256(data).hexdigest() for n, data in entries.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("capsule.json", json.dumps(about))
        for entry, data in entries.items():
            new.writestr(entry, data)
    return f"{kind} {name}: {what}"


def of_items(rng: Random, path: Path) -> str:
    """An archive among those of a DCP's file whose pickle is another one; the table names it."""
    metadata = path.parent / METADATA
    if not metadata.is_file():
        return of_bytes(rng, path)
    result = pickle.loads(metadata.read_bytes())
    items = [item for item in result.storage_data.values() if item.relative_path == path.name]
    item = items[rng.integers(len(items))]
    data = path.read_bytes()
    element = path.with_name("one")
    element.write_bytes(data[item.offset : item.offset + item.length])
    what = of_archive(rng, element)
    output = element.read_bytes()
    element.unlink()
    item.offset, item.length = len(data), len(output)
    path.write_bytes(data + output)
    metadata.write_bytes(pickle.dumps(result))
    return what


def _undetectable(path: Path, data: bytes) -> int:
    """Return the offset after which no byte of a file is distinguishable by its format."""
    if path.suffix == ".safetensors" and len(data) > 8:
        return min(len(data), 8 + struct.unpack("<Q", data[:8])[0])
    return len(data)


_STRUCTURAL: dict[str, list[Callable[[Random, Path], str]]] = {
    ".json": [of_json] * 3,
    ".safetensors": [*[of_json] * 3, *[of_dtypes] * 2],
    ".pt": [of_archive] * 3,
    ".distcp": [of_items] * 3,
    ".jsonl": [of_lines] * 6,
    ".toml": [of_toml] * 3,
    ".zip": [of_capsule] * 6,
}
