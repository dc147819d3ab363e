"""From TOML and command line to a `JobConfig`, and what is said of mistakes."""
