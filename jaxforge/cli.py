"""What all entry points do around their `main`."""

import sys
from collections.abc import Callable

from jaxforge.errors import UserError


def run_main(main: Callable[[], int]) -> int:
    """Runs `main`, a user's mistake becoming one line on stderr.

    Returns:
        What `main` returns; 2 on a `UserError`; 130 when interrupted from the keyboard.
    """
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
