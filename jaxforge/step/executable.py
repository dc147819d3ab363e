"""Files of compiled train steps: `plan --save-executable` writes them, `train.executable` reads.

A file is a zip archive of `about.json`, which describes config, devices and package versions, and
JAX's serialization of each step, `<microbatches>.bin`. Loading a file executes its content: trust
it like code.
"""

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.storage import safe_files, urls

_FORMAT = 1
_ABOUT = "about.json"
PACKAGES = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"),
}
_SECTIONS = ("model", "train", "optimizer", "scheduler", "distributed", "data", "metrics")
"""Sections of a config that a step may depend on."""
ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    LookupError,
    ValueError,
    OSError,
)
"""Errors that reading a damaged archive may raise."""


class CompiledStep(NamedTuple):
    """A step for one batch size.

    Attributes:
        lowered: the program before compilation.
        compiled: the compiled program.
    """

    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled


def write(
    path: str | os.PathLike, steps: Mapping[int, CompiledStep], config: JobConfig, mesh: Mesh
) -> None:
    """Write steps to a local file atomically.

    Args:
        path: the file.
        steps: compiled steps by the number of microbatches.
        config: config of the steps, with a resolved `grad_sync`.
        mesh: mesh of the steps; its devices need not exist on this machine.

    Raises:
        OSError: the file cannot be written.
    """
    about = {
        "format": _FORMAT,
        **_requirements(mesh),
        "config": config.model_dump(mode="json"),
        "programs": {str(n): fingerprint(step.lowered) for n, step in steps.items()},
    }
    with (
        safe_files.replacing(Path(path)) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        archive.writestr(_ABOUT, json.dumps(about, indent=2))
        for n, step in steps.items():
            payload, _, _ = serialize_executable.serialize(step.compiled)
            archive.writestr(f"{n}.bin", payload)


class Executable:
    """A file of compiled steps.

    Args:
        path: the file, `train.executable`.
        mesh: mesh that will run the steps.

    Raises:
        UserError: the file cannot be read, or its steps are for other devices or package versions.
    """

    def __init__(self, path: str, mesh: Mesh) -> None:
        self._name, self._devices = f"train.executable = {path}", list(mesh.devices.flat)
        try:
            content = urls.path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{self._name}: {error.strerror or error}") from error
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(content))
            self._about = json.loads(self._archive.read(_ABOUT))
        except ARCHIVE_ERRORS as error:
            raise self._unreadable(error) from error
        for key, value in {"format": _FORMAT, **_requirements(mesh)}.items():
            if (stored := self._about.get(key)) != value:
                raise self._refused(
                    f"it was compiled for {_describe(key, stored)}; this run has "
                    f"{_describe(key, value)}"
                )

    def load(
        self, lowered: Mapping[int, jax.stages.Lowered], config: JobConfig
    ) -> dict[int, jax.stages.Compiled]:
        """Load the steps after comparing them with the programs of this run.

        Args:
            lowered: programs of this run by the number of microbatches.
            config: config of the run, with a resolved `grad_sync`.

        Returns:
            Compiled steps by the number of microbatches.

        Raises:
            UserError: the steps have another config or another version of the code, or the file is
                damaged.
        """
        expected = {str(n): fingerprint(program) for n, program in lowered.items()}
        if self._about["programs"] != expected:
            differences = list(_differences(self._about["config"], config.model_dump(mode="json")))
            raise self._refused("; ".join(differences) or "another version of the code compiled it")
        return {n: self._load(n, program) for n, program in lowered.items()}

    def _load(self, n: int, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        try:
            payload = self._archive.read(f"{n}.bin")
        except ARCHIVE_ERRORS as error:
            raise self._unreadable(error) from error
        tree = jax.tree.structure(lowered.args_info)
        try:
            return serialize_executable.deserialize_and_load(
                payload, tree, lowered.out_tree, execution_devices=self._devices
            )
        except jax.errors.JaxRuntimeError as error:
            raise self._refused(f"the devices cannot load it ({error})") from error

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(f"{self._name}: not a file of compiled steps, or damaged ({error})")

    def _refused(self, reason: str) -> UserError:
        return UserError(
            f"{self._name} is not the step of this run: {reason}. Compile it again "
            "(jaxforge plan --save-executable), or remove the key to compile at the start"
        )


def _requirements(mesh: Mesh) -> dict[str, Any]:
    """Return the requirements of a compiled step: package versions, and devices in mesh order."""
    devices: list[jax.Device] = list(mesh.devices.flat)
    packages = PACKAGES.get(devices[0].platform, ("jax", "jaxlib"))
    return {
        "versions": {name: version for name in packages if (version := installed_version(name))},
        "devices": sorted({device.device_kind for device in devices}),
        "ids": [device.id for device in devices],
    }


def installed_version(package: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _describe(key: str, value: object) -> str:
    """Describe a requirement in a message."""
    if key == "versions" and isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if key == "ids" and isinstance(value, list):
        return f"{len(value)} devices, {', '.join(map(str, value[:4]))} …"
    return f"{key} {value}"


def fingerprint(lowered: jax.stages.Lowered) -> str:
    """Return the sha256 (hex) of a program before compilation."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for section in _SECTIONS:
        before = old.get(section, {})
        for key, value in new[section].items():
            if key != "executable" and before.get(key) != value:
                stored = json.dumps(before.get(key))
                yield f"{section}.{key} was {stored} and is {json.dumps(value)}"
