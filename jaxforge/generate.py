"""`python -m jaxforge.generate`, the same as `jaxforge generate`, for launchers of modules."""

from jaxforge.__main__ import entry

if __name__ == "__main__":
    raise SystemExit(entry("generate"))
