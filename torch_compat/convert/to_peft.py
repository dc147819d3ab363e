"""Writer of adapters as directories that PEFT loads."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.storage import urls
from torch_compat.checkpoint import adapters, hf_config, hf_state
from torch_compat.checkpoint.checkpoints import find
from torch_compat.checkpoint.validation import check_written
from torch_compat.convert.source import Request, Source
from torch_compat.convert.writer import Writer
from torch_compat.families import FAMILIES
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES
from torch_compat.formats.staging import Unit


class PeftWriter(Writer):
    """Writer of a directory for `PeftModel.from_pretrained`."""

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        tensors, config = source.ref.adapters(request.options.weights)
        imported = source.imported
        family = hf_config.select_family(
            config.model, request.dialect, imported and imported.config
        )
        dialect = FAMILIES[family].dialect
        self.label = f"peft, {dialect.name}"
        if request.dtype:
            tensors = {name: t.cast(DTYPES[request.dtype]) for name, t in tensors.items()}
        self._tensors = adapters.peft_tensors(tensors, dialect, config.model)
        assert config.checkpoint.load_path is not None
        base = find(source.target.config.checkpoint.load_path or config.checkpoint.load_path)
        # PEFT passes this path to transformers, which opens neither runs nor buckets. A model with
        # images or sound has other names of layers than its language model.
        is_loadable = (
            base.format == "hf"
            and not urls.in_bucket(base.directory.path)
            and hf_state.open_original(base.directory) is None
        )
        self._base = base.directory.path if is_loadable else None
        self._config = adapters.config_json(
            config.lora, self._base, self._tensors,
            fan_in_fan_out=adapters.stores_transposed(dialect, config.model),
        )  # fmt: skip

    def notes(self) -> list[str]:
        """Return notes for the user."""
        if self._base is not None:
            return []
        return [
            "the base model is not a local directory of Hugging Face with a language model alone, "
            "so adapter_config.json names none: export it with --to hf (--text-only for one with "
            "images or sound), and pass the model to PeftModel.from_pretrained"
        ]

    @functools.cached_property
    def units(self) -> Sequence[Unit]:
        """Parts of the safetensors file, and the config."""
        path = self.staging.path
        units = safetensors.units_of_file(path / adapters.WEIGHTS, self._tensors, self.block)
        content = json.dumps(self._config, indent=2)
        return [*units, Unit("config", 0, lambda: _write(path / adapters.CONFIG, content))]

    def complete(self, results: Mapping[str, Any]) -> None:
        """Check the written tensors."""
        directory = Directory(self.staging.path)
        where = f"{directory}/{adapters.WEIGHTS}"
        written = safetensors.open_file(directory.open(adapters.WEIGHTS), where)
        check_written(written, self._tensors, where)


def _write(path: Path, content: str) -> None:
    path.write_text(content + "\n", "utf-8")
