import os
import signal
import time

import pytest

from helpers.workers import Worker, WorkerError


class Counter:
    def __init__(self, start):
        if start < 0:
            raise ValueError("negative start")
        self.value = start

    def add(self, step):
        self.value += step
        return self.value

    def pid(self):
        return os.getpid()

    def variable(self, name):
        return os.environ.get(name)

    def die(self):
        os.kill(os.getpid(), signal.SIGILL)

    def sleep(self):
        time.sleep(60)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_state_stays_in_a_process_that_ends_with_the_block():
    with Worker("counter", Counter, 5) as worker:
        assert worker.call("add", 2) == 7
        assert worker.call("add", 3) == 10
        pid = worker.call("pid")
        assert pid != os.getpid() and is_alive(pid)
    assert not is_alive(pid)


def test_an_exception_carries_name_method_and_traceback():
    with (
        pytest.raises(WorkerError, match=r"'bad' failed in 'start'(?s:.*)negative start"),
        Worker("bad", Counter, -1),
    ):
        pass


def test_a_killed_worker_is_an_error_not_a_hang():
    with (
        pytest.raises(WorkerError, match=r"'illegal' died in 'die' \(exit code -4\)"),
        Worker("illegal", Counter, 0) as worker,
    ):
        worker.call("die")


def test_variables_are_the_workers_alone():
    with Worker("counter", Counter, 0, variables={"OF_THE_WORKER": "1"}) as worker:
        assert worker.call("variable", "OF_THE_WORKER") == "1"
    assert "OF_THE_WORKER" not in os.environ


def test_a_slow_worker_is_stopped():
    with Worker("slow", Counter, 0, timeout=10) as worker:
        pid = worker.call("pid")
        worker.timeout = 0.5
        with pytest.raises(WorkerError, match=r"no answer to 'sleep' in 0.5 s"):
            worker.call("sleep")
    assert not is_alive(pid)
