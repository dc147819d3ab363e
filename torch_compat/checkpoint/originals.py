"""Original of a language model: the multimodal checkpoint that it was imported from.

A run records where the original is, and a hash of each tensor that its import left aside. An export
nests the trained language model again, and copies these tensors and the processor files.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint import hf_config
from torch_compat.checkpoint.multimodal import (
    OF_IMAGES,
    ROTARY,
    TIED,
    Parts,
    split,
    text_config,
)
from torch_compat.families import FAMILIES
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor, blocks
from torch_compat.names.translation import summarize_names

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
              "chat_template.json")  # fmt: skip
"""Files that prepare images and sound, next to those of the tokenizer."""
RECORD = "original.json"
"""File of a run that names the original checkpoint and the tensors that were left aside."""
TEXT_ONLY = "export the language model alone: --text-only"

TESTED = frozenset({
    "aya_vision", "cohere2_vision", "exaone4_5", "gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe",
    "granite_speech", "idefics2", "idefics3", "internvl", "lighton_ocr", "llama4", "llava",
    "llava_next", "llava_onevision", "minicpmv4_6", "mistral3", "qwen2_5_vl", "qwen2_audio",
    "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
    "video_llama_3", "voxtral",
})  # fmt: skip
"""`model_type` of the classes that tests compare with transformers."""
_OF_LOGITS = ("logits_scaling", "final_logit_softcap")  # of [model]
_BLOCK = 32 << 20  # bytes that are hashed at a time


@dataclasses.dataclass(frozen=True)
class Original:
    """Multimodal checkpoint into which an export nests a language model.

    Attributes:
        directory: the checkpoint.
        stamps: fingerprints of its files before it was opened.
        config: its `config.json`.
        text: config of its language model (`text_config`).
        parts: its tensors.
        files: its processor files.
    """

    directory: Directory
    stamps: Mapping[str, str]
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    parts: Parts
    files: Mapping[str, bytes]

    @property
    def name(self) -> str:
        """The class that publishes it."""
        names = self.config.get("architectures")
        return str(names[0] if isinstance(names, list) and names else self.config["model_type"])

    @property
    def loader(self) -> str:
        """Class of transformers that opens it."""
        return self.name if self.name.isidentifier() else "AutoModelForMultimodalLM"

    def notes(self, *, is_import: bool = True) -> list[str]:
        """Return notes about the tensors outside of the language model, by prefix."""
        sizes: dict[str, list[int]] = {}
        for name, tensor in self.parts.aside.items():
            # `model.vision_tower` and not `model`, which the language model shares.
            depth = 2 if name.startswith(self.parts.nesting.base) else 1
            sizes.setdefault(".".join(name.split(".")[:depth]), []).append(tensor.nbytes)
        listed = ", ".join(f"{len(n)} of {p} ({sum(n) / 1e6:.3g} MB)" for p, n in sizes.items())
        n_tensors = f"{len(self.parts.aside)} tensors outside of the language model: {listed}"
        if not is_import:
            return [f"copied from {self.directory}: {n_tensors}"]
        notes = [f"left aside: {n_tensors}. Exports to hf copy them from {self.directory}"]
        table = hf_config.model_table(self.text, str(self.directory))
        scales = [f"{key} = {table[key]}" for key in _OF_LOGITS if table.get(key, 1.0) != 1.0]
        if scales:
            notes.append(
                f"[model] has {', '.join(scales)}, as the class of the language model alone. Some "
                f"classes of transformers leave this out of the logits: {self.name} may do so"
            )
        if str(self.config.get("model_type")) not in TESTED:
            notes.append(
                f"{self.name} is not among the tested classes: compare the logits of its language "
                "model with those of jaxforge (verify --torch)"
            )
        return notes

    def check_unchanged(self) -> None:
        """Check that no file has changed since the original was opened.

        Raises:
            UserError: files were replaced, added or removed.
        """
        if _stamps(self.directory) != self.stamps:
            raise UserError(
                f"{self.directory} changed while its tensors were copied, so that no result was "
                "written. Run the same command again when it no longer changes"
            )

    def nest(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Return all tensors of an export by the names of the original.

        Args:
            tensors: tensors of the language model by the family's keys.
        """
        text = {self.parts.nesting.key(key): tensor for key, tensor in tensors.items()}
        assert not text.keys() & self.parts.aside.keys()
        return {**text, **self.parts.aside}

    def check(self, model: ModelConfig, family: str, missing: Collection[int]) -> None:
        """Check that a language model can take the place of the original's.

        Args:
            model: the model to export.
            family: the family of the export.
            missing: EOS tokens of the original that the run's tokenizer lacks.

        Raises:
            UserError: it has another family, width, vocabulary or tokenizer.
        """
        table = hf_config.model_table(self.text, str(self.directory))
        problems = [
            *([f"it is exported as {family}"] if family != self.text["model_type"] else []),
            *(
                f"model.{key} = {getattr(model, key)} and not {table[key]}"
                for key in ("dim", "vocab_size") if getattr(model, key) != table[key]
            ),
            *([f"its tokenizer lacks the EOS tokens {sorted(missing)}"] if missing else []),
            *([f"{summarize_names(names)} of the original are quantized"]
              if (names := self._quantized()) else []),
        ]  # fmt: skip
        if problems:
            raise UserError(
                f"the model does not fit into {self.name} of {self.directory}: "
                f"{'; '.join(problems)}. To {TEXT_ONLY}"
            )
        self.config_json(model, "float32")  # raises before anything is written

    def _quantized(self) -> list[str]:
        is_8_bit = {name: t.dtype.itemsize == 1 for name, t in self.parts.aside.items()}
        return [n for n, is_ in is_8_bit.items() if is_ and "quantization_config" in self.config]

    def config_json(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """Return the `config.json` of an export, with the nesting and the keys of the original.

        Keys of the model are replaced if their meaning has changed since the import.

        Raises:
            UserError: the changed model cannot be expressed.
        """
        config = copy.deepcopy(dict(self.config))
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        written = hf_config.model_keys(model, FAMILIES[self.text["model_type"]], self.text)
        changed = {k: v for k, v in written.items() if k not in self.text or self.text[k] != v}
        of_images = {
            k: v for key in ROTARY for k, v in (text.get(key) or {}).items() if k in OF_IMAGES
        }  # fmt: skip
        changed |= {k: {**changed[k], **of_images} for k in ROTARY if changed.get(k)}
        text |= {key: value for key, value in changed.items() if key != TIED}
        if TIED in changed:
            config[TIED] = text[TIED] = changed[TIED]
        for table in (config, text):
            table.pop("quantization_config", None)
            table |= {key: dtype for key in ("dtype", "torch_dtype") if key in table}
        if not {"dtype", "torch_dtype"} & config.keys():
            config["dtype"] = dtype
        where = f"{hf_config.CONFIG} for {self.name}"
        again = text_config(config, lambda: not model.tie_embeddings, where)
        if lost := hf_config.differences(model, again, where):
            raise UserError(f"{where} cannot express {', '.join(lost)}. To {TEXT_ONLY}")
        return config


def open_original(
    directory: Directory, config: Mapping[str, Any], contents: Mapping[str, LazyTensor]
) -> Original:
    """Open a multimodal checkpoint.

    Args:
        directory: the checkpoint.
        config: its `config.json`.
        contents: its tensors.

    Raises:
        UserError: its language model is not supported, or not found.
    """
    stamps, where = _stamps(directory), f"{directory}/{hf_config.CONFIG}"
    text = text_config(config, lambda: True, where)  # raises for an unknown family
    parts = split(contents, config, str(directory))
    text = text_config(config, lambda: parts.has_head, where)
    files = {name: directory.read(name) for name in PROCESSORS if directory.has(name)}
    return Original(directory, stamps, config, text, parts, files)


def record(original: Original) -> dict[str, Any]:
    """Return the record of an original, by which `check_record` finds it unchanged."""
    aside = original.parts.aside
    return {
        "source": str(original.directory),
        "has_output_head": original.parts.has_head,
        "tensors": {name: _fingerprint(tensor) for name, tensor in aside.items()},
    }


def check_record(stored: Mapping[str, Any], original: Original, where: str) -> None:
    """Check that the tensors that an import left aside are still those of the original.

    Args:
        stored: the record of the import.
        original: the original as it is now.
        where: path of the record, for messages.

    Raises:
        UserError: tensors are missing, new, or have other values.
    """
    tensors, aside = stored.get("tensors"), original.parts.aside
    hashes = tensors if isinstance(tensors, dict) else {}
    wrong = sorted(hashes.keys() ^ aside.keys()) or [
        name for name, tensor in aside.items() if _fingerprint(tensor) != hashes[name]
    ]
    if wrong:
        raise UserError(
            f"{original.directory}: {summarize_names(wrong)} are not as they were when the run was "
            f"imported ({where}). {_advice(where)}"
        )


def unreadable(stored: Mapping[str, Any], where: str, reason: object) -> UserError:
    """Return the error for an original that cannot be read.

    Args:
        stored: the record of the import.
        where: path of the record.
        reason: what was found.
    """
    return UserError(
        f"{stored.get('source')}: the checkpoint that this run was imported from cannot be read "
        f"({reason}), but its tensors for images and sound belong to the export. {_advice(where)}"
    )


def _stamps(directory: Directory) -> dict[str, str]:
    """Return file -> fingerprint of the files that may be read."""
    suffixes = (".safetensors", ".bin", ".json")
    return {name: s for name, s in directory.stamps().items() if name.endswith(suffixes)}


def _advice(where: str) -> str:
    return f"Restore the original, write its new path into {where}, or {TEXT_ONLY}"


def _fingerprint(tensor: LazyTensor) -> list[Any]:
    """Return dtype, shape and SHA-256 of the bytes of a tensor."""
    digest = hashlib.sha256()
    for index in blocks(tensor.shape, tensor.dtype.itemsize, _BLOCK):
        digest.update(np.ascontiguousarray(tensor.read(index)).reshape(-1).view(np.uint8).data)
    return [tensor.dtype.name, list(tensor.shape), digest.hexdigest()]
