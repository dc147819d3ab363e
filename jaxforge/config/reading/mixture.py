"""Reading of `data.mixture_file` into `data.datasets` and `data.phases`."""

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxforge.cli.suggestions import hint
from jaxforge.config.data import DatasetSource
from jaxforge.config.mixture_file import MixtureFile, MixturePhase
from jaxforge.config.reading import toml, yaml_file
from jaxforge.config.reading.schema import dotted
from jaxforge.config.reading.text import read_text
from jaxforge.errors import UserError
from jaxforge.storage import urls

_KEY = "mixture_file"
_YAML = (".yaml", ".yml")


def tables(file: str, temperature: object) -> dict[str, Any]:
    """Return `datasets` and `phases` of `[data]` from a mixture file.

    Args:
        file: the value of `data.mixture_file`.
        temperature: the value of `data.mix_temperature`.

    Raises:
        UserError: the file cannot be read, or is invalid.
    """
    local = urls.local(os.path.expanduser(file), f"data.{_KEY}", "copy the file to this machine")
    mixture = read(local)
    if temperature != 1 and any(phase.tokens for phase in mixture.phases):
        raise UserError(
            f'data.{_KEY} = "{file}" has phases with tokens, which data.mix_temperature = '
            f"{temperature} would change: set data.mix_temperature to 1, or give weights"
        )
    return mixture.tables()


def read(path: Path) -> MixtureFile:
    """Read a mixture file, TOML or YAML.

    Raises:
        UserError: the file cannot be read, or is invalid.
    """
    text = read_text(path, f"data.{_KEY}")
    is_yaml = path.suffix.lower() in _YAML
    values = yaml_file.parse(text, path) if is_yaml else toml.parse(text, str(path))
    try:
        return MixtureFile.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {each}" for each in _messages(error))) from None


def _messages(error: ValidationError) -> list[str]:
    """Return a message for each problem."""
    messages = []
    for details in error.errors():
        path, kind = details["loc"], details["type"]
        prefix = f"{dotted(path)}: " if path else ""
        if kind == "value_error":
            rules = str(details["ctx"]["error"]).splitlines()
            messages += [f"{prefix}{rule}" for rule in rules]
        elif kind == "extra_forbidden":
            meant = hint(str(path[-1]), _keys(path))
            messages.append(f"unknown key {dotted(path)}{meant}")
        else:
            message = details["msg"]
            messages.append(f"{prefix}{message[:1].lower()}{message[1:]}")
    return list(dict.fromkeys(messages))


def _keys(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table of a path."""
    table = {1: MixtureFile, 3: DatasetSource if path[0] == "datasets" else MixturePhase}
    return list(table.get(len(path), MixtureFile).model_fields)
