"""`python -m jaxforge.prepare`, the same as `jaxforge prepare`, for launchers of modules."""

from jaxforge.__main__ import entry

if __name__ == "__main__":
    raise SystemExit(entry("prepare"))
