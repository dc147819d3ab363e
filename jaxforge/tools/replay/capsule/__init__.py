"""A run's ingredients and its curve in one file, by which others can make it again.

`ingredients` gathers what a step is made of, `jaxforge.cli.redaction` takes out what is nobody's
business, `archive` is the file, and `verify` makes steps of it again.
"""
