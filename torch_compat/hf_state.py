"""Hugging Face checkpoints: weights alone, with the config that says what they are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.data.tokenizer import load_tokenizer
from jaxforge.errors import UserError
from torch_compat import safetensors
from torch_compat.dcp_state import Options
from torch_compat.files import Directory
from torch_compat.hf_config import CONFIG, config_json, family_of, model_table
from torch_compat.lazy import DTYPES, Lazy
from torch_compat.names import DIALECTS
from torch_compat.names.huggingface import FAMILIES
from torch_compat.staging import Unit
from torch_compat.state import Held, Wanted
from torch_compat.translation import Translation, translate

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")  # fmt: skip


def is_hf(directory: Directory) -> bool:
    """Whether it holds a `config.json` and weights."""
    names = directory.names()
    weights = any(name.endswith(safetensors.SUFFIX) for name in names)
    return CONFIG in names and (weights or safetensors.INDEX in names)


def read_config(directory: Directory) -> tuple[dict[str, Any], str]:
    """The `[model]` table of a checkpoint, and its family.

    Raises:
        UserError: the config cannot be read, or is of a model that jaxforge does not have.
    """
    where = f"{directory}/{CONFIG}"
    try:
        config = json.loads(directory.read(CONFIG))
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    return model_table(config, where), config["model_type"]


def read(directory: Directory, wanted: Wanted, options: Options) -> Held:
    """The weights.

    Raises:
        UserError: they are not those of the model.
    """
    _, family = read_config(directory)
    dialect = DIALECTS[options.dialect] if options.dialect else FAMILIES[family]
    tensors = safetensors.open_directory(directory)
    into = Translation(dialect, wanted.config.model, options.resize_vocab, str(directory))
    return Held(translate(tensors, wanted.params, into), dialect=dialect.name)


def units(
    held: Held,
    config: JobConfig,
    directory: Path,
    *,
    dialect: str | None,
    dtype: str | None,
    largest: int,
    block: int,
    tokenizer: Path | None,
) -> list[Unit]:
    """What makes a directory that `AutoModelForCausalLM.from_pretrained` opens.

    Args:
        held: the weights.
        config: the run's config.
        directory: where the files go.
        dialect: a family by its dialect's name; None takes the one that the model is of.
        dtype: torch's name of the dtype to write; None keeps it.
        largest: bytes of a file at most, if one tensor does not have more.
        block: bytes that may be in memory at a time.
        tokenizer: the run's tokenizer.

    Raises:
        UserError: no family has what the model has.
    """
    family = family_of(config.model)
    table = FAMILIES[family] if dialect is None else DIALECTS[dialect]
    tensors = _cast(table.to_theirs(held.params, config.model), dtype)
    family = next(name for name, of in FAMILIES.items() if of is table)
    made, index = safetensors.units(tensors, directory, largest, block)
    written = dtype or _one_dtype(tensors)
    eos_id = _eos_id(tokenizer)
    documents = {
        CONFIG: config_json(config, family, written, eos_id),
        "generation_config.json": {"eos_token_id": eos_id, "do_sample": True},
    }
    if index is not None:
        documents[safetensors.INDEX] = index
    return [*made, Unit("documents", 0, lambda: _write_documents(documents, directory, tokenizer))]


def _write_documents(documents: Mapping[str, Any], directory: Path, tokenizer: Path | None) -> None:
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=2) + "\n")
    if tokenizer is None or not _is_huggingface(tokenizer):
        return
    for name in _TOKENIZER:
        if (tokenizer / name).is_file():
            (directory / name).write_bytes((tokenizer / name).read_bytes())
    settings = directory / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **known}) + "\n")


def _is_huggingface(tokenizer: Path) -> bool:
    file = tokenizer / "tokenizer.json"
    return file.is_file() and "model" in json.loads(file.read_text())


def _eos_id(tokenizer: Path | None) -> int | None:
    if tokenizer is None:
        return None
    return load_tokenizer(tokenizer).eos_id


def _cast(tensors: Mapping[str, Lazy], dtype: str | None) -> dict[str, Lazy]:
    if dtype is None:
        return dict(tensors)
    return {name: tensor.cast(DTYPES[dtype]) for name, tensor in tensors.items()}


def _one_dtype(tensors: Mapping[str, Lazy]) -> str:
    return max((np.dtype(t.dtype).name for t in tensors.values()), key=len, default="float32")
