"""An object that lives in a process of its own, so that variants do not share settings.

IPEX replaces operators of the process that imports it, and an ISA cap is read once per process:
variants are comparable only in fresh processes. The notebook that uses it:
``03_finetune_one_node``.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from unittest.mock import patch


class WorkerError(RuntimeError):
    """The worker raised, died or was too slow; the message says which and where."""


def _serve(connection, build, arguments):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt reaches the parent, which ends us
    try:
        target = build(*arguments)
        connection.send((True, None))
        while True:
            method, values = connection.recv()
            connection.send((True, getattr(target, method)(*values)))
    except EOFError:
        return
    except Exception:
        connection.send((False, traceback.format_exc()))


class Worker:
    """Builds ``build(*arguments)`` in a fresh process and calls its methods there.

    A context manager: the process has ended when the block is left. ``build``, the arguments
    and what the methods return must be picklable. ``timeout`` limits the start and each call,
    in seconds; ``variables`` are added to the process's environment. Raises WorkerError, which
    names the worker.
    """

    def __init__(
        self,
        name: str,
        build: Callable,
        *arguments,
        timeout: float = 120,
        variables: Mapping[str, str] | None = None,
    ):
        self.name = name
        self.timeout = timeout
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, build, arguments), name=name, daemon=True
        )
        with patch.dict(os.environ, variables or {}):
            self._process.start()
        theirs.close()
        try:
            self._answer("start")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *values):
        """Calls a method of the object and returns its result."""
        self._connection.send((method, values))
        return self._answer(method)

    def _answer(self, what):
        if not self._connection.poll(self.timeout):
            raise WorkerError(f"worker {self.name!r}: no answer to {what!r} in {self.timeout} s")
        try:
            succeeded, result = self._connection.recv()
        except EOFError:
            self._process.join(5)
            code = self._process.exitcode
            raise WorkerError(f"worker {self.name!r} died in {what!r} (exit code {code})") from None
        if not succeeded:
            raise WorkerError(f"worker {self.name!r} failed in {what!r}:\n{result}")
        return result

    def close(self) -> None:
        """Ends the process, by force where it does not end by itself within 2 seconds."""
        self._connection.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
