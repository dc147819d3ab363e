"""`python -m jaxforge.train`, the same as `jaxforge train`, for launchers of modules."""

from jaxforge.__main__ import entry

if __name__ == "__main__":
    raise SystemExit(entry("train"))
