"""Capsule files: zip archives.

capsule.json        the ingredients, and a hash of each other entry
config.toml         the resolved config of the run's latest start
configs/            the configs of all starts, named by the step from which each start resumed
curve.jsonl         step, loss and gradient norm of each logged step
packages.txt        all installed packages with versions
"""

import dataclasses
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxforge.config.axes import AXES
from jaxforge.errors import UserError
from jaxforge.step.executable import ARCHIVE_ERRORS
from jaxforge.storage import safe_files
from jaxforge.storage.untrusted_json import excerpt, is_step, load_object, parse_line, problem_of
from jaxforge.tools.replay.account import LOGGED

FORMAT = 1
CURVE = "curve.jsonl"
_CONFIG = "config.toml"
_ENTRY = re.compile(r"config\.toml|configs/from_step_[0-9]{1,10}\.toml|curve\.jsonl|packages\.txt")
_ABOUT = "capsule.json"
_SIZE = 1 << 28  # maximum bytes of a file
_UNPACKED = 4 << 20  # maximum bytes of all unpacked entries, plus ...
_UNPACKED_PER_BYTE = 50  # ... this per byte of the file; curves and configs shrink about tenfold
_TABLES = ("data", "machine", "mesh", "environment", "code", "packages", "programs")


@dataclasses.dataclass(frozen=True)
class Capsule:
    """Contents of a capsule file.

    Attributes:
        about: ingredients by name, as plain values.
        files: texts of the other entries by name.
    """

    about: dict[str, Any]
    files: dict[str, str]


def write(path: Path, capsule: Capsule) -> None:
    """Write a new capsule file atomically.

    Raises:
        UserError: the file exists, or it cannot be written.
    """
    if path.exists():
        raise UserError(f"--capsule {path} exists: name a new file, or remove it first")
    hashes = {name: _hash(text) for name, text in capsule.files.items()}
    about = {"format": FORMAT, **capsule.about, "files": hashes}
    try:
        with (
            safe_files.replacing(path) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            archive.writestr(_ABOUT, json.dumps(about, indent=2, ensure_ascii=False))
            for name, text in capsule.files.items():
                archive.writestr(name, text)
    except OSError as error:
        raise UserError(f"--capsule {path}: {error.strerror}") from error


def read(path: Path) -> Capsule:
    """Read a file that `write` has written.

    Raises:
        UserError: the file is missing, damaged, or has another format version.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"cannot read the capsule {path}: not a file")
        if path.stat().st_size > _SIZE:
            raise UserError(f"{path} is not a capsule: {path.stat().st_size:,} bytes are too many")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the capsule {path}: {error.strerror or error}") from error
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > _UNPACKED + _UNPACKED_PER_BYTE * len(content):
                raise ValueError(f"{len(content):,} bytes would become {unpacked:,}")
            about = load_object(_entry(archive, _ABOUT), _ABOUT)
            format_, hashes = about.pop("format"), about.pop("files")
            if not isinstance(hashes, dict):
                raise ValueError(f"the files of {_ABOUT} are not a table")
            if unknown := [name for name in hashes if not _ENTRY.fullmatch(name)]:
                raise ValueError(f"unknown entry {excerpt(repr(unknown[0]))}")
            files = {name: _entry(archive, name).decode() for name in hashes}
    except ARCHIVE_ERRORS as error:
        raise UserError(
            f"{path} is not a capsule, or is damaged ({excerpt(error)}). Fetch it again"
        ) from error
    if format_ != FORMAT:
        raise UserError(f"{path} has format {excerpt(format_)}; this jaxforge reads {FORMAT}")
    for name, text in files.items():
        if _hash(text) != hashes[name]:
            raise UserError(f"{path}: {name} does not match its hash. Fetch it again")
    if problem := _problem_of(about, files):
        raise UserError(f"{path} is not a valid capsule: {problem}. Make it again from the run")
    return Capsule(about, files)


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read an entry up to a byte more than its declared size, so that longer entries fail."""
    with archive.open(name) as entry:
        return entry.read(archive.getinfo(name).file_size + 1)


def _problem_of(about: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Return the first problem of a capsule's content; empty if there is none."""
    if missing := [name for name in (_CONFIG, CURVE) if name not in files]:
        return f"it has no {missing[0]}"
    for name in _TABLES:
        if not isinstance(about.get(name), dict):
            return f"{_ABOUT} has no table {name}"
    if not all(isinstance(program, dict) for program in about["programs"].values()):
        return f"a program of {_ABOUT} is not a table"
    sizes = about["mesh"]
    if not all(axis in AXES and is_step(size) and size > 0 for axis, size in sizes.items()):
        return f"the mesh of {_ABOUT} is not a size for each axis"
    for number, line in enumerate(files[CURVE].encode().split(b"\n")[:-1], 1):
        value, problem = parse_line(line)
        problem = problem or problem_of(value, LOGGED)
        if problem or LOGGED.keys() - value.keys():
            return f"{CURVE}:{number}: {problem or 'no loss or gradient norm'}"
    return "" if files[CURVE].strip() else f"{CURVE} has no step"


def unpack(capsule: Capsule, run: Path, mesh: Mapping[str, int]) -> None:
    """Write a run directory as `replay` reads it: configs and curve, no checkpoints.

    Args:
        capsule: the capsule.
        run: an existing directory.
        mesh: sizes for axes that the config leaves to the devices.
    """
    for name, text in capsule.files.items():
        path = run / {CURVE: "metrics.jsonl"}.get(name, name)
        path.parent.mkdir(exist_ok=True)
        for axis, size in mesh.items():
            text = text.replace(f"\n{axis} = -1\n", f"\n{axis} = {size}\n")
        path.write_text(text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
