"""Backward in a second thread, as on NPU and CUDA; on CPU autograd uses the caller's thread.

:func:`install` replaces the two functions through which every backward enters the engine
(``Tensor.backward`` and reentrant checkpointing call the first).  The caller waits for the thread
and gets its exceptions.  A nested backward stays in that thread, and so does one where autograd's
multithreading is disabled, which runs in the caller's thread on devices, too.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import torch


def install() -> None:
    """Run all later backwards of this process in one second thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="backward")
    thread = pool.submit(threading.get_ident).result()

    def apart(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread or not torch._C._is_multithreading_enabled():
                return call(*args, **kwargs)
            return pool.submit(call, *args, **kwargs).result()

        return in_thread

    for name in ("backward", "grad"):
        setattr(torch.autograd, name, apart(getattr(torch.autograd, name)))
