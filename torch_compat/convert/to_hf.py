"""Writer of Hugging Face directories, with a model card."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli.redaction import redacted_message
from jaxforge.storage import urls
from torch_compat.checkpoint import hf_config, hf_state, hf_tokenizer
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
        self._left_out = 0 if FAMILIES[self._family].further_layers_key else model.mtp_depth
        checkpoint = hf_state.with_dtypes(source.checkpoint, self._family, request.dtype)
        if self._left_out:
            checkpoint = checkpoint.without_layers_from(model.n_layers)
        self.source = dataclasses.replace(source, checkpoint=checkpoint)
        self.label = FAMILIES[self._family].dialect.name
        self._check_names(self.label)

    def notes(self) -> list[str]:
        """Return notes for the user."""
        left_out = [left_out_modules(self._left_out)] if self._left_out else []
        tokenizer, vocab_size = self.source.tokenizer, self.source.target.config.model.vocab_size
        return [
            *left_out,
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
        )  # fmt: skip

    def complete(self, results: Mapping[str, Any]) -> None:
        """Check the written tensors and write the model card."""
        directory, model = self.staging.path, self.source.target.config.model
        checkpoint, dtype = self.source.checkpoint, self.request.dtype
        written = hf_state.tensors_of_export(checkpoint, model, self._family, dtype)
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
            logged=None if ref.format == "hf" else logged,
            has_tokenizer=(directory / "tokenizer.json").exists(),
            weights=weights,
        )  # fmt: skip
        # The card is published: names and metrics of a run may contain tokens or addresses.
        return redacted_message(card)
