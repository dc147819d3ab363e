"""Reader of Hugging Face checkpoints: weights, config and documents (`convert.to_hf` writes)."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.load import make_config
from jaxforge.config.section import Invisible
from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import load_object
from torch_compat.checkpoint import hf_tokenizer, multimodal, originals, untrained
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.hf_config import (
    CONFIG,
    DEQUANTIZED,
    block_of_scales,
    further_layers,
    model_table,
)
from torch_compat.checkpoint.hf_tokenizer import GENERATION
from torch_compat.checkpoint.model_keys import shared_prefixes
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.checkpoint.originals import RECORD, Original
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.checkpoint.validation import invisible_differences
from torch_compat.families import FAMILIES
from torch_compat.formats import block_scaled, safetensors, torch_file
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor, equal
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, strip_wrappers
from torch_compat.names.translation import Translation, summarize_names

DOCUMENTS = (CONFIG, GENERATION)
"""JSON files of a checkpoint that a run keeps, for its exports."""
IMPORTED = "huggingface"
"""Directory of a run that holds the JSON files of the Hugging Face model that it began with."""
IN_8_BITS = "fp8"
"""Value of `--dtype`: matrices of layers in e4m3 with a scale per block, all else in bfloat16."""
_MXFP4 = ("_blocks", "_scales")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def is_hf(directory: Directory) -> bool:
    """Return whether a directory holds `config.json` and weights."""
    names = directory.names()
    weights = any(name.endswith(safetensors.SUFFIX) for name in names)
    indexed = {safetensors.INDEX, torch_file.WEIGHTS, torch_file.WEIGHTS_INDEX} & set(names)
    return CONFIG in names and bool(weights or indexed)


def tensors(directory: Directory) -> Mapping[str, LazyTensor]:
    """Return the tensors of a checkpoint by its keys: safetensors, or else `pytorch_model.bin`.

    Raises:
        UserError: a file is damaged.
    """
    names = directory.names()
    if safetensors.INDEX in names or any(name.endswith(safetensors.SUFFIX) for name in names):
        return safetensors.open_directory(directory)
    return torch_file.open_weights(directory)


def is_read(name: str) -> bool:
    """Return whether an import reads a file of this name."""
    documents = (
        *hf_tokenizer.FILES,
        CONFIG,
        GENERATION,
        safetensors.INDEX,
        torch_file.WEIGHTS_INDEX,
        *originals.PROCESSORS,
    )
    return name.endswith((safetensors.SUFFIX, ".bin")) or name in documents


def read_config(directory: Directory) -> tuple[dict[str, Any], str]:
    """Return the `[model]` table of a checkpoint, and its family.

    Raises:
        UserError: the config cannot be read, or jaxforge does not support the model.
    """
    config = _config(directory)
    return model_table(config, f"{directory}/{CONFIG}"), config["model_type"]


def read(directory: Directory, target: AbstractTarget, options: ReadOptions) -> CheckpointState:
    """Read the weights.

    Raises:
        UserError: the weights are of another model.
    """
    original, model = open_original(directory), target.config.model
    config = _config(directory) if original is None else original.text
    differences = tuple(_differences(config, model, f"{directory}/{CONFIG}"))
    contents: Mapping[str, LazyTensor]
    if original is None:
        contents, left_aside = tensors(directory), []
        dialect = FAMILIES[config["model_type"]].dialect
    else:
        contents, left_aside = original.parts.text, original.notes()
        dialect = original.parts.dialect
    dialect = name_map(options.dialect) if options.dialect else dialect
    if quantized := [key for key in contents if key.endswith(_MXFP4)]:
        raise UserError(f"{directory}: {summarize_names(quantized)} are in MXFP4: {DEQUANTIZED}")
    if (block := block_of_scales(config, f"{directory}/{CONFIG}")) is not None:
        contents = block_scaled.dequantize(contents, block, str(directory))
    dialect = dialect.of_model(model)
    by_name = _rename_to_dialect(contents, dialect, str(directory))
    further = further_layers(config, f"{directory}/{CONFIG}")
    if len(further) < model.mtp_depth:
        raise UserError(
            f"{directory}: model.mtp_depth = {model.mtp_depth}, but the files have {len(further)} "
            f"layers that predict further tokens. Set model.mtp_depth to at most {len(further)}"
        )
    # Layers that predict further tokens follow the model's own layers, and embed the token again:
    # those that the config leaves out go first, then the copies of embedding and head in the
    # others.
    by_name, left_out = _drop_layers(by_name, further[model.mtp_depth :])
    by_name = _drop_shared(by_name, further[: model.mtp_depth], dialect, model, str(directory))
    into = Translation(dialect, model, options.resize_vocab, str(directory), options.is_compared)
    params, model_state, more = untrained.translate_model(by_name, target, into, goes_on=False)
    return CheckpointState(
        params,
        dialect=dialect.name,
        notes=(*left_aside, *differences, *left_out, *more),
        model_state=model_state,
    )


def open_original(directory: Directory) -> Original | None:
    """Open a checkpoint of a model with images or sound; None for any other.

    Raises:
        UserError: its language model is not supported, or not found.
    """
    config = load_object(directory.read(CONFIG), f"{directory}/{CONFIG}")
    if not multimodal.is_nested(config):
        return None
    return originals.open_original(directory, config, tensors(directory))


def open_original_of_run(run: Path) -> Original | None:
    """Open the checkpoint with images or sound that a run was imported from; None without one.

    Raises:
        UserError: it cannot be read, or has other tensors than at the import.
    """
    path = run / IMPORTED / RECORD
    if not path.is_file():
        return None
    where = str(path)
    stored = load_object(path.read_bytes(), where)
    try:
        original = open_original(Directory(str(stored.get("source"))))
    except UserError as error:
        raise originals.unreadable(stored, where, error) from error
    if original is None:
        raise originals.unreadable(stored, where, f"{CONFIG} has no text_config")
    originals.check_record(stored, original, where)
    return original


class ImportedDocuments(NamedTuple):
    """JSON files of the Hugging Face model from which a run was imported.

    Attributes:
        config: `config.json`; of a model with images or sound, the part of its language model.
        generation: `generation_config.json`; None if absent.
        has_original: whether the model is the language model of one with images or sound.
    """

    config: dict[str, Any]
    generation: dict[str, Any] | None
    has_original: bool = False

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids of tokens at which transformers ends a text."""
        ids = (self.generation or self.config).get("eos_token_id")
        return tuple(n for n in (ids if isinstance(ids, list) else [ids]) if type(n) is int)


def document_contents(directory: Directory) -> dict[str, bytes]:
    """Return the files of a checkpoint that its import keeps: `DOCUMENTS`, and the record of an
    original with images or sound.
    """
    documents = {name: directory.read(name) for name in DOCUMENTS if directory.has(name)}
    if (original := open_original(directory)) is not None:
        documents[RECORD] = json.dumps(originals.record(original), indent=1).encode()
    return documents


def write_documents(documents: Mapping[str, bytes], target: Path) -> None:
    """Write copies of the documents of a checkpoint into a run directory.

    Args:
        documents: name -> content.
        target: the run directory.
    """
    copies = target / IMPORTED
    copies.mkdir(exist_ok=True)
    for name, content in documents.items():
        (copies / name).write_bytes(content)


def read_imported_documents(run: Path) -> ImportedDocuments | None:
    """Read the copies of `write_documents` in a run directory; None for one that is not an import.

    Raises:
        UserError: a file is not a JSON object.
    """
    config, generation = (run / IMPORTED / name for name in (CONFIG, GENERATION))
    if not config.is_file():
        return None
    contents = (
        load_object(generation.read_bytes(), str(generation)) if generation.is_file() else None
    )
    document, record = load_object(config.read_bytes(), str(config)), run / IMPORTED / RECORD
    if not multimodal.is_nested(document):
        return ImportedDocuments(document, contents)
    stored = load_object(record.read_bytes(), str(record)) if record.is_file() else {}
    has_head = bool(stored.get("has_output_head"))
    text = multimodal.text_config(document, lambda: has_head, str(config))
    return ImportedDocuments(text, contents, has_original=True)


def read_documents(directory: Directory) -> ImportedDocuments:
    """Return the JSON files of a checkpoint.

    Raises:
        UserError: a file is not a JSON object.
    """
    where = f"{directory}/{GENERATION}"
    has_generation = directory.has(GENERATION)
    generation = load_object(directory.read(GENERATION), where) if has_generation else None
    nested = load_object(directory.read(CONFIG), f"{directory}/{CONFIG}")
    has_original = multimodal.is_nested(nested)
    return ImportedDocuments(_config(directory), generation, has_original)


def _config(directory: Directory) -> dict[str, Any]:
    """Return `config.json`; of a model with images or sound, the config of its language model."""
    where = f"{directory}/{CONFIG}"
    config = load_object(directory.read(CONFIG), where)
    if not multimodal.is_nested(config):
        return config

    def has_head() -> bool:
        return multimodal.split(tensors(directory), config, str(directory)).has_head

    return multimodal.text_config(config, has_head, where)


def _rename_to_dialect(
    contents: Mapping[str, LazyTensor], dialect: NameMap, where: str
) -> dict[str, LazyTensor]:
    """Return tensors by the dialect's names: without wrappers, with the prefix of the base class.

    `LlamaModel` and other base classes save their tensors without "model.". A user's module around
    the model adds the name of its attribute to all keys.

    Raises:
        UserError: two keys belong to one parameter.
    """
    # "model" of `model.embed_tokens.weight`: the attribute of the class with the output head.
    base = dialect.key_for(EMBEDDING).partition(".")[0]
    names = [strip_wrappers(key) for key in contents]

    def is_prefix(prefix: str) -> bool:
        return any(
            dialect.knows(f"{b}{n.removeprefix(prefix)}") for b in ("", f"{base}.") for n in names
        )

    # "" first: names that the dialect knows keep what may look like a prefix.
    wrapper = next(filter(is_prefix, ("", *shared_prefixes(names))), "")
    tensors: dict[str, LazyTensor] = {}
    for key, tensor in contents.items():
        name = dialect.current_key(strip_wrappers(key).removeprefix(wrapper))
        if not dialect.knows(name) and dialect.knows(f"{base}.{name}"):
            name = f"{base}.{name}"
        if name in tensors:
            raise UserError(f"{where}: {key} and another key are both {name}")
        tensors[name] = tensor
    return tensors


def _drop_layers(
    tensors: dict[str, LazyTensor], further: range
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the tensors without those of `further` layers, and a note about these."""
    spare = {
        key for key in tensors
        if further and (match := _LAYER.match(key)) and int(match[1]) in further
    }  # fmt: skip
    if not spare:
        return tensors, []
    needed = {key: tensor for key, tensor in tensors.items() if key not in spare}
    return needed, [
        f"left out: {len(spare)} tensors of layers from {further.start} on, which predict further "
        "tokens; model.mtp_depth takes them in"
    ]


def shared_keys(layer: int, dialect: NameMap, model: ModelConfig) -> dict[str, str]:
    """Return keys of a layer that predicts further tokens -> keys of the same tensors outside."""
    if dialect.module_rules is not None:  # such files have no copies
        return {}
    embedding = dialect.key_for(EMBEDDING)
    return {
        f"model.layers.{layer}.embed_tokens.weight": embedding,
        f"model.layers.{layer}.shared_head.head.weight": (
            embedding if model.tie_embeddings else dialect.key_for(HEAD)
        ),
    }


def _drop_shared(
    tensors: dict[str, LazyTensor],
    layers: range,
    dialect: NameMap,
    model: ModelConfig,
    where: str,
) -> dict[str, LazyTensor]:
    """Return the tensors without copies of embedding and output head in `layers`.

    Raises:
        UserError: a copy differs from the tensor that jaxforge's modules share.
    """
    copies: dict[str, str] = {}
    for layer in layers:
        copies |= shared_keys(layer, dialect, model)
    for key, shared in copies.items():
        if key in tensors and shared in tensors and not equal(tensors[key], tensors[shared]):
            raise UserError(
                f"{where}: {key} differs from {shared}, which modules of multi-token prediction "
                "share here. Set model.mtp_depth = 0 to leave these layers out"
            )
    return {key: tensor for key, tensor in tensors.items() if key not in copies}


def _differences(config: Mapping[str, Any], model: ModelConfig, where: str) -> Iterator[str]:
    theirs = make_config({"model": model_table(config, where)}, source=where).model
    for difference in invisible_differences(theirs, model, Invisible):
        yield f"{CONFIG}: {difference}"
    if theirs.windows != model.windows:
        yield (
            f"{CONFIG} has layers that see {_span(theirs.windows)} tokens and [model] "
            f"{_span(model.windows)}: the weights were trained with the former"
        )


def _span(windows: Sequence[int | None]) -> str:
    return " or ".join(str(w or "all") for w in dict.fromkeys(windows))
