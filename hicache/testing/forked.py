"""A call in a forked child of the test's own process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

LIMIT_S = 60


def ends_well_in_child(call: Callable[[], object]) -> bool:
    """Fork, make the call in the child, and end that without any of Python's own clean-up; whether nothing was raised.

    A child that hangs is killed after ``LIMIT_S`` seconds.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    code = 1
    try:
        call()
        code = 0
    except BaseException:  # noqa: BLE001  the parent is told by the code
        traceback.print_exc()
    finally:
        os._exit(code)
