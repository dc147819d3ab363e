"""Writer of Hugging Face directories, with a model card."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli.redaction import redacted_message
from jaxforge.errors import UserError
from jaxforge.storage import urls
from torch_compat.checkpoint import hf_config, hf_state, hf_tokenizer, originals
from torch_compat.checkpoint.validation import check_written
from torch_compat.convert import model_card
from torch_compat.convert.source import Request, Source, left_out_modules
from torch_compat.convert.writer import Writer
from torch_compat.families import FAMILIES
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory
from torch_compat.formats.staging import Unit


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
        checkpoint = hf_state.with_dtypes(source.checkpoint, self._family, request.dtype)
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
        if self.request.dtype == hf_state.IN_8_BITS:
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
    def units(self) -> Sequence[Unit]:
        """Parts of safetensors files, and the JSON and tokenizer files."""
        return hf_state.units(
            self.source.checkpoint, self.source.target.config, self.staging.path,
            family=self._family, dtype=self.request.dtype, largest=self.request.largest_file,
            block=self.block, tokenizer=self.source.tokenizer, before=self.source.imported,
            original=self._original,
        )  # fmt: skip

    def complete(self, results: Mapping[str, Any]) -> None:
        """Check the written tensors and write the model card.

        Raises:
            UserError: the original of images or sound has changed.
        """
        if self._original is not None:
            self._original.check_unchanged()
        directory, model = self.staging.path, self.source.target.config.model
        checkpoint, dtype = self.source.checkpoint, self.request.dtype
        written = hf_state.tensors_of_export(checkpoint, model, self._family, dtype, self._original)
        check_written(safetensors.open_directory(Directory(directory)), written, str(directory))
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
