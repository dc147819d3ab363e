"""The file of a capsule: a zip archive.

capsule.json        the ingredients, and a hash of each other entry
config.toml         the run's resolved config, as of its latest start
configs/            those of all its starts, by the step that each went on from
curve.jsonl         step, loss and gradient norm, of each logged step
packages.txt        all that was installed, as a lock
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

from jaxforge import safe_files
from jaxforge.errors import UserError
from jaxforge.step.executable import TORN

FORMAT = 1
CURVE = "curve.jsonl"
_ENTRY = re.compile(r"config\.toml|configs/from_step_\d+\.toml|curve\.jsonl|packages\.txt")
_ABOUT = "capsule.json"


@dataclasses.dataclass(frozen=True)
class Capsule:
    """What is in the file.

    Attributes:
        about: the ingredients, by name: plain values.
        files: the other entries, by name.
    """

    about: dict[str, Any]
    files: dict[str, str]


def write(path: Path, capsule: Capsule) -> None:
    """Makes a new file; all of it or nothing.

    Raises:
        UserError: there is one, or it cannot be written.
    """
    if path.exists():
        raise UserError(f"--output {path} exists: name a new file, or remove it first")
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
        raise UserError(f"--output {path}: {error.strerror}") from error


def read(path: Path) -> Capsule:
    """Reads a file that `write` made.

    Raises:
        UserError: it is not there, torn, or of another version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the capsule {path}: {error.strerror or error}") from error
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            about = json.loads(archive.read(_ABOUT))
            format_, hashes = about.pop("format"), about.pop("files")
            if strange := [name for name in hashes if not _ENTRY.fullmatch(name)]:
                raise ValueError(f"it has {strange[0]!r}")
            files = {name: archive.read(name).decode() for name in hashes}
    except TORN as error:
        raise UserError(f"{path} is no capsule, or torn ({error}): fetch it again") from error
    if format_ != FORMAT:
        raise UserError(f"{path} is of format {format_}, and this jaxforge reads {FORMAT}")
    for name, text in files.items():
        if _hash(text) != hashes[name]:
            raise UserError(f"{path}: {name} is not what was written: fetch it again")
    return Capsule(about, files)


def unpack(capsule: Capsule, run: Path, mesh: Mapping[str, int]) -> None:
    """Lays out a run directory as `replay` reads it: configs and curve, no checkpoints.

    Args:
        capsule: what to lay out.
        run: the directory, which is there.
        mesh: axes that the config leaves to the devices, which may be others here.
    """
    for name, text in capsule.files.items():
        place = run / {CURVE: "metrics.jsonl"}.get(name, name)
        place.parent.mkdir(exist_ok=True)
        for axis, size in mesh.items():
            text = text.replace(f"\n{axis} = -1\n", f"\n{axis} = {size}\n")
        place.write_text(text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
