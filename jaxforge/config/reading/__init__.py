"""Parsing of TOML files and command-line settings into a `JobConfig`, with error messages."""
