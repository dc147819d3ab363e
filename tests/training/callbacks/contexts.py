"""Contexts for tests that call a callback directly."""

import types


def after(step, state=None, **parts):
    """Return the context of a callback after `step`."""
    return types.SimpleNamespace(step=step, state=state, **parts)
