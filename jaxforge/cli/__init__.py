"""Shared parts of every command: errors as messages, standard streams, suggestions, redaction."""
