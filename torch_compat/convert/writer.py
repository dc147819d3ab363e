"""The interface of writers: units of work, then what makes them a checkpoint."""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_compat.checkpoint import dcp_state, optimizer_state, stages
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.convert.source import Request, Source
from torch_compat.formats.staging import Staging, Unit
from torch_compat.formats.workers import Share
from torch_compat.names.table import NameMap

_FRACTION = 24  # of the memory allowed, for one block: three are under way, each read and copied


class Writer(abc.ABC):
    """The result of a conversion; `stage` comes before all that writes.

    Args:
        request: what the user asks for.
        source: the opened source.

    Attributes:
        staging: where files gather.
        label: the result in words, such as its dialect.
        within: the directory in the destination that is made; "" is the destination itself.

    Raises:
        UserError: the source has no counterpart in the format.
    """

    staging: Staging
    label: str
    subdirectory = ""

    def __init__(self, request: Request, source: Source) -> None:
        self.request, self.source = request, source
        self.block = request.max_memory // _FRACTION

    @property
    def path(self) -> Path:
        """The directory that is made."""
        return self.request.destination.absolute() / self.subdirectory

    def notes(self) -> list[str]:
        """Return what the user should know.

        Raises:
            UserError: the source has no counterpart in the format.
        """
        return []

    def stage(self, plan: dict[str, Any], share: Share) -> Staging:
        """Begin to write, or go on with a conversion of the same plan."""
        self.staging = Staging(self.path, plan, share)
        return self.staging

    @property
    @abc.abstractmethod
    def units(self) -> Sequence[Unit]:
        """The work, in the same order in every process."""

    @abc.abstractmethod
    def complete(self, results: Mapping[str, Any]) -> None:
        """Write what goes with the units, by process 0, and check that all of it reads back.

        Args:
            results: what each unit returned, by its name.

        Raises:
            StorageError: it does not.
        """

    def commit(self) -> None:
        """Give the result its name."""
        self.staging.commit()

    def _lr_factors(self, dialect: NameMap) -> list[float]:
        """Return the factor on the learning rate of each parameter group."""
        settings = dcp_state.group_settings(self.source.checkpoint, self.source.target, dialect)
        return [key.lr_factor for key in optimizer_state.group_keys(settings)]

    def _check_names(self, dialect: str) -> None:
        """Check that the dialect has a name for everything."""
        model = self.source.target.config.model
        stages.check(self.request.stages, name_map(dialect), model)
        name_map(dialect).to_dialect(self.source.checkpoint.variables, model)
