"""Common parts of all commands: error messages, standard streams, suggestions, redaction."""
