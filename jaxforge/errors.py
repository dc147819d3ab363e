"""Mistakes of the user's, told apart from our own (those are assertions)."""


class UserError(ValueError):
    """What is wrong, where, and what to change, in one message.

    Entry points print it without a traceback and exit with code 2 (`training.exits.USAGE`).
    """
