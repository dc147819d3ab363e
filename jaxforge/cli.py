"""What all entry points do around their `main`."""

import os
import sys
from collections.abc import Callable

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
