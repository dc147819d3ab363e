"""Pre-training of decoder language models in JAX, with the loop semantics of PyTorch's loops."""

import os.path
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxforge.run import Run as Run

    __version__: str

# A command, about to be found and imported. Nothing is lost where one of ours is ended, so Ctrl-C
# ends it at once, as the system does it: Python's own way would raise an exception in the middle of
# some library, which not all of them survive, and none while compiled code runs. Who wants more
# asks for it: `training.preemption`, `cli.run_main`.
_IS_COMMAND = sys.argv[:1] == ["-m"] or os.path.basename("".join(sys.argv[:1])) == "jaxforge"
if _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """What takes time to import, once it is asked for."""
    if name == "Run":
        from jaxforge.run import Run

        return Run
    if name == "__version__":
        from importlib.metadata import version

        return version("jaxforge")
    raise AttributeError(f"module 'jaxforge' has no attribute {name!r}")
