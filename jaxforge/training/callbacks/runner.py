"""`Callbacks`: the callbacks of a run, in the order of `order.ORDER`."""

import contextlib
import inspect
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.parallel import agreement
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Metrics
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.callbacks.callback import Callback, IntervalContext, RunCallback, StepContext
from jaxforge.training.callbacks.control import Control, Requests
from jaxforge.training.callbacks.evaluation import Evaluation
from jaxforge.training.callbacks.exports import decode, encode
from jaxforge.training.callbacks.order import position

log = logging.getLogger(__name__)

CHECK_INTERVAL = 10
"""Steps between two checks with several processes, which must agree on requests."""


class Callbacks:
    """The callbacks of a run in order; decides which of them are due.

    Args:
        callbacks: callbacks in any order; callbacks of users keep their relative order.

    Attributes:
        control: takes the requests of the callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        # A stable sort: callbacks of users keep the order in which they came.
        self._callbacks = sorted(callbacks, key=position)
        self.collect = tuple(name for callback in callbacks for name in callback.collect)
        self._watches_steps = self._handled(Callback.on_step_end)
        self._watches_epochs = self._handled(Callback.on_epoch_end)
        self._epoch: int | None = None  # complete epochs when the current one began
        self.control = Control()
        self._has_users = any(not isinstance(callback, RunCallback) for callback in callbacks)
        self._are_alike = True

    def compare_processes(self) -> None:
        """Compare the callbacks of users of all processes. Collective: all processes must call.

        Some processes may have callbacks that others lack. Only steps at which every process knows
        of a collective may then have one.
        """
        if jax.process_count() == 1:
            return
        kinds = [[type(callback).__qualname__, str(callback.every)] for callback in self
               if not isinstance(callback, RunCallback)]  # fmt: skip
        texts = agreement.gather(json.dumps(kinds))
        # A request of one process needs the agreement of all, even of those without callbacks.
        self._has_users = any(map(json.loads, texts))
        self._are_alike = len(set(texts)) == 1

    def due(self, step: int) -> list[Callback]:
        """Return the callbacks whose `on_interval` is due after `step`."""
        return [callback for callback in self._callbacks if callback.is_due(step)]

    def due_on_resume(self, step: int) -> list[Callback]:
        """Return the callbacks that are due when a run resumes within an evaluation."""
        return [
            callback
            for callback in self._callbacks
            if callback.follows_evaluation and callback.is_due(step)
        ]

    def run(self, due: Sequence[Callback], context: IntervalContext) -> Exit | None:
        """Call `on_interval` of callbacks until the first reason to end the run."""
        for callback in due:
            pauses = callback.waits and not callback.follows_evaluation
            reason = None
            with context.tracker.paused() if pauses else contextlib.nullcontext():
                try:
                    reason = callback.on_interval(context)
                except SystemExit as error:
                    self.control.note_exit(error, f"{type(callback).__name__}.on_interval")
            if reason is not None:
                return reason
        return None

    def call(self, event: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Call an event of all callbacks in order. SystemExit becomes a request to stop.

        Args:
            event: a method of `Callback`.
            arguments: arguments of the event. A callback whose method takes fewer gets fewer.
        """
        for callback in self._callbacks:
            self.call_callback(callback, event, *arguments)

    def call_callback(
        self,
        callback: Callback,
        event: Callable[..., None],
        *arguments: Any,  # noqa: ANN401
    ) -> None:
        """Call an event of one callback, as `call` does for all of them."""
        name = event.__name__
        if not _handles(callback, name):
            return
        method = getattr(callback, name)
        try:
            method(*arguments[: _positional_count(method)])
        except SystemExit as error:
            self.control.note_exit(error, f"{type(callback).__name__}.{name}")

    def begin_step(self, progress: Progress) -> None:
        """Call the events before a step: of an epoch, unless it has begun, and of the step."""
        # Also after a resume within an epoch, where `_epoch` is not known yet.
        if progress.epoch is not None and progress.epoch != self._epoch:
            self._epoch = progress.epoch
            self.call(Callback.on_epoch_begin, progress.epoch + 1)
        self.call(Callback.on_step_begin, progress.step + 1)

    def watches_end_of_step(self, progress: Progress) -> bool:
        """Return whether callbacks handle the end of the latest step, or of its epoch."""
        return self._watches_steps or (self._watches_epochs and bool(self.ended_epochs(progress)))

    def end_step(
        self, progress: Progress, state: TrainState, metrics: Metrics, tracker: Tracker
    ) -> None:
        """Call the events after a step: of the step, and of the epochs that ended with it.

        Nothing waits for the step if no callback handles them.
        """
        if not self.watches_end_of_step(progress):
            return
        tracker.flush()
        # Metrics of this step are logged by now: a callback may end the run.
        context = StepContext(progress.step, state, metrics, self.control)
        self.call(Callback.on_step_end, context)
        ended = self.ended_epochs(progress)
        for epoch in ended:
            if epoch != ended[0]:  # the step drew several epochs
                self.call(Callback.on_epoch_begin, epoch)
            self.call(Callback.on_epoch_end, epoch, context)

    def ended_epochs(self, progress: Progress) -> range:
        """Return the numbers of the epochs that ended with the latest step; the first one is 1."""
        if self._epoch is None or progress.epoch is None:
            return range(0)
        return range(self._epoch + 1, progress.epoch + 1)

    def _handled(self, event: Callable[..., None]) -> bool:
        return any(_handles(callback, event.__name__) for callback in self._callbacks)

    def requests(
        self,
        step: int,
        due: Sequence[Callback],
        paused: Callable[[], AbstractContextManager[None]],
        *,
        is_forced: bool = False,
    ) -> Requests:
        """Return and clear the requests of all processes; the same on every process.

        With several processes, requests wait until the processes agree: after an `on_interval` of
        users (if all processes have the same callbacks) or an evaluation, every `CHECK_INTERVAL`
        steps, and if `is_forced`. Without callbacks of users there is nothing to agree on.
        """
        if jax.process_count() == 1:
            return self.control.take()
        has_acted = any(
            callback.follows_evaluation
            or (self._are_alike and not isinstance(callback, RunCallback))
            for callback in due
        )
        if not self._has_users or not (has_acted or is_forced or step % CHECK_INTERVAL == 0):
            return Requests()
        with paused():
            return self.control.agree()

    def take_requests(
        self,
        context: IntervalContext,
        due: Sequence[Callback],
        had_halted: Callable[[], bool],
        *,
        is_forced: bool,
    ) -> Requests:
        """Return the agreed requests after a step; a requested evaluation takes place here.

        At most one evaluation takes place after a step, and none after a step that changed nothing.

        Args:
            context: the run after the step.
            due: the callbacks that were due after the step.
            had_halted: returns whether the step changed nothing; it may wait for a step.
            is_forced: agree at this step.
        """
        paused = context.tracker.paused
        requests = self.requests(context.step, due, paused, is_forced=is_forced)
        has_evaluated = context.evaluation or context.progress.validation
        if requests.evaluation and not has_evaluated and not had_halted():
            self.evaluate(context)
            later = self.requests(context.step, due, paused, is_forced=True)
            requests = requests.merge(later)
        return requests

    def evaluate(self, context: IntervalContext) -> None:
        """Evaluate because a callback requested it.

        Raises:
            UserError: the run has no evaluation.
        """
        evaluations = [callback for callback in self if isinstance(callback, Evaluation)]
        if not evaluations:
            raise UserError(
                "a callback requested an evaluation, but eval.enabled = false. Set eval.enabled = "
                "true and a data set in [eval]"
            )
        # Nothing is due at this step, so the callback evaluates all sets.
        evaluations[0].on_interval(context)

    def states(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, as JSON.

        Raises:
            UserError: a state contains a value that JSON cannot hold.
        """
        states = {key: (type(cb).__name__, cb.state_dict()) for key, cb in self._keys().items()}
        return {
            key: encode(state, f"the state_dict() of {name}")
            for key, (name, state) in states.items()
            if state
        }

    def load_states(self, states: dict[str, Any]) -> None:
        """Restore the states that `states` returned; callbacks without one stay unchanged."""
        keys = self._keys()
        for key, state in states.items():
            if key in keys:
                keys[key].load_state_dict(decode(state))
            else:
                log.info("the checkpoint has the state of %s, which this run does not use", key)

    def _keys(self) -> dict[str, Callback]:
        """Return the callbacks by class; further callbacks of the same class have a number."""
        keys: dict[str, Callback] = {}
        for callback in self._callbacks:
            name = f"{type(callback).__module__}.{type(callback).__qualname__}"
            names = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2)))
            keys[next(key for key in names if key not in keys)] = callback
        return keys

    def __iter__(self) -> Iterator[Callback]:
        """Iterate over the callbacks in order."""
        return iter(self._callbacks)


def _handles(callback: Callback, event: str) -> bool:
    """Return whether a callback overrides an event."""
    return getattr(type(callback), event) is not getattr(Callback, event)


def _positional_count(method: Callable[..., None]) -> int | None:
    """Return the number of positional arguments that a method takes; None for any number."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)
