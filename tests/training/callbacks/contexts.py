"""Contexts of callbacks that a test calls by itself."""

import types


def after(step, state=None, **parts):
    """Return what a callback reads of a run after `step`."""
    return types.SimpleNamespace(step=step, state=state, **parts)
