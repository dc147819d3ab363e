"""What git knows of a file of code."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

_GIT_SEC = 60


def state(file: Path) -> dict[str, Any]:
    """Commit, and a hash of what differs from it; nothing where the file is not under git."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(file.parent), *arguments]
        try:
            ran = subprocess.run(command, capture_output=True, timeout=_GIT_SEC)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ran.stdout.decode(errors="replace") if ran.returncode == 0 else None

    if git("ls-files", "--error-unmatch", file.name) is None:  # as in an environment within a clone
        return {}
    commit, difference = git("rev-parse", "HEAD"), git("diff", "HEAD")
    if commit is None or difference is None:
        return {}
    found: dict[str, Any] = {"commit": commit.strip(), "changed": bool(difference)}
    if difference:
        found["difference_sha256"] = hashlib.sha256(difference.encode()).hexdigest()
    return found
