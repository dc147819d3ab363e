"""Tokens of conversations on disk: an id, and two more bits that say what it is to the loss."""

FIRST = 1 << 30
"""Bit of an entry that begins a conversation."""

UNLEARNED = 1 << 29
"""Bit of an entry that carries no loss: of a prompt, or padding."""

ID = UNLEARNED - 1
"""Bits of an entry that are its token id."""

ENTRY_DTYPE = "uint32"
"""numpy name of the type of entries on disk."""
