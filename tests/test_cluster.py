"""The cluster of MPI ranks: started, checked, broken and gone, on this machine."""

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ipyparallel
import psutil
import pytest

from helpers import cluster, nodes, runtime
from helpers.ccl import mpi
from helpers.cluster import Cluster, ClusterError, by_rank
from helpers.lab import Lab, NoLab
from helpers.nodes import Host, read_hosts

ROOT = Path(__file__).parents[1]
needs_mpi = pytest.mark.skipif(not mpi.MPIEXEC.exists(), reason="Intel MPI is not installed")
SUM = """
import torch
import torch.distributed as dist
from helpers import ccl
found = ccl.init()
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
dist.destroy_process_group()
summed = found.place.rank, x.tolist()
"""
CORES = len(runtime.hardware().usable)


def ours() -> set[int]:
    """Processes that a cluster would leave."""
    words = ("ipyparallel", "helpers.engine", "helpers.nodes", "mpiexec", "hydra")
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        told = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(word in told for word in words):
            found.add(process.pid)
    return found


def gone_within(before: set[int], seconds: float) -> set[int]:
    deadline = time.monotonic() + seconds
    while (left := ours() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def fake_ssh(folder, monkeypatch, script: str) -> None:
    if " " in sys.prefix:
        pytest.skip("a path with a space is refused before ssh is asked")
    (folder / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# ---------------------------------------------------------------- hosts


def test_hosts_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# the master\nlocalhost:2\n\n10.0.0.1   # the second\nnode3:4\n")
    assert read_hosts(file) == (Host("localhost", 2), Host("10.0.0.1"), Host("node3", 4))
    assert read_hosts(None) == (Host("localhost"),)
    assert read_hosts(["fe80::1"]) == (Host("fe80::1"),)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["node1 node2"], "line 1: 'node1 node2' is not 'name' or 'name:slots'"),
        (["node1", "node2:x"], "line 2: 'node2:x' is not"),
        (["node2:0"], "slots above 0"),
        ([":2"], "line 1"),
        (["a", "b", "a"], "line 3: a stands there twice"),
        (["-oProxyCommand=x"], "line 1: '-oProxyCommand=x' is not"),
        (["# nothing"], "no hosts"),
    ],
)
def test_a_broken_hosts_file_is_refused_with_its_line(lines, message):
    with pytest.raises(ClusterError, match=message):
        read_hosts(lines)


def test_a_missing_hosts_file():
    with pytest.raises(ClusterError, match="hosts file /nowhere/hosts can't be read"):
        read_hosts("/nowhere/hosts")


# ---------------------------------------------------------------- what stops a start


@needs_mpi
@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "Permission denied (publickey,password).",
            "node1: it wants a password.*ssh-copy-id node1",
        ),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!", "host key has changed.*ssh-keygen -R node1"),
        ("Host key verification failed.", "host key is not known.*ssh node1"),
        ("connect to host node1 port 22: Connection refused", "node1: no ssh server"),
        ("connect to host node1 port 22: Connection timed out", "does not answer.*port 22"),
        ("Could not resolve hostname node1", "nobody knows this name"),
        ("sh: /venv/python: No such file or directory", "make the environment at the same path"),
        ("something new", "node1: ssh .* failed: something new"),
    ],
)
def test_what_ssh_says_is_told_with_node_cause_and_mend(tmp_path, monkeypatch, said, message):
    fake_ssh(tmp_path, monkeypatch, f"echo '{said}' >&2; exit 255")
    before = ours()
    with pytest.raises(ClusterError, match=message), Cluster(["localhost", "node1"], 1):
        pass
    assert ours() == before


@needs_mpi
def test_a_node_that_never_answers_is_given_up(tmp_path, monkeypatch):
    fake_ssh(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(nodes, "PROBE_SECONDS", 1)
    with pytest.raises(ClusterError, match="node1: no answer within 1 s"), Cluster(["node1"], 1):
        pass


@needs_mpi
@pytest.mark.parametrize("part", ["python", "torch"])
def test_another_version_on_a_node_is_refused(tmp_path, monkeypatch, part):
    told = json.dumps(nodes.describe() | {part: "1.2.3"})
    fake_ssh(tmp_path, monkeypatch, f"echo '{told}'")
    with (
        pytest.raises(ClusterError, match=rf"node1 has {part} 1\.2\.3, localhost has"),
        Cluster(["localhost", "node1"], 1),
    ):
        pass


@needs_mpi
def test_more_ranks_than_cores_are_refused():
    with pytest.raises(ClusterError, match="localhost has .* cores for .*oversubscribe=True"):
        Cluster(None, CORES + 1).__enter__()


@needs_mpi
def test_more_ranks_than_slots_are_refused():
    with pytest.raises(ClusterError, match="localhost has 1 slots in the hosts file, and 2"):
        Cluster(["localhost:1"], 2).__enter__()


def test_without_mpiexec_the_mend_is_told(monkeypatch):
    monkeypatch.setattr(cluster, "MPIEXEC", Path("/nowhere/mpiexec"))
    with pytest.raises(ClusterError, match="no /nowhere/mpiexec: run env/setup.sh"):
        Cluster().__enter__()


@needs_mpi
@pytest.mark.parametrize("script", ["echo '{ welcome }'", "echo '{\"host\": 1'"])
def test_a_node_that_says_something_else_is_named(tmp_path, monkeypatch, script):
    fake_ssh(tmp_path, monkeypatch, script)
    with pytest.raises(ClusterError, match="node1: ssh .* failed"):
        Cluster(["node1"], 1).start()


@needs_mpi
def test_a_path_that_mpiexec_can_not_carry_to_other_nodes_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/home/me/my course/.venv")
    with pytest.raises(ClusterError, match="path with a space.*my course.*move the course"):
        Cluster(["node1"], 1).start()
    with pytest.raises(NoLab, match="path with a space"):
        Lab(1).up()


def test_less_than_one_rank_is_refused():
    with pytest.raises(ClusterError, match="0 ranks a node: one at least"):
        Cluster(None, 0)


@needs_mpi
@pytest.mark.parametrize("seconds", [1.5, 3.0])
def test_an_interrupt_during_the_start_leaves_nothing(seconds):
    before, folders = ours(), set(Path(tempfile.gettempdir()).glob("cluster-*"))
    code = (
        "import signal\n"
        "from helpers.cluster import Cluster\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('go', flush=True)\n"
        "Cluster(None, 1).start()"
    )
    notebook = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert notebook.stdout.readline() == b"go\n"
    time.sleep(seconds)
    notebook.send_signal(signal.SIGINT)
    errors = notebook.communicate(timeout=30)[1].decode()
    assert "KeyboardInterrupt" in errors
    assert gone_within(before, 10) == set()
    assert set(Path(tempfile.gettempdir()).glob("cluster-*")) <= folders


@needs_mpi
def test_ranks_that_never_answer_are_given_up(monkeypatch):
    before = ours()
    monkeypatch.setattr(cluster, "_place", functools.partial(time.sleep, 600))
    with pytest.raises(ClusterError, match="all ranks came, 0 of 1 answered, and 12 s are over"):
        Cluster(None, 1, timeout=12).start()
    assert gone_within(before, 5) == set()


@needs_mpi
def test_a_controller_that_can_not_start_is_told(monkeypatch):
    found = nodes.Survey(
        {"localhost": nodes.describe() | nodes.capacity(1)}, "192.0.2.1"
    )  # not an address of ours
    monkeypatch.setattr(cluster, "survey", lambda *_: found)
    before = ours()
    with pytest.raises(ClusterError, match=r"the controller at 192\.0\.2\.1 did not start"):
        Cluster(None, 1).start()
    assert gone_within(before, 5) == set()


@needs_mpi
def test_a_cluster_that_is_forgotten_ends():
    before = ours()
    forgotten = Cluster(None, 1).start()
    with pytest.raises(ClusterError, match="started already"):
        forgotten.start()
    assert ours() - before
    del forgotten
    gc.collect()
    assert gone_within(before, 10) == set()


@needs_mpi
def test_engines_that_die_at_start_are_told_with_their_log():
    before = ours()
    with (
        pytest.raises(
            ClusterError, match=r"0 of 1 ranks came, and mpiexec has ended(?s:.*)planted"
        ),
        Cluster(None, 1, variables={"PYTHONPATH": str(ROOT / "tests/planted")}, timeout=30),
    ):
        pass
    assert gone_within(before, 10) == set()


# ---------------------------------------------------------------- a running cluster


@pytest.fixture(scope="module")
def pair():
    if not mpi.MPIEXEC.exists():
        pytest.skip("Intel MPI is not installed")
    before = ours()
    with Cluster(None, 2, oversubscribe=CORES < 2, variables={"COLOR": "red"}) as running:
        yield running
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert gone_within(before, 5) == set()


def test_the_view_is_in_the_order_of_ranks(pair):
    pair.view.execute("import os; mine = os.environ['PMI_RANK'], os.environ['COLOR']", block=True)
    assert pair.view["mine"] == [("0", "red"), ("1", "red")]
    assert [place["rank"] for place in pair.places] == [0, 1]
    assert {place["world_size"] for place in pair.places} == {2}


def test_no_core_belongs_to_two_ranks(pair):
    if CORES < 2:
        pytest.skip("one core, so ranks are not pinned")
    first, second = (set(place["cores"]) for place in pair.places)
    assert not first & second


def test_the_table_has_a_row_for_each_rank(pair):
    html = pair.table()._repr_html_()
    assert html.count("<tr") == 3
    assert "local_rank" in html


def test_an_interrupt_reaches_the_ranks(pair):
    waiting = pair.view.apply_async(time.sleep, 60)
    time.sleep(1)
    pair.client.send_signal(signal.SIGINT, block=True)
    waiting.wait(10)
    with pytest.raises(ipyparallel.error.CompositeError) as interrupted:
        waiting.get(timeout=1)
    for rank in range(2):
        assert f"[{rank}:apply]KeyboardInterrupt" in str(interrupted.value)
    assert pair.view.apply_sync(os.getenv, "PMI_RANK") == ["0", "1"]


def test_the_stacks_tell_who_waits_where(pair):
    # rank 1 does not come: rank 0 waits in the cell's third line
    waiting = pair.view.execute(
        "import os, time\nif os.environ['PMI_RANK'] == '0':\n    time.sleep(60)", block=False
    )
    time.sleep(1)
    where = [row["where, innermost first"] for row in pair.stacks()]
    pair.client.send_signal(signal.SIGINT, block=True)
    waiting.wait(10)
    assert where == ["cell:3", "idle"]
    with pytest.raises(ClusterError, match="not started"):
        Cluster().stacks()


def test_lines_that_mpiexec_cut_and_mixed_are_put_together_again():
    # as seen: two ranks' lines, read by mpiexec in pieces
    seen = (
        '[0]   File [0] "/a/b.py"[1] Stack (most recent call first):\n'
        '[1]   File "/c.py", line 4 in select\n'
        "[0] , line [0] 29[0]  in all_reduce\n"
    )
    assert by_rank(seen) == {
        0: '  File "/a/b.py", line 29 in all_reduce\n',
        1: 'Stack (most recent call first):\n  File "/c.py", line 4 in select\n',
    }
    assert by_rank("") == {}


def test_output_is_keyed_by_rank(pair, capsys):
    said = pair.view.execute("import os; print('I am', os.environ['PMI_RANK'])", block=False)
    said.get()
    said.display_outputs()
    printed = capsys.readouterr().out.split()
    assert printed == ["[stdout:0]", "I", "am", "0", "[stdout:1]", "I", "am", "1"]


def test_ranks_reduce_over_the_courses_backend(pair):
    pair.view.execute(SUM, block=True)
    assert pair.view["summed"] == [(0, [3.0] * 3), (1, [3.0] * 3)]


@needs_mpi
def test_engines_whose_number_is_not_their_rank_are_refused(monkeypatch):
    planted = str(ROOT / "tests/planted/reversed_engine.py")
    monkeypatch.setattr(cluster, "ENGINE", (sys.executable, planted))
    before = ours()
    with pytest.raises(ClusterError, match="rank 1 got the number 0 as an engine"):
        Cluster(None, 2, oversubscribe=CORES < 2).start()
    assert gone_within(before, 5) == set()


@needs_mpi
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_where_the_notebook_dies(how):
    before, folders = ours(), set(Path(tempfile.gettempdir()).glob("cluster-*"))
    code = (
        "import signal, time\n"
        "from helpers.cluster import Cluster\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # nohup ignores it
        "with Cluster(None, 1, say=lambda text: print(text, flush=True)): time.sleep(60)"
    )
    notebook = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert b"ready" in notebook.stdout.readline()
    assert ours() - before
    notebook.send_signal(how)
    notebook.wait(timeout=20)
    notebook.stdout.close()
    assert gone_within(before, 10) == set()
    assert set(Path(tempfile.gettempdir()).glob("cluster-*")) <= folders
