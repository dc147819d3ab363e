"""Files of tokenizers in Hugging Face checkpoints: copies for runs, and for exports of runs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import load_object
from torch_compat.checkpoint.hf_config import CONFIG
from torch_compat.families import FAMILIES
from torch_compat.formats.files import Directory

_SETTINGS = "tokenizer_config.json"
FILES = ("tokenizer.json", _SETTINGS, "special_tokens_map.json",
         "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")  # fmt: skip
"""Files of a tokenizer, next to `TEMPLATES`."""
TEMPLATES = "additional_chat_templates"
"""Directory of the chat templates that have names, such as `tool_use.jinja`."""
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer"
"""Directory of a run that holds its tokenizer."""


def copy_tokenizer(directory: Directory, target: Path) -> None:
    """Copy the tokenizer of a checkpoint; do nothing if it has no `tokenizer.json`.

    Args:
        directory: the checkpoint.
        target: directory to create. An existing one is left unchanged.
    """
    # The rename below is the last step: an existing directory is complete.
    if target.exists() or not directory.has(FILES[0]):
        return
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    templates = [f"{TEMPLATES}/{name}" for name in template_names(directory)]
    for name in (*FILES, *templates, CONFIG, GENERATION):  # EOS may be only in the last two
        if name in templates or directory.has(name):
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(directory.read(name))
    partial.rename(target)


def template_names(directory: Directory) -> list[str]:
    """Return the names of the files in `TEMPLATES` of a checkpoint."""
    return [name for name in (directory / TEMPLATES).names() if name.endswith(".jinja")]


def exported_files(tokenizer: Path) -> dict[str, bytes]:
    """Return the files of a run's tokenizer for an export: name -> content.

    Raises:
        UserError: a file is damaged.
    """
    if not _is_huggingface(tokenizer):
        return {}
    named = (tokenizer / TEMPLATES).iterdir() if (tokenizer / TEMPLATES).is_dir() else ()
    paths = {name: tokenizer / name for name in FILES}
    paths |= {f"{TEMPLATES}/{path.name}": path for path in named}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    # The settings may lack a class, by which AutoTokenizer opens the files.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_settings(tokenizer)}
    return files | {_SETTINGS: to_json(settings)}


def to_json(document: Mapping[str, Any]) -> bytes:
    """Return a document as transformers writes its files of JSON."""
    return (json.dumps(document, indent=2) + "\n").encode()


def notes(dialect: str, tokenizer: Path | None) -> Iterator[str]:
    """Yield notes for the user of an export.

    Args:
        dialect: dialect of the exported family.
        tokenizer: tokenizer of the run.
    """
    if (
        dialect != FAMILIES["qwen2"].dialect.name
        or tokenizer is None
        or not _is_huggingface(tokenizer)
    ):
        return
    if not _settings(tokenizer).get("tokenizer_class", "").startswith("Qwen2Tokenizer"):
        yield (
            "transformers' AutoTokenizer splits the text of every qwen2 model with the rules of "
            "Qwen2: open this tokenizer with PreTrainedTokenizerFast.from_pretrained"
        )


def vocabulary_notes(tokenizer: Path | None, vocab_size: int) -> Iterator[str]:
    """Yield a note if a tokenizer is unusable, or has ids beyond a model of `vocab_size` tokens."""
    if tokenizer is None:
        return
    from jaxforge.data.corpus.tokenizer_files import load_tokenizer  # slow

    try:
        loaded = load_tokenizer(tokenizer)
    except UserError as error:
        yield f"generate and prepare will refuse the tokenizer: {error}"
        return
    if (last := loaded.vocab_size - 1) >= vocab_size:
        text = loaded.decode([last], special_tokens=True)
        yield (
            f"the tokenizer has ids up to {last} ({text!r}), and the model only {vocab_size} "
            "tokens: prompts and data with further tokens are refused"
        )


def eos_ids(tokenizer: Path | None) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text; empty without a tokenizer."""
    if tokenizer is None:
        return ()
    from jaxforge.data.corpus.tokenizer_files import load_tokenizer  # slow; most runs name none

    return load_tokenizer(tokenizer).eos_ids


def _settings(tokenizer: Path) -> dict[str, Any]:
    file = tokenizer / _SETTINGS
    return load_object(file.read_bytes(), str(file)) if file.exists() else {}


def _is_huggingface(tokenizer: Path) -> bool:
    file = tokenizer / "tokenizer.json"
    return file.is_file() and "model" in load_object(file.read_bytes(), str(file))
