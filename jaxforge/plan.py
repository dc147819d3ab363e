"""`python -m jaxforge.plan`, the same as `jaxforge plan`, for launchers of modules."""

from jaxforge.__main__ import entry

if __name__ == "__main__":
    raise SystemExit(entry("plan"))
