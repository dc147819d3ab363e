"""Interface of writers: units that are written several at a time, then the commit."""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_compat.checkpoint import dcp_state, optimizer_state, stages
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.convert.source import Request, Source
from torch_compat.formats.staging import Staging, Unit
from torch_compat.names.table import NameMap

_BLOCKS_IN_MEMORY = 24  # memory limit / block: three are in transit, each read, cast and copied


class Writer(abc.ABC):
    """Writer of a conversion's result in one format.

    The order of calls is `stage`, the units, `complete`, `commit`.

    Args:
        request: the request of the user.
        source: the opened source.

    Attributes:
        staging: directory in which the files are written before the commit.
        label: description of the result, such as its dialect.
        subdirectory: directory to create in the destination; "" is the destination itself.

    Raises:
        UserError: the source has no counterpart in the format.
    """

    staging: Staging
    label: str
    subdirectory = ""

    def __init__(self, request: Request, source: Source) -> None:
        self.request, self.source = request, source
        self.block = request.max_memory // _BLOCKS_IN_MEMORY

    @property
    def path(self) -> Path:
        """Directory to create."""
        return self.request.destination.absolute() / self.subdirectory

    def notes(self) -> list[str]:
        """Return notes for the user.

        Raises:
            UserError: the source has no counterpart in the format.
        """
        return []

    def stage(self, plan: dict[str, Any]) -> Staging:
        """Begin the conversion, or resume a conversion of the same plan."""
        self.staging = Staging(self.path, plan)
        return self.staging

    @property
    @abc.abstractmethod
    def units(self) -> Sequence[Unit]:
        """Units to write."""

    @abc.abstractmethod
    def complete(self, results: Mapping[str, Any]) -> None:
        """Write the remaining files, and check that the result can be read back.

        Args:
            results: name of a unit -> its return value.

        Raises:
            StorageError: the written files cannot be read back.
        """

    def commit(self) -> None:
        """Rename the staging directory to the result."""
        self.staging.commit()

    def _lr_factors(self, dialect: NameMap) -> list[float]:
        """Return the learning-rate factor of each parameter group."""
        settings = dcp_state.group_settings(self.source.checkpoint, self.source.target, dialect)
        return [key.lr_factor for key in optimizer_state.group_keys(settings)]

    def _check_names(self, dialect: str) -> None:
        """Check that the dialect has a key for every tensor."""
        model = self.source.target.config.model
        stages.check(self.request.stages, name_map(dialect), model)
        name_map(dialect).of_model(model).to_dialect(self.source.checkpoint.variables, model)
