"""`python -m jaxforge.evaluate`, the same as `jaxforge evaluate`, for launchers of modules."""

from jaxforge.__main__ import entry

if __name__ == "__main__":
    raise SystemExit(entry("evaluate"))
