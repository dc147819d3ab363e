"""Conversation entries on disk: a token id with two flag bits for the loss."""

FIRST = 1 << 30
"""Bit of the first entry of a conversation."""

UNLEARNED = 1 << 29
"""Bit of entries without loss."""

ID = UNLEARNED - 1
"""Mask of the token id in an entry."""

PADDING = -(1 << 31) | UNLEARNED
"""Entry (int32) of the unused tail of a window; it is never on disk."""

ENTRY_DTYPE = "uint32"
"""NumPy name of the type of entries on disk."""
