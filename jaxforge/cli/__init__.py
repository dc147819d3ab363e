"""What every command shares: errors as messages, standard streams, suggestions, redaction."""
