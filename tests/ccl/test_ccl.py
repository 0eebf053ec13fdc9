"""The ccl backend: its collectives, errors and trainings, on ranks started both ways."""

import os
import shutil
import signal
import time
from importlib.metadata import PackageNotFoundError, version

import pytest

from helpers.ccl import build
from tests.ccl import ranks

try:
    version("oneccl-cpu")
except PackageNotFoundError:
    pytest.skip("oneCCL is not installed", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def built():
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("no C++ compiler, so no oneCCL backend")
    build.build()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_over_mpi(size):
    ranks.check(ranks.mpiexec("matrix", size, timeout=120), "PASSED")


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_over_tcp(size):
    ranks.check(ranks.plain("matrix", size, timeout=120), "PASSED")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_shapes(size):
    ranks.check(ranks.mpiexec("random_shapes", size), "PASSED")


@pytest.mark.parametrize("start", [ranks.mpiexec, ranks.plain])
@pytest.mark.parametrize("program", ["asynchronous", "threads"])
def test_in_flight(program, start):
    ranks.check(start(program, 2), "PASSED")


@pytest.mark.parametrize("start", [ranks.mpiexec, ranks.plain])
def test_groups_objects_and_another_start(start):
    ranks.check(start("groups", 3), "PASSED")


@pytest.mark.parametrize("start", [ranks.mpiexec, ranks.plain])
def test_pieces(start):
    ranks.check(start("pieces", 2, CCL_BACKEND_MAX_BYTES="64"), "PASSED")


def test_errors_name_rank_host_collective_cause_and_mend():
    ranks.check(ranks.mpiexec("errors", 2), "PASSED")


def test_mismatched_calls_are_found_in_debug_mode():
    ranks.check(ranks.mpiexec("mismatched", 2, TORCH_DISTRIBUTED_DEBUG="DETAIL"), "PASSED")


def test_a_killed_peer_raises_on_the_others_who_can_leave():
    *others, dead = ranks.plain("killed", 3, timeout=40)
    assert dead.code == -signal.SIGKILL
    ranks.check(others, "PASSED")
    for rank, other in enumerate(others):
        assert f"ccl:all_reduce on rank {rank} of 3 (host {os.uname().nodename})" in other.output


def test_a_late_peer_raises_in_a_barrier():
    ranks.check(ranks.plain("late", 2, timeout=40), "PASSED")


def test_a_killed_peer_ends_the_run_of_mpiexec():
    assert ranks.mpiexec("killed", 2, timeout=40).code != 0


@pytest.mark.parametrize("program", ["raising", "raising_in_flight"])
def test_a_raising_rank_ends_the_run_of_mpiexec(program):
    end = ranks.mpiexec(program, 2, timeout=25)  # less than the collective's own limit
    assert end.code != 0 and "planted" in end.output


def test_leaving_with_an_operation_in_flight():
    begun = time.monotonic()
    ranks.check(ranks.plain("in_flight", 2, timeout=25), "LEAVING")
    assert time.monotonic() - begun < 25


def test_an_absent_rank_is_named():
    ranks.check(ranks.plain("absent", 2, timeout=40), "PASSED")


@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_gloo_and_one_process(size):
    ranks.check(ranks.mpiexec("training", size), "PASSED")


@pytest.mark.parametrize("start", [ranks.mpiexec, ranks.plain])
def test_sharded_training_and_uneven_inputs(start):
    ranks.check(start("sharded", 2), "PASSED")


@pytest.mark.slow
@pytest.mark.parametrize("start", [ranks.mpiexec, ranks.plain])
def test_more_than_two_gigabytes(start):
    gigabytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if gigabytes < 12:
        pytest.skip(f"needs 12 GB of free memory, {gigabytes:.0f} GB are free")
    ranks.check(start("large", 2, timeout=200), "PASSED")
