"""Pre-training of decoder language models in JAX, with the loop semantics of PyTorch's loops."""

import signal
import sys

# `python -m jaxforge.X`, about to be found and imported. Nothing is lost where a command of ours is
# ended, so Ctrl-C ends it at once, as the system does it: Python's own way would raise an exception
# in the middle of some library, which not all of them survive, and none while compiled code runs.
# Who wants more asks for it: `training.preemption`, `cli.run_main`.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
