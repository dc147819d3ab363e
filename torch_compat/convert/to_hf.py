"""Writer of Hugging Face directories, with a model card."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli.redaction import redacted_message
from jaxforge.errors import UserError
from jaxforge.storage import urls
from torch_compat.checkpoint import hf_config, hf_state, hf_tokenizer, originals
from torch_compat.checkpoint.hf_config import CONFIG
from torch_compat.checkpoint.hf_state import IN_8_BITS
from torch_compat.checkpoint.hf_tokenizer import GENERATION
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.checkpoint.validation import check_written
from torch_compat.convert import model_card
from torch_compat.convert.source import Request, Source, left_out_modules
from torch_compat.convert.writer import Writer
from torch_compat.families import FAMILIES
from torch_compat.families.family import Family
from torch_compat.formats import block_scaled, safetensors
from torch_compat.formats.files import Directory, sync
from torch_compat.formats.lazy import DTYPES, LazyTensor
from torch_compat.formats.staging import Unit

_MATRIX = re.compile(r"layers\.\d+\.(?!input_proj).*_proj\.weight")  # of jaxforge; not routers


class HfWriter(Writer):
    """Writer of a directory for `AutoModelForCausalLM.from_pretrained`, with a model card."""

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        imported = source.imported
        self._family = hf_config.select_family(
            source.target.config.model, request.dialect, imported and imported.config
        )
        model = source.target.config.model
        self._original = self._find_original(source)
        self._left_out = 0 if FAMILIES[self._family].further_layers_key else model.mtp_depth
        checkpoint = _with_dtypes(source.checkpoint, self._family, request.dtype)
        if self._left_out:
            checkpoint = checkpoint.without_layers_from(model.n_layers)
        self.source = dataclasses.replace(source, checkpoint=checkpoint)
        self.label = FAMILIES[self._family].dialect.name
        self._check_names(self.label)

    def _find_original(self, source: Source) -> originals.Original | None:
        """Return the checkpoint with images or sound in which the export is nested.

        Raises:
            UserError: it cannot be read, has changed, or the model does not fit into it.
        """
        if self.request.text_only:
            if not (source.imported and source.imported.has_original):
                raise UserError(
                    f"--text-only: {source.ref} is not a model with images or sound. Remove it"
                )
            return None
        if (original := source.original) is None:
            return None
        if self._is_in_8_bits:
            raise UserError(
                f"--dtype {self.request.dtype}: {original.name} has tensors for images or sound, "
                f"which stay as they are. To {originals.TEXT_ONLY}"
            )
        assert source.imported is not None
        eos_ids = hf_tokenizer.eos_ids(source.tokenizer)
        missing = {*source.imported.eos_ids} - {*eos_ids} if source.tokenizer else ()
        original.check(source.target.config.model, self._family, missing)
        return original

    def notes(self) -> list[str]:
        """Return notes for the user."""
        left_out = [left_out_modules(self._left_out)] if self._left_out else []
        tokenizer, vocab_size = self.source.tokenizer, self.source.target.config.model.vocab_size
        return [
            *left_out,
            *(self._original.notes(is_import=False) if self._original else ()),
            *hf_tokenizer.notes(self.label, tokenizer),
            *hf_tokenizer.vocabulary_notes(tokenizer, vocab_size),
        ]

    @functools.cached_property
    def _tensors(self) -> dict[str, LazyTensor]:
        """Tensors of the export by the family's keys, or nested as in the original.

        Raises:
            UserError: the family stores several matrices in one tensor, which has no blocks.
        """
        checkpoint, model = self.source.checkpoint, self.source.target.config.model
        family, original = FAMILIES[self._family], self._original
        dialect = (original.parts.dialect if original else family.dialect).of_model(model)
        copies: dict[str, str] = {}
        # Files repeat embedding and head in each layer that predicts further tokens.
        for depth in range(model.mtp_depth if family.further_layers_key else 0):
            copies |= hf_state.shared_keys(model.n_layers + depth, dialect, model)
        if not self._is_in_8_bits:
            result = dialect.to_dialect(checkpoint.variables, model)
            result |= {key: result[shared] for key, shared in copies.items()}
            return original.nest(result) if original else result
        # Norms, embedding and head stay in bfloat16, as in DeepSeek-V3's files.
        matrices = {dialect.key_for(name) for name in checkpoint.params if _MATRIX.fullmatch(name)}
        weights = dialect.to_dialect(checkpoint.params, model)
        if packed := [key for key in weights if key in matrices and len(weights[key].shape) != 2]:
            raise UserError(
                f"--dtype {IN_8_BITS}: {packed[0]} holds several matrices. Export with --dtype "
                "bfloat16"
            )
        model_state = dialect.to_dialect(checkpoint.model_state or {}, model)
        weights |= {key: weights[shared] for key, shared in copies.items()}
        return {**block_scaled.quantize(weights, matrices), **model_state}

    @property
    def _is_in_8_bits(self) -> bool:
        return self.request.dtype == IN_8_BITS

    @functools.cached_property
    def units(self) -> Sequence[Unit]:
        """Parts of safetensors files, and the JSON and tokenizer files."""
        directory, tokenizer = self.staging.path, self.source.tokenizer
        result, index = safetensors.units(
            self._tensors, directory, self.request.largest_file, self.block
        )
        documents = self._documents()
        if index is not None:
            documents[safetensors.INDEX] = index
        return [
            *result,
            Unit("documents", 0, lambda: _write_documents(documents, directory, tokenizer)),
        ]

    def _documents(self) -> dict[str, Any]:
        """Return the JSON files, and those that an original has next to them."""
        params, family, original = self.source.checkpoint.params, self._family, self._original
        config, tokenizer = self.source.target.config, self.source.tokenizer
        dtype = "bfloat16" if self._is_in_8_bits else _common_dtype(params, FAMILIES[family])
        eos_ids, before = hf_tokenizer.eos_ids(tokenizer), self.source.imported
        # Imported files are used if their EOS tokens are those of the run's tokenizer: with
        # another one, the imported ids would stop the text at other tokens.
        documents: dict[str, Any] = {}
        if before is None or not (tokenizer is None or set(before.eos_ids) <= set(eos_ids)):
            documents[CONFIG] = hf_config.config_json(config, family, dtype, eos_ids)
            ends = hf_config.eos_token_id(eos_ids)
            documents[GENERATION] = {"eos_token_id": ends, "do_sample": True}
        else:
            documents[CONFIG] = hf_config.config_json(config, family, dtype, eos_ids, before.config)
            if before.generation is not None:
                documents[GENERATION] = before.generation
        if original is not None:
            aside = {n: t for n, t in original.parts.aside.items() if t.dtype.kind in "fV"}
            dtype = _common_dtype({**aside, **params}, FAMILIES[family])
            nested = original.config_json(config.model, dtype)
            documents |= {CONFIG: nested, **original.files}
        if self._is_in_8_bits:
            documents[CONFIG]["quantization_config"] = block_scaled.quantization_config()
        return documents

    def complete(self, results: Mapping[str, Any]) -> None:
        """Check the written tensors and write the model card.

        Raises:
            UserError: the original of images or sound has changed.
        """
        if self._original is not None:
            self._original.check_unchanged()
        directory = self.staging.path
        written = safetensors.open_directory(Directory(directory))
        check_written(written, self._tensors, str(directory))
        (directory / model_card.FILE).write_text(self._card(directory), "utf-8")

    def _card(self, directory: Path) -> str:
        source, ref = self.source, self.source.ref
        weights = self.request.options.weights
        name, logged = ref.title, model_card.Logged({}, {}, 0)
        if ref.format == "jaxforge":
            name = urls.path(source.trained.checkpoint.dir).name or ref.run.name
            step = int(ref.directory.name.rpartition("_")[2])
            logged = model_card.read_logged(ref.run, step, weights)
        card = model_card.model_card(
            name, source.trained, source.checkpoint.progress,
            parameters=sum(math.prod(t.shape) for t in source.checkpoint.params.values()),
            model_type=self._family,
            loader=self._original.loader if self._original else model_card.LOADER,
            logged=None if ref.format == "hf" else logged,
            has_tokenizer=(directory / "tokenizer.json").exists(),
            weights=weights,
        )  # fmt: skip
        # The card is published: names and metrics of a run may contain tokens or addresses.
        return redacted_message(card)


def _with_dtypes(checkpoint: CheckpointState, family: str, dtype: str | None) -> CheckpointState:
    """Return the weights in the dtypes of an export, before matrices are scaled to 8 bits.

    Args:
        checkpoint: the weights, in the dtypes of their source.
        family: a key of `FAMILIES`.
        dtype: requested dtype, or `IN_8_BITS`; None: unchanged. What transformers keeps in float32
            is in float32 in any case.
    """
    usual = "bfloat16" if dtype == IN_8_BITS else dtype

    def converted(name: str, tensor: LazyTensor) -> LazyTensor:
        if dtype == IN_8_BITS and _MATRIX.fullmatch(name):
            return tensor
        target = usual or tensor.dtype.name
        is_kept = FAMILIES[family].keeps_in_float32(name, target)
        return tensor.cast(DTYPES["float32" if is_kept else target])

    params = {name: converted(name, tensor) for name, tensor in checkpoint.params.items()}
    state = dict(checkpoint.model_state)
    # Constants of layers have the dtype of weights there; biases of routers do not.
    for name in [name for name in state if name.endswith(".multiplier")]:
        of_weights = usual or _common_dtype(params, FAMILIES[family])
        state[name] = state[name].cast(DTYPES[of_weights])
    return dataclasses.replace(checkpoint, params=params, model_state=state)


def _write_documents(documents: Mapping[str, Any], directory: Path, tokenizer: Path | None) -> None:
    files = {
        name: document if isinstance(document, bytes) else hf_tokenizer.to_json(document)
        for name, document in documents.items()
    }  # fmt: skip
    if tokenizer is not None:
        files |= hf_tokenizer.exported_files(tokenizer)
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
        sync(directory / name)


def _common_dtype(tensors: Mapping[str, LazyTensor], family: Family) -> str:
    """Return a dtype that holds all tensors: transformers casts all to the dtype of the config.

    It does not cast the weights that it keeps in float32.
    """
    dtypes = {
        tensor.dtype for name, tensor in tensors.items()
        if not any(family.keeps_in_float32(name, dtype) for dtype in family.float32)
    }  # fmt: skip
    if len(dtypes) == 1:
        return dtypes.pop().name
    from jax.numpy import promote_types  # NumPy cannot promote float16 and bfloat16

    return functools.reduce(promote_types, dtypes).name
