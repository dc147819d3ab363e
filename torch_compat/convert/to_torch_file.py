"""Writer of one file of `torch.save`, with the state dicts of model, optimizer and scheduler."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxforge.errors import UserError
from torch_compat.checkpoint import dcp_state, train_state
from torch_compat.checkpoint.name_maps import name_map, usual_dialect
from torch_compat.checkpoint.validation import check_written
from torch_compat.convert.source import Request, Source
from torch_compat.convert.writer import Writer
from torch_compat.formats import torch_file, torch_zip
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.staging import Unit
from torch_compat.names.table import EMBEDDING, HEAD, POSITIONS, NameMap

_LAYER = re.compile(r"layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")


class TorchFileWriter(Writer):
    """A file such as `checkpoint.pt`, which `torch.load(weights_only=True)` opens.

        model         state dict, its keys in the order of the modules
        optimizer     like `optimizer.state_dict()`: state by number, two parameter groups
        scheduler     like `LambdaLR.state_dict()`
        step, tokens_seen, samples_seen

    Without moments, the file only has `model`.
    """

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        name = request.destination.name
        if not name.endswith(torch_file.SUFFIXES):
            raise UserError(
                f"{request.destination}: --to pt writes one file. Its name must end with .pt"
            )
        self._file = name
        self._dialect = request.dialect or usual_dialect(source.target.config.model)
        self._check_names(self._dialect)
        self._has_moments = source.checkpoint.moments is not None
        self.label = f"{self._dialect}, torch.save"

    def notes(self) -> list[str]:
        """Return notes for the user."""
        if not self._has_moments:
            return []
        return [
            "optimizer state is numbered by the two parameter groups, with and without weight "
            "decay, each in the order of the keys of `model`; `param_names` in each group lists "
            "them"
        ]

    @property
    def units(self) -> Sequence[Unit]:
        """Unit that writes the file."""
        path, block = self.staging.path / self._file, self.block
        write = functools.partial(torch_zip.save, self._state, path, block)
        return [Unit("file", self.source.nbytes, write)]

    def complete(self, results: Mapping[str, Any]) -> None:
        """Check that the file can be read back."""
        directory = Directory(self.staging.path)
        written = torch_file.open_file(directory, self._file)
        expected = dict(torch_file.flatten(self._state, written.where))
        tensors = {key: item for key, item in expected.items() if isinstance(item, LazyTensor)}
        check_written(written.tensors, tensors, written.where)

    def commit(self) -> None:
        """Rename the file to its final name."""
        self.staging.commit(self._file)

    @functools.cached_property
    def _state(self) -> dict[str, Any]:
        checkpoint, target = self.source.checkpoint, self.source.target
        dialect = name_map(self._dialect)
        order = module_order(checkpoint.params, dialect)
        entries = dcp_state.entries(
            checkpoint, target, dialect,
            flat=False, prefix="model.", weights_only=not self._has_moments,
        )  # fmt: skip
        nested: dict[Any, Any] = {}
        for entry in entries.values():
            inner: dict[str | int, Any] = nested
            for parent in entry.path[:-1]:
                inner = inner.setdefault(parent, {})
            inner[entry.path[-1]] = entry.value
        model = nested["model"]
        unordered = [key for key in model if key not in set(order)]  # buffers and a tied head
        nested["model"] = {key: model[key] for key in (*order, *unordered)}
        if self._has_moments:
            progress = self.source.progress
            updates = int(checkpoint.scalars["updates"])
            nested["optimizer"] = _numbered(nested["optimizer"], order)
            nested["scheduler"] = train_state.lambda_lr(
                target.config, updates, self._lr_factors(name_map(self._dialect))
            )
            nested |= {"step": progress.step, "tokens_seen": progress.tokens}
            nested["samples_seen"] = progress.samples
        return nested


def module_order(params: Mapping[str, LazyTensor], dialect: NameMap) -> list[str]:
    """Return the keys of parameters in the order in which a model registers its modules.

    The embedding comes first, then the layers, each in the order of the dialect's table, then the
    last norm and the output head.

    Args:
        params: jaxforge's name -> tensor.
        dialect: dialect of the returned keys.
    """
    rows = {rule.name: i for i, rule in enumerate(dialect.rules)}
    first_expert = min((i for name, i in rows.items() if "{j}" in name), default=0)

    def position(name: str) -> tuple[int, int, int, int, int]:
        match = _LAYER.match(name)
        if match is None:
            outer = {EMBEDDING: 0, POSITIONS: 1, HEAD: 4}.get(name, 3)
            return outer, 0, 0, 0, 0
        expert = match[2]
        pattern = name.replace(match[1], "{i}", 1)
        if expert is not None:
            pattern = pattern.replace(f"experts.{expert}.", "experts.{j}.")
        row = rows[pattern]
        # All matrices of an expert come before those of the next one, as modules register them.
        return 2, int(match[1]), first_expert if expert else row, int(expert or 0), row

    return list(dict.fromkeys(dialect.key_for(name) for name in sorted(params, key=position)))


def _numbered(optimizer: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return optimizer state by parameter number, like `torch.optim.Optimizer.state_dict`."""
    # torch numbers parameters over all groups, and each group lists its members in module order.
    rank = {name: i for i, name in enumerate(order)}
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for group in optimizer["param_groups"].values():
        names = sorted(group["params"], key=rank.__getitem__)
        members = range(len(numbers), len(numbers) + len(names))
        numbers |= dict(zip(names, members, strict=True))
        groups.append({**group, "params": list(members), "param_names": names})
    state = {numbers[name]: fields for name, fields in optimizer["state"].items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}
