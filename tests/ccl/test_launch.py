"""Ranks, world sizes and addresses: what launchers say, and what is refused."""

import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ccl.launch import LAUNCHERS, LaunchError, placement
from tests.ccl import ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPI = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("variables", "mpi"), [(TORCHRUN, False), (MPI, True), (TORCHRUN | MPI, True)]
)
def test_placement(variables, mpi):
    place = placement(variables)
    assert (place.rank, place.world_size) == (3, 8)
    assert (place.local_rank, place.local_size) == (1, 2)
    assert place.mpi == mpi
    assert place.source == ("Intel MPI's mpiexec" if mpi else "torchrun's variables")


def test_local_rank_may_be_left_out():
    place = placement({"RANK": "3", "WORLD_SIZE": "8"})
    assert place.local_rank is place.local_size is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "no launcher's variables.*mpiexec.*torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI started this process"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "1"},
            "Open MPI started 4 processes.*world of 1: each would train alone",
        ),
        ({"SLURM_NTASKS": "2"}, "srun started this process"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is out of range: WORLD_SIZE is 8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1 is out of range"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is out of range: LOCAL_WORLD_SIZE is 2"),
        (TORCHRUN | {"RANK": "two"}, "RANK='two' is not a whole number"),
        (MPI | {"PMI_SIZE": "1", "PMI_RANK": "0"}, "MPI_LOCALNRANKS=2 can't be"),
        (MPI | {"RANK": "0", "WORLD_SIZE": "1"}, "rank 0 of 1 but Intel MPI.* rank 3 of 8"),
        (MPI | {"RANK": "2", "WORLD_SIZE": "8"}, "rank 2 of 8 but Intel MPI.* rank 3 of 8"),
    ],
)
def test_contradictions(variables, message):
    with pytest.raises(LaunchError, match=message):
        placement(variables)


@given(
    st.dictionaries(
        st.sampled_from([name for names in LAUNCHERS.values() for name in names]),
        st.integers(-1, 4).map(str),
    )
)
def test_placement_is_refused_or_holds_together(variables):
    try:
        place = placement(variables)
    except LaunchError:
        return
    assert 0 <= place.rank < place.world_size
    if place.local_rank is not None:
        assert 0 <= place.local_rank < place.local_size <= place.world_size
        assert place.local_rank <= place.rank
    for rank, size, *_ in LAUNCHERS.values():
        assert variables.get(rank, str(place.rank)) == str(place.rank)
        assert variables.get(size, str(place.world_size)) == str(place.world_size)


def hello(*places: dict[str, str], timeout: float = 60) -> list[ranks.Ended]:
    """The hello program, once for each set of variables."""
    command, port = [sys.executable, "-m", "tests.ccl.programs", "hello"], ranks.free_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return ranks.run(
        [(command, ranks.clean_environment(**(shared | place))) for place in places], timeout
    )


def test_two_processes_that_claim_one_rank():
    first = {"RANK": "0", "WORLD_SIZE": "3"}
    second = {"RANK": "1", "WORLD_SIZE": "3"}
    output = "".join(end.output for end in hello(first, second, second) if end.code != 0)
    assert "a second process claims rank 1" in output
    assert "rank 2 did not come within" in output


def test_two_processes_that_claim_rank_zero():
    first = {"RANK": "0", "WORLD_SIZE": "2"}
    output = "".join(end.output for end in hello(first, first) if end.code != 0)
    assert "the port taken, by another job or another rank 0" in output


def test_two_ranks_on_one_slot():
    local = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for end in hello(local | {"RANK": "0"}, local | {"RANK": "1"}):
        assert end.code != 0
        assert "ranks [0, 1] all claim slot 0 of host" in end.output


def test_world_sizes_that_differ():
    ends = hello({"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "3"})
    assert all(end.code != 0 for end in ends)
    assert "world sizes differ" in ends[0].output


def test_no_address():
    (end,) = hello({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""})
    assert end.code != 0 and "MASTER_ADDR and MASTER_PORT are not set" in end.output


@pytest.fixture
def oneccl():
    try:
        version("oneccl-cpu")
    except PackageNotFoundError:
        pytest.skip("oneCCL is not installed")


@pytest.mark.usefixtures("oneccl")
def test_worlds_of_size_one_under_mpiexec():
    end = ranks.mpiexec("hello", 2, RANK="0", WORLD_SIZE="1")
    assert end.code != 0
    assert "rank 0 of 1 but Intel MPI's mpiexec: rank 1 of 2" in end.output


@pytest.mark.usefixtures("oneccl")
def test_local_ranks_that_nobody_told():
    ends = hello({"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"})
    for rank, end in enumerate(ends):
        assert f"local_rank={rank}, local_size=2" in end.output, end.output
        assert "ccl 2" in end.output


@pytest.mark.usefixtures("oneccl")
def test_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(ranks.free_port()), "-m", "tests.ccl.programs", "hello"]
    (end,) = ranks.run([(command, ranks.clean_environment())], 60)
    ranks.check(end, "from torchrun's variables; master 127.0.0.1")
    assert end.output.count("ccl 2") == 2


@pytest.mark.usefixtures("oneccl")
def test_one_rank_without_oneccl_moves_all_to_gloo(tmp_path):
    lacking = {"RANK": "1", "WORLD_SIZE": "2", "CCL_ROOT": str(tmp_path)}
    ends = hello({"RANK": "0", "WORLD_SIZE": "2"}, lacking)
    ranks.check(ends, "gloo 2")
    assert "rank 1 has no oneCCL" in ends[0].output
    assert "ALL RANKS USE GLOO" in ends[0].output


def test_a_binding_that_cannot_be_loaded_means_gloo_for_all_said_loudly(tmp_path):
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("raise ImportError('planted symbol')")
    ended = ranks.mpiexec("hello", 2, PYTHONPATH=f"{tmp_path}:{ranks.ROOT}")
    ranks.check(ended, "ALL RANKS USE GLOO")
    assert "planted symbol" in ended.output
    assert "pip uninstall oneccl_bindings_for_pytorch" in ended.output
    assert ended.output.count("gloo 2") == 2


def test_an_installed_binding_is_used_and_said(tmp_path):
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text(
        "import torch.distributed as dist\n"
        "from helpers.ccl import build\n"
        "__version__ = '2.8.0-planted'\n"
        "dist.Backend.register_backend('ccl', build.load().create, devices=['cpu'])\n"
    )
    ended = ranks.mpiexec("hello", 2, PYTHONPATH=f"{tmp_path}:{ranks.ROOT}")
    ranks.check(ended, "backend ccl (oneccl_bindings_for_pytorch 2.8.0-planted)")
