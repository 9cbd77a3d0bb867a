"""A process that runs functions of the tests: started by the first call, and after a kill again."""

from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.context import BaseContext
from typing import Any


class Worker:
    """One process.

    Args:
        context: how it is started.
        prepare: called first in the process, with ``given``.
    """

    def __init__(self, context: BaseContext, prepare: Callable[..., None], *given: Any) -> None:
        self._new = lambda: ProcessPoolExecutor(1, context, prepare, given)
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start ``function(*args)``; the process imports the function by its name.

        If the process dies, the future has a ``BrokenProcessPool``.
        """
        self._pool = self._pool or self._new()
        return self._pool.submit(function, *args)

    def kill(self) -> None:
        """End this process, and only this."""
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown()
            self._pool = None
