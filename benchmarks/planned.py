"""Reports of `jaxforge plan --json`, for scripts that tabulate them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxforge.parallel.mesh import describe_mesh

CONFIGS = Path(__file__).parents[1] / "configs" / "llama"


def report(config: Path, topology: str, *overrides: str) -> dict[str, Any]:
    """Return the report of a config on target hardware.

    Args:
        config: a TOML file.
        topology: value of `--topology`.
        overrides: further arguments.

    Raises:
        SystemExit: the command printed no plan.
    """
    command = [sys.executable, "-m", "jaxforge.plan", f"--config={config}",
               f"--topology={topology}", "--json", *overrides]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{config.name} on {topology}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def mesh_in_words(report: dict[str, Any]) -> str:
    """Return the mesh of a report, such as `dp_shard 4 x tp 2`."""
    return describe_mesh(report["mesh"]) if report.get("mesh") else ""
