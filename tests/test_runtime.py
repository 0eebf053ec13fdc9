import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import runtime
from helpers.runtime import (
    Core,
    Hardware,
    Rank,
    RuntimeLimit,
    hardware,
    settings,
    shares,
    variables,
)
from helpers.workers import Worker


def node(sockets: int, cores: int, threads: int = 1, quota: float | None = None) -> Hardware:
    """A node as Linux numbers it: first threads of all cores, then the second ones."""
    total = sockets * cores
    made = [
        Core(core // cores, tuple(core + total * thread for thread in range(threads)))
        for core in range(total)
    ]
    return Hardware(tuple(made), quota)


def system(tmp_path, topology: dict[int, tuple[int, int]], **cgroup: str):
    """A /sys with a socket and a core number for each CPU."""
    for cpu, (socket, core) in topology.items():
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")
    for name, text in cgroup.items():
        file = tmp_path / "fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def computing(found, rank: int) -> set[int]:
    mask = int(found["I_MPI_PIN_DOMAIN"].value.strip("[]").split(",")[rank], 16)
    return {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}


def test_the_published_node():
    # 2022: two ranks on 32 cores, two workers each; the post gave each rank 24 threads
    found = settings(node(1, 32, threads=2), ranks=2, workers=2, preload=())
    assert variables(found) == {
        "OMP_NUM_THREADS": "14",
        "I_MPI_PIN_DOMAIN": "[0x3fff,0x3fff0000]",
        "OMP_PROC_BIND": "close",
        "OMP_PLACES": "cores",
        "CCL_WORKER_COUNT": "2",
        "CCL_WORKER_AFFINITY": "14,15,30,31",
    }


def test_one_socket_one_rank():
    found = variables(settings(node(1, 4), ranks=1, preload=()))
    assert found["OMP_NUM_THREADS"] == "4"
    assert found["I_MPI_PIN_DOMAIN"] == "[0xf]"
    assert found["CCL_WORKER_OFFLOAD"] == "0"


@pytest.mark.parametrize("threads", [1, 2])
def test_two_sockets_give_each_rank_one(threads):
    machine = node(2, 16, threads)
    found = settings(machine, ranks=2, preload=())
    assert found["OMP_NUM_THREADS"].value == "15"
    assert computing(found, 0) == set(range(15))
    assert computing(found, 1) == set(range(16, 31))
    assert found["CCL_WORKER_AFFINITY"].value == "15,31"


def test_a_container_with_three_cores_out_of_two_sockets():
    machine = Hardware((Core(0, (6,)), Core(0, (7,)), Core(1, (8,))))
    assert [len(part) for part in shares(machine, 2)] == [1, 1]
    assert variables(settings(machine, 3, preload=()))["I_MPI_PIN_DOMAIN"] == "[0x40,0x80,0x100]"


def test_a_quota_counts_like_missing_cores():
    found = settings(node(1, 8, quota=3.5), ranks=1, preload=())
    assert found["OMP_NUM_THREADS"].value == "3"
    assert settings(node(1, 8, quota=0.5), ranks=1, preload=())["OMP_NUM_THREADS"].value == "1"


def test_intels_openmp_has_variables_of_its_own():
    found = variables(settings(node(1, 4), 1, preload=("libtcmalloc.so.4", "/x/libiomp5.so")))
    assert found["LD_PRELOAD"] == "libtcmalloc.so.4:/x/libiomp5.so"
    assert found["KMP_BLOCKTIME"] == "1"
    assert "OMP_PLACES" not in found


@pytest.mark.parametrize(
    ("ranks", "workers", "message"),
    [
        (5, None, "5 ranks don't go on 4 cores.*start 1 to 4 ranks"),
        (0, None, "0 ranks"),
        (2, 2, "2 of 2 cores a rank for oneCCL leave none to compute: choose 0 to 1"),
        (1, -1, "choose 0 to 3"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, workers, message):
    with pytest.raises(RuntimeLimit, match=message):
        settings(node(1, 4), ranks, workers, preload=())


@given(st.data())
def test_no_core_is_used_twice(data):
    machine = node(
        data.draw(st.integers(1, 4)), data.draw(st.integers(1, 24)), data.draw(st.integers(1, 2))
    )
    ranks = data.draw(st.integers(1, len(machine.cores)))
    share = min(map(len, shares(machine, ranks)))
    workers = data.draw(st.integers(0, share - 1))
    found = settings(machine, ranks, workers, preload=())
    used = [cpu for rank in range(ranks) for cpu in computing(found, rank)]
    if workers:
        used += map(int, found["CCL_WORKER_AFFINITY"].value.split(","))
    assert len(used) == len(set(used)) == ranks * share
    assert set(used) <= {core.threads[0] for core in machine.cores}
    assert found["OMP_NUM_THREADS"].value == str(share - workers)


def test_hardware_threads_of_a_core_belong_together(tmp_path):
    folder = system(tmp_path, {0: (0, 0), 1: (0, 1), 2: (1, 0), 4: (0, 0), 5: (0, 1), 6: (1, 0)})
    machine = hardware(folder, {0, 1, 2, 4, 6})
    assert machine == Hardware((Core(0, (0, 4)), Core(0, (1,)), Core(1, (2, 6))), None)


@pytest.mark.parametrize(
    ("cgroup", "quota"),
    [
        ({"cpu_max": "350000 100000\n"}, 3.5),
        ({"cpu_max": "max 100000\n"}, None),
        ({"cpu__cpu.cfs_quota_us": "200000", "cpu__cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu__cpu.cfs_quota_us": "-1", "cpu__cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quotas_of_containers(tmp_path, cgroup, quota):
    assert hardware(system(tmp_path, {0: (0, 0)}, **cgroup), {0}).quota == quota


def test_without_topology_each_cpu_is_a_core(tmp_path):
    assert hardware(tmp_path, {3, 5}) == Hardware((Core(0, (3,)), Core(0, (5,))), None)


def test_this_machine():
    machine = hardware()
    assert {cpu for core in machine.cores for cpu in core.threads} == os.sched_getaffinity(0)
    told = runtime.explain(settings(machine, 1))
    assert told.startswith(f"OMP_NUM_THREADS={len(machine.usable)}   # {len(machine.usable)} cores")


def test_a_rank_loads_is_pinned_and_watched():
    cpu = min(os.sched_getaffinity(0))
    with Worker("a", Rank, "array:array", "b", b"x" * 2**24) as rank:
        before = rank.call("faults")
        rank.call("load")
        assert rank.call("count", ord("x")) == 2**24
        assert rank.call("value", "typecode") == "b"
        assert rank.call("faults") > before
        memory = rank.call("memory")
        assert memory["peak"] >= memory["now"] > 2**24
        rank.call("pin", {cpu})
        assert rank.call("cpus") == {cpu}
        assert rank.call("has_loaded", "libc.so")
        assert not rank.call("has_loaded", "no such library")


class Tuned:
    """Takes and gives back 64 MB, in a process that may be tuned."""

    def __init__(self, tuned):
        self.said = runtime.tune() if tuned else ""

    def threads(self):
        import torch

        return torch.get_num_threads()

    def faults(self):
        """Page faults of taking 64 MB, and giving them back, 40 times."""
        import torch

        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(40):
            torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_tuned_process_keeps_freed_memory_and_has_a_thread_a_core(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Worker("tuned", Tuned, True) as tuned, Worker("plain", Tuned, False) as plain:
        # the heap needs some rounds until it has found its size
        assert tuned.call("faults") < plain.call("faults") / 2
        assert tuned.call("threads") == len(hardware().usable)


def test_a_tuned_process_keeps_the_threads_that_a_launcher_chose():
    with Worker("tuned", Tuned, True, variables={"OMP_NUM_THREADS": "1"}) as tuned:
        assert tuned.call("threads") == 1


def test_a_rank_that_is_not_loaded_says_so():
    with pytest.raises(AttributeError, match="array:array is not loaded; call load"):
        Rank("array:array", "b").count(1)
