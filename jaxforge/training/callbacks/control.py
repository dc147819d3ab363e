"""Requests of callbacks to the loop: a save, an evaluation, or the end of the run."""

import logging
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit

log = logging.getLogger(__name__)

_NO_STOP = -1  # below every exit code, so that the maximum over processes is the agreed code


class Requests(NamedTuple):
    """Requests of callbacks after a step.

    Attributes:
        save: save a permanent checkpoint.
        evaluation: evaluate on all sets.
        exit_code: end the run with this code after a save; None to continue.
    """

    save: bool = False
    evaluation: bool = False
    exit_code: int | None = None

    @property
    def exit(self) -> Exit | None:
        """The reason to end the run; None to continue."""
        return None if self.exit_code is None else Exit.requested(self.exit_code)

    def merge(self, later: "Requests") -> "Requests":
        """Return the union with later requests of the same step. The highest exit code counts."""
        codes = [code for code in (self.exit_code, later.exit_code) if code is not None]
        return Requests(
            self.save or later.save,
            self.evaluation or later.evaluation,
            max(codes, default=None),
        )


class Control:
    """Collects the requests of callbacks until the loop takes them.

    A request of any process counts for all processes.
    """

    def __init__(self) -> None:
        self._pending = Requests()

    def request_save(self) -> None:
        """Request a permanent checkpoint of the current step."""
        self._pending = self._pending._replace(save=True)

    def request_evaluation(self) -> None:
        """Request an evaluation on all sets, unless an evaluation of the step took place."""
        self._pending = self._pending._replace(evaluation=True)

    def request_stop(self, exit_code: int = 0) -> None:
        """Request the end of the run after a save.

        Args:
            exit_code: exit code of the process, from 0 to 255. If several are requested at the same
                step, the highest one counts.

        Raises:
            UserError: the exit code is invalid.
        """
        if not 0 <= exit_code <= 255:
            raise UserError(
                f"request_stop({exit_code}): an exit code must be an integer from 0 to 255"
            )
        self._pending = self._pending.merge(Requests(exit_code=exit_code))

    def note_exit(self, error: SystemExit, origin: str) -> None:
        """Turn a SystemExit of a callback into a request to stop."""
        code = error.code
        if code is None or isinstance(code, int):
            log.info("%s raised SystemExit: the run ends after a save", origin)
        else:
            log.error("%s raised SystemExit: %s", origin, code)
        # As `sys.exit`: None means 0, text means 1; shells see the lowest 8 bits.
        self.request_stop((code or 0) & 0xFF if code is None or isinstance(code, int) else 1)

    def take(self) -> Requests:
        """Return and clear the requests of this process."""
        pending, self._pending = self._pending, Requests()
        return pending

    def agree(self) -> Requests:
        """Return and clear the requests of all processes. Collective: all processes must call."""
        pending = self.take()
        code = _NO_STOP if pending.exit_code is None else pending.exit_code
        encoded = np.array([pending.save, pending.evaluation, code], np.int32)
        if jax.process_count() > 1:
            # The maximum is "any process" for flags, and the highest exit code.
            encoded = multihost_utils.process_allgather(encoded).max(axis=0)
        save, evaluation, code = encoded.tolist()
        return Requests(bool(save), bool(evaluation), None if code == _NO_STOP else code)
