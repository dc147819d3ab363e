"""Tokens of conversations on disk: an id, and two more bits that say what it is to the loss."""

FIRST = 1 << 30
"""Bit of an entry that begins a conversation."""

UNLEARNED = 1 << 29
"""Bit of an entry that carries no loss."""

ID = UNLEARNED - 1
"""Bits of an entry that are its token id."""

PADDING = -(1 << 31) | UNLEARNED
"""Entry (int32) of the unused tail of a window; it is never on disk."""

ENTRY_DTYPE = "uint32"
"""numpy name of the type of entries on disk."""
