"""What all entry points do around their `main`."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from jaxforge.errors import StorageError, UserError


def run_main(main: Callable[[], int]) -> int:
    """Runs `main`; failures that are not our own mistakes become one message on stderr.

    Returns:
        What `main` returns, else the error's exit code; 130 when interrupted from the keyboard.
    """
    try:
        return main()
    except (UserError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def leave(code: int, patience: float = 30.0) -> NoReturn:
    """Ends the process as `SystemExit` does, but does not wait for ever for threads.

    The interpreter joins them before anything else, and one may hang in a read from a file system
    that does not answer.

    Args:
        code: exit code.
        patience: seconds that threads have to come to their end.
    """
    timer = threading.Timer(patience, _leave_behind, [code])
    timer.daemon = True
    timer.start()
    atexit.register(timer.cancel)  # called when the threads have ended
    raise SystemExit(code)


def _leave_behind(code: int) -> None:
    others = set(threading.enumerate()) - {threading.main_thread()}
    names = ", ".join(sorted(thread.name for thread in others if not thread.daemon))
    print(f"exiting with {code}, although threads go on: {names}", file=sys.stderr, flush=True)
    os._exit(code)
