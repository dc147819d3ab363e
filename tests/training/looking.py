"""Callbacks that record the steps at which they act."""

from jaxforge.training.callbacks.callback import Callback


class Looking(Callback):
    every = 2

    def __init__(self, events, reason=None):
        self.events, self.reason = events, reason

    def on_interval(self, context):
        self.events.append(f"look {context.step}")
        return self.reason


class Checking(Looking):
    """Acts only at the start of a run."""

    every, checks_start = 0, True
