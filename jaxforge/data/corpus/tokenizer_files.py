"""Loading of tokenizers: from a `tokenizer.json` and the files next to it, or from the Hub."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxforge.data.corpus.tokenizer import (
    ADD_BOS,
    ADJACENT_FILES,
    BYTE_FILE,
    FILE_NAME,
    TEMPLATE,
    TEMPLATE_DIRECTORY,
    TOOL_USE,
    ByteTokenizer,
    HFTokenizer,
    Tokenizer,
)
from jaxforge.errors import UserError, quoted
from jaxforge.storage import urls
from jaxforge.storage.safe_files import read_regular

if TYPE_CHECKING:  # importing it takes longer than all else that a worker of `prepare` imports
    from jaxforge.config.data import DataConfig

_MOST_BYTES = 1 << 28  # of a file; those of 256,000 tokens have about 30 MB
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def tokenizer_of(config: "DataConfig") -> str | Path | None:
    """Return `data.tokenizer_path`, else the tokenizer stored with the shards."""
    if config.tokenizer_path:
        return config.tokenizer_path
    shards = [source.path for source in config.datasets] or [config.dataset_path]
    # `prepare` writes DIR/tokenizer next to DIR/train and DIR/validation.
    beside = [urls.path(path).parent / "tokenizer" for path in shards if path]
    return next((directory for directory in beside if directory.is_dir()), None)


def load_tokenizer(spec: str | Path, *, is_checked: bool = False) -> Tokenizer:
    """Load a tokenizer from this machine or from the Hugging Face Hub.

    Args:
        spec: "byte", a `tokenizer.json`, its directory, or else a model of the Hub, from cache or
            network. EOS comes from the first of tokenizer_config.json, special_tokens_map.json,
            config.json and generation_config.json next to `tokenizer.json`. Generation also ends
            at every id in generation_config.json, or else config.json. BOS is put before texts by
            the post-processor of `tokenizer.json` or "add_bos_token" of tokenizer_config.json.
            Chat templates are those in chat_template.jinja and additional_chat_templates/, or else
            those of tokenizer_config.json.
        is_checked: see `HFTokenizer`.

    Raises:
        UserError: the file or model does not exist, or is not a tokenizer.
    """
    if spec == "byte":
        return ByteTokenizer()
    path = urls.path(spec, "tokenizer")
    # A local path wins over a model of that name, and a misspelled file is not a download.
    if _HUB_NAME.fullmatch(str(spec)) and path.suffix != ".json" and not path.exists():
        path = _download(str(spec))
    path = path / FILE_NAME if path.is_dir() else path
    try:
        file = read_regular(path, _MOST_BYTES)
    except OSError as error:
        advice = f'give "byte", a {FILE_NAME}, the directory of one, or a model of the Hub'
        if (path.parent / "tokenizer.model").exists():
            advice = f"tokenizer.model (SentencePiece) must be converted to {FILE_NAME} first"
        message = f"no tokenizer at {str(spec)!r}: {quoted(path)}: {error.strerror}; {advice}"
        raise UserError(message) from error
    if file == BYTE_FILE:
        return ByteTokenizer()
    try:
        eos, bos = _adjacent_eos(path.parent), _adjacent_token(path.parent, "bos_token")
        add_bos = _json(path.parent / ADJACENT_FILES[0]).get(ADD_BOS) is True
        # As transformers ends a text.
        eos_ids = _eos_ids_in(path.parent / ADJACENT_FILES[3])
        eos_ids = eos_ids or _eos_ids_in(path.parent / ADJACENT_FILES[2])
        chat = _adjacent_chat(path.parent)
        return HFTokenizer(file, eos, chat, bos, eos_ids, add_bos=add_bos, is_checked=is_checked)
    except ValueError as error:
        raise UserError(f"cannot use {path}: {error}") from error


def _download(name: str) -> Path:
    """Return the directory of a model's tokenizer in the Hub's cache; fetch it if it is missing."""
    from huggingface_hub import constants, errors, snapshot_download

    files = [FILE_NAME, TEMPLATE, f"{TEMPLATE_DIRECTORY}/*.jinja", *ADJACENT_FILES]
    try:
        # Only the files of the tokenizer: the weights of a model take gigabytes.
        return Path(snapshot_download(name, allow_patterns=files))
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = (
            f"cannot be reached, nor is it in its cache, {constants.HF_HUB_CACHE}; where there is "
            f"a network, `hf download {name} {FILE_NAME} {ADJACENT_FILES[0]} --local-dir DIR` "
            "gives a directory to copy here and to name instead"
        )
    except errors.RepositoryNotFoundError:
        why = "has no such model, or wants you to log in (`hf auth login`) and accept its terms"
    except (OSError, ValueError) as error:
        why = f"does not give it ({str(error).splitlines()[0]})"
    raise UserError(
        f"no tokenizer at {name!r}: no such file or directory, and the Hugging Face Hub {why}; "
        f'give "byte", a {FILE_NAME}, the directory of one, or a model of the Hub'
    )


def _adjacent_eos(directory: Path) -> str | int | None:
    """Return the EOS token or id that the files next to a `tokenizer.json` name."""
    if (token := _adjacent_token(directory, "eos_token")) is not None:
        return token
    for name in ADJACENT_FILES[2:]:
        if ids := _eos_ids_in(directory / name):
            return ids[0]
    return None


def _eos_ids_in(path: Path) -> list[int]:
    config = _json(path)
    text = config.get("text_config")  # of a model with images or sound
    nested = text.get("eos_token_id") if isinstance(text, dict) else None
    ids = config.get("eos_token_id", nested)
    listed = ids if isinstance(ids, list) else [ids]
    # `type` and not `isinstance`: JSON's true is an int in Python.
    return [id_ for id_ in listed if type(id_) is int and 0 <= id_ < 2**31]


def _adjacent_token(directory: Path, key: str) -> str | None:
    """Return a special token by its key in the files next to a `tokenizer.json`."""
    for name in ADJACENT_FILES[:2]:
        token = _json(directory / name).get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _adjacent_chat(directory: Path) -> dict[str, str]:
    """Return `Tokenizer.chat` from the files next to a `tokenizer.json`."""
    # The right operand wins: tokenizer_config.json before special_tokens_map.json.
    settings = _json(directory / ADJACENT_FILES[1]) | _json(directory / ADJACENT_FILES[0])
    templates = _template_files(directory) or _named(settings.get("chat_template"), directory)
    default = templates.get("default")
    if not isinstance(default, str):
        return {}
    tokens = {name: token.get("content") if isinstance(token, dict) else token
              for name, token in settings.items() if name.endswith("_token")}  # fmt: skip
    texts = {name: token for name, token in tokens.items() if isinstance(token, str)}
    tool_use = templates.get(TOOL_USE)
    more = {TOOL_USE: tool_use} if isinstance(tool_use, str) else {}
    return {**texts, "chat_template": default, **more}


def _template_files(directory: Path) -> dict[str, str]:
    """Return the chat templates in files of their own, by name, as transformers writes them."""
    paths = {path.stem: path for path in sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    if (directory / TEMPLATE).exists():
        paths["default"] = directory / TEMPLATE
    return {name: _read(path).decode() for name, path in paths.items()}


def _named(template: object, directory: Path) -> dict[str, object]:
    """Return the chat templates of a tokenizer_config.json by name."""
    if not isinstance(template, list):
        return template if isinstance(template, dict) else {"default": template}
    if not all(isinstance(named, dict) and named.get("name") for named in template):
        raise UserError(
            f"cannot use {directory}: chat_template of {ADJACENT_FILES[0]} must be a text, or "
            'a list of objects with "name" and "template"'
        )
    return {str(named["name"]): named.get("template") for named in template}


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; return {} if the file does not exist."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}
