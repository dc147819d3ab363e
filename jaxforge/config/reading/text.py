"""Reading of config files as text."""

import codecs
from pathlib import Path

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.reading import toml
from jaxforge.errors import UserError


def read_text(path: Path, key: str = "") -> str:
    """Return the text of a config file, up to slightly more than the largest valid config.

    Args:
        path: the file.
        key: key that names the file, for messages; "" for the config itself.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    about = f"{key}: no file" if key else "no config file"
    try:
        with path.open("rb") as file:
            content = file.read(4 * toml.SIZE + 1)  # at most 4 bytes per character
        # Windows editors write a BOM and CRLF.
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise UserError(f"{about} at {path}{path_hint(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{about} at {path}: it is a directory") from None
    except UnicodeDecodeError as error:
        format_ = "YAML" if path.suffix.lower() in (".yaml", ".yml") else "TOML"
        raise UserError(f"{path}: not valid {format_}: {_encoding_problem(error)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _encoding_problem(error: UnicodeDecodeError) -> str:
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
    return f"not UTF-8 at byte {error.start}"
