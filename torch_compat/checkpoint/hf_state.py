"""Hugging Face checkpoints: weights alone, with the config that says what they are."""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.load import make_config
from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import load_object
from torch_compat.checkpoint import untrained
from torch_compat.checkpoint.dcp_state import Options
from torch_compat.checkpoint.hf_config import (
    CONFIG,
    DEQUANTIZED,
    config_json,
    eos_token_id,
    further_layers,
    model_table,
)
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.checkpoint.validation import UNSEEN, matters
from torch_compat.families import FAMILIES
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory, sync
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.staging import Unit
from torch_compat.names.table import EMBEDDING, NameMap, strip_wrappers
from torch_compat.names.translation import Translation, summarize_names

_SETTINGS = "tokenizer_config.json"
_TOKENIZER = ("tokenizer.json", _SETTINGS, "special_tokens_map.json",
              "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")  # fmt: skip
_GENERATION = "generation_config.json"
TOKENIZER = "tokenizer"
"""Directory of a run that holds its tokenizer."""
IMPORTED = "huggingface"
"""Directory of a run that holds the JSON files of the Hugging Face model that it began with."""
_MXFP4 = ("_blocks", "_scales")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def is_hf(directory: Directory) -> bool:
    """Return whether a directory holds a `config.json` and weights."""
    names = directory.names()
    weights = any(name.endswith(safetensors.SUFFIX) for name in names)
    return CONFIG in names and (weights or safetensors.INDEX in names)


def is_read(name: str) -> bool:
    """Return whether an import reads a file of this name."""
    documents = (*_TOKENIZER, CONFIG, _GENERATION, safetensors.INDEX)
    return name.endswith(safetensors.SUFFIX) or name in documents


def read_config(directory: Directory) -> tuple[dict[str, Any], str]:
    """The `[model]` table of a checkpoint, and its family.

    Raises:
        UserError: the config cannot be read, or is of a model that jaxforge does not have.
    """
    config = _config(directory)
    return model_table(config, f"{directory}/{CONFIG}"), config["model_type"]


def read(directory: Directory, target: AbstractTarget, options: Options) -> CheckpointState:
    """The weights.

    Raises:
        UserError: they are not those of the model.
    """
    config, model = _config(directory), target.config.model
    differences = tuple(_differences(config, model, f"{directory}/{CONFIG}"))
    dialect = (
        name_map(options.dialect) if options.dialect else FAMILIES[config["model_type"]].dialect
    )
    contents = safetensors.open_directory(directory)
    if quantized := [key for key in contents if key.endswith(_MXFP4)]:
        raise UserError(f"{directory}: {summarize_names(quantized)} are in MXFP4: {DEQUANTIZED}")
    tensors = _by_name(contents, dialect, str(directory))
    tensors, left_out = _of_model(tensors, further_layers(config, f"{directory}/{CONFIG}"))
    into = Translation(dialect, model, options.resize_vocab, str(directory))
    params, target_files, more = untrained.translate_model(tensors, target, into, goes_on=False)
    return CheckpointState(
        params,
        dialect=dialect.name,
        notes=(*differences, *left_out, *more),
        model_state=target_files,
    )


def copy_tokenizer(directory: Directory, target: Path) -> None:
    """The tokenizer of a checkpoint, as runs keep theirs; nothing if it has no `tokenizer.json`.

    Args:
        directory: the checkpoint.
        target: the directory to make; one that is there stays as it is.
    """
    if target.exists() or not directory.has(_TOKENIZER[0]):
        return
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name in (*_TOKENIZER, CONFIG, _GENERATION):  # the last two may be all that names EOS
        if directory.has(name):
            (partial / name).write_bytes(directory.read(name))
    partial.rename(target)


class Imported(NamedTuple):
    """The JSON files of a Hugging Face model that a run was imported from.

    Attributes:
        config: `config.json`.
        generation: `generation_config.json`; None without one.
    """

    config: dict[str, Any]
    generation: dict[str, Any] | None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids at which transformers ends a text."""
        ids = (self.generation or self.config).get("eos_token_id")
        return tuple(n for n in (ids if isinstance(ids, list) else [ids]) if type(n) is int)


def keep_documents(directory: Directory, target: Path) -> None:
    """Copy `config.json` and `generation_config.json` of a checkpoint, for exports of the run.

    Args:
        directory: the checkpoint.
        target: the run directory.
    """
    target_files = target / IMPORTED
    target_files.mkdir(exist_ok=True)
    for name in (CONFIG, _GENERATION):
        if directory.has(name):
            (target_files / name).write_bytes(directory.read(name))


def imported(run: Path) -> Imported | None:
    """Return what `keep_documents` kept in a run directory; None for a run that is no import.

    Raises:
        UserError: a file is not a JSON object.
    """
    config, generation = (run / IMPORTED / name for name in (CONFIG, _GENERATION))
    if not config.is_file():
        return None
    contents = (
        load_object(generation.read_bytes(), str(generation)) if generation.is_file() else None
    )
    return Imported(load_object(config.read_bytes(), str(config)), contents)


def documents(directory: Directory) -> Imported:
    """Return the JSON files of a checkpoint.

    Raises:
        UserError: a file is not a JSON object.
    """
    where = f"{directory}/{_GENERATION}"
    has_generation = directory.has(_GENERATION)
    generation = load_object(directory.read(_GENERATION), where) if has_generation else None
    return Imported(_config(directory), generation)


def notes(dialect: str, tokenizer: Path | None) -> Iterator[str]:
    """Yield notes for the user of an export.

    Args:
        dialect: the name of its family's dialect.
        tokenizer: the run's tokenizer.
    """
    if (
        dialect != FAMILIES["qwen2"].dialect.name
        or tokenizer is None
        or not _is_huggingface(tokenizer)
    ):
        return
    if not _settings(tokenizer).get("tokenizer_class", "").startswith("Qwen2Tokenizer"):
        yield (
            "transformers' AutoTokenizer splits the text of every qwen2 model as Qwen2's own "
            "tokenizer does: open this one by PreTrainedTokenizerFast.from_pretrained"
        )


def units(
    checkpoint: CheckpointState,
    config: JobConfig,
    directory: Path,
    *,
    family: str,
    largest: int,
    block: int,
    tokenizer: Path | None,
    before: Imported | None = None,
) -> list[Unit]:
    """Return the units of work that make a directory for `AutoModelForCausalLM.from_pretrained`.

    Args:
        checkpoint: the weights.
        config: the run's config.
        directory: where the files go.
        family: a key of `FAMILIES`, which has all that the model has.
        largest: bytes of a file at most, if one tensor does not have more.
        block: bytes that may be in memory at a time.
        tokenizer: the run's tokenizer.
        before: what the run was imported with.
    """
    of_family = FAMILIES[family].dialect
    tensors = of_family.to_dialect(checkpoint.variables, config.model)
    weights = of_family.to_dialect(checkpoint.params, config.model)
    result, index = safetensors.units(tensors, directory, largest, block)
    documents = _documents(config, family, _one_dtype(weights), tokenizer, before)
    if index is not None:
        documents[safetensors.INDEX] = index
    return [
        *result,
        Unit("documents", 0, lambda: _write_documents(documents, directory, tokenizer)),
    ]


def _documents(
    config: JobConfig, family: str, dtype: str, tokenizer: Path | None, before: Imported | None
) -> dict[str, Any]:
    """`config.json` and `generation_config.json`: of an import with the run's tokens, its own."""
    eos_ids = _eos_ids(tokenizer)
    if before is None or not (tokenizer is None or set(before.eos_ids) <= set(eos_ids)):
        return {
            CONFIG: config_json(config, family, dtype, eos_ids),
            _GENERATION: {"eos_token_id": eos_token_id(eos_ids), "do_sample": True},
        }
    result = config_json(config, family, dtype, eos_ids, before.config)
    generation = {} if before.generation is None else {_GENERATION: before.generation}
    return {CONFIG: result, **generation}


def _config(directory: Directory) -> dict[str, Any]:
    return load_object(directory.read(CONFIG), f"{directory}/{CONFIG}")


def _by_name(
    contents: Mapping[str, LazyTensor], dialect: NameMap, where: str
) -> dict[str, LazyTensor]:
    """Tensors by the dialect's names: without wrappers, with the base class's prefix.

    `LlamaModel` and other base classes save their tensors without "model.".

    Raises:
        UserError: two keys are one parameter's.
    """
    base = dialect.key_for(EMBEDDING).partition(".")[0]
    tensors: dict[str, LazyTensor] = {}
    for key, tensor in contents.items():
        name = dialect.current_key(strip_wrappers(key))
        if not dialect.knows(name) and dialect.knows(f"{base}.{name}"):
            name = f"{base}.{name}"
        if name in tensors:
            raise UserError(f"{where}: {key} and another key are both {name}")
        tensors[name] = tensor
    return tensors


def _of_model(
    tensors: dict[str, LazyTensor], further: range
) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors without those of further layers, and what to say of them."""
    spare = {
        key for key in tensors
        if further and (match := _LAYER.match(key)) and int(match[1]) in further
    }  # fmt: skip
    if not spare:
        return tensors, []
    target_files = {key: tensor for key, tensor in tensors.items() if key not in spare}
    return target_files, [
        f"left out: {len(spare)} tensors of layers from {further.start} on, which predict further "
        "tokens and are no part of the model here"
    ]


def _differences(config: Mapping[str, Any], model: ModelConfig, where: str) -> Iterator[str]:
    theirs = make_config({"model": model_table(config, where)}, source=where).model
    for key in UNSEEN:
        if matters(key, model) and getattr(theirs, key) != getattr(model, key):
            yield (
                f"{CONFIG} has {key} = {getattr(theirs, key)} and [model] {getattr(model, key)}: "
                "the weights were trained with the former"
            )
    if theirs.windows != model.windows:
        yield (
            f"{CONFIG} has layers that see {_span(theirs.windows)} tokens and [model] "
            f"{_span(model.windows)}: the weights were trained with the former"
        )


def _span(windows: Sequence[int | None]) -> str:
    return " or ".join(str(w or "all") for w in dict.fromkeys(windows))


def _write_documents(documents: Mapping[str, Any], directory: Path, tokenizer: Path | None) -> None:
    files = {name: _json(document) for name, document in documents.items()}
    if tokenizer is not None and _is_huggingface(tokenizer):
        contents = (tokenizer / name for name in _TOKENIZER)
        files |= {path.name: path.read_bytes() for path in contents if path.is_file()}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_settings(tokenizer)}
        files[_SETTINGS] = _json(settings)
    for name, content in files.items():
        (directory / name).write_bytes(content)
        sync(directory / name)


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _settings(tokenizer: Path) -> dict[str, Any]:
    file = tokenizer / _SETTINGS
    return load_object(file.read_bytes(), str(file)) if file.exists() else {}


def _is_huggingface(tokenizer: Path) -> bool:
    file = tokenizer / "tokenizer.json"
    return file.is_file() and "model" in load_object(file.read_bytes(), str(file))


def _eos_ids(tokenizer: Path | None) -> tuple[int, ...]:
    if tokenizer is None:
        return ()
    from jaxforge.data.corpus.tokenizer import load_tokenizer  # here, for most runs name none

    return load_tokenizer(tokenizer).eos_ids


def _one_dtype(tensors: Mapping[str, LazyTensor]) -> str:
    """One that holds all of them: transformers reads everything in the dtype that is named."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1:
        return dtypes.pop().name
    from jax.numpy import promote_types  # NumPy has no answer for float16 and bfloat16

    return functools.reduce(promote_types, dtypes).name
