"""Several nodes on this machine, and what a real cluster does on them, right and wrong."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers import network, nodes
from helpers.ccl import mpi
from helpers.cluster import Cluster, ClusterError
from helpers.lab import SCRIPT, Lab, LabError, NoLab
from tests.labs import lab_or_skip
from tests.test_cluster import gone_within, needs_mpi, ours

PREFIX, NET = "test", "10.78.0"
MESSAGE_BYTES = 4 << 20
TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from helpers import ccl

found = ccl.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False))
torch.manual_seed(dist.get_rank())
inputs = torch.randn(8, 1024)
model(inputs).square().mean().backward()
gradient = model.module.weight.grad.numpy()
weight, inputs = model.module.weight.detach().numpy(), inputs.numpy()
"""


@pytest.fixture(scope="module")
def lab():
    with lab_or_skip(3, PREFIX, NET) as nodes:
        yield nodes


def ssh(node: str, command: str) -> str:
    ran = subprocess.run(
        ["ssh", "-oBatchMode=yes", node, command], capture_output=True, text=True, timeout=20
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def run(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- the nodes


def test_each_node_has_a_name_and_an_address_of_its_own(lab):
    for number, node in enumerate(lab.nodes, 1):
        name, addresses = ssh(node, "hostname; ip -4 -o address show eth0").split("\n")
        assert name == node
        assert f"{NET}.{10 + number}/24" in addresses


def test_each_node_reaches_each_other_without_a_password(lab):
    for source in lab.nodes:
        for target in lab.nodes:
            assert ssh(source, f"ssh -oBatchMode=yes {target} hostname") == target


def test_sshd_listens_on_the_private_addresses_alone(lab):
    for number, node in enumerate(lab.nodes, 1):
        listening = ssh(node, "ss -Hltn 'sport = :22'")
        assert re.findall(r"(\S+):22\b", listening) == [f"{NET}.{10 + number}"]
    assert f"{NET}." not in run("ss", "-Hltn")  # nothing here, in the machine's own network


def test_up_again_changes_nothing(lab):
    before = {node: ssh(node, "pgrep -o sshd") for node in lab.nodes}
    assert "3 nodes are up already" in lab.up()
    assert {node: ssh(node, "pgrep -o sshd") for node in lab.nodes} == before


def test_the_status_tells_which_node_fails(lab):
    assert len(re.findall(r"\bworks\b", lab.status())) == 3
    state = lab.hosts.parent
    keys = state / "authorized_keys"
    text = keys.read_text()
    try:
        keys.write_text("")
        assert len(re.findall(r"\bFAILS\b", lab.status())) == 3
    finally:
        keys.write_text(text)


@pytest.mark.parametrize(("speed", "bits"), [("1gbit", 1e9), ("100mbit", 1e8)])
def test_a_link_gives_the_speed_it_was_set_to(lab, speed, bits):
    with lab.rate(speed):
        between = network.measure("test1", "test2", 0.5)
        downwards = network.measure("localhost", "test3", 0.5)
    # the bucket lets the first milliseconds through: not a timing of this machine
    for link in (between, downwards):
        assert 0.5 * bits < 8 * link.bandwidth < 1.3 * bits


def test_traffic_is_counted_for_both_ends(lab):
    before = lab.traffic()
    network.measure("test1", "test2", 0.1)
    after = lab.traffic()
    sent = after["test1"][1] - before["test1"][1]
    received = after["test2"][0] - before["test2"][0]
    assert sent > 1e6
    assert received == pytest.approx(sent, rel=0.05)


def test_delay_works_or_is_refused_with_the_reason(lab):
    try:
        with lab.rate("1gbit", "5ms"):
            latency = network.measure("test1", "test2", 0.2).latency
    except NoLab as reason:
        assert "no netem" in str(reason)
        assert "test-try" not in run("ip", "netns", "list")
    else:
        assert latency > 4e-3


@pytest.mark.parametrize("words", [("up", "none"), ("up", "0"), ("rate", "fast"), ("rate", "")])
def test_nonsense_is_refused(lab, words):
    with pytest.raises(LabError, match=words[0]):
        lab._run(*words)


def test_a_taken_network_is_refused(lab):
    with pytest.raises(LabError, match=rf"network {NET}.0/24 is in use here.*LAB_NET"):
        Lab(1, "other", NET).up()
    assert "other" not in run("ip", "netns", "list")


def test_measuring_names_the_node_that_does_not_answer(lab):
    with pytest.raises(network.NetworkError, match="test1 to nowhere: nowhere failed: .*resolve"):
        network.measure("test1", "nowhere")


def test_nothing_is_left_of_a_lab(lab):
    def traces():
        return (
            run("ip", "-o", "link"),
            run("ip", "netns", "list"),
            sorted(Path("/run").glob("course-*")),
            sorted(Path("/etc/ssh/ssh_config.d").glob("*")),
            sorted(Path("/etc/netns").glob("*")),
            run("pgrep", "-fc", "sshd -D -f /run"),
        )

    before = traces()
    with Lab(2, "gone", "10.79.0") as other:
        assert traces() != before
        assert ssh("gone2", "hostname") == "gone2"
    assert traces() == before
    assert "no nodes" in other.down()


def test_what_others_made_is_left_alone(lab):
    run("ip", "netns", "add", "other1")
    try:
        with pytest.raises(LabError, match="a network called other1, and it is not the lab's"):
            Lab(2, "other", "10.79.0").up()
        Lab(2, "other", "10.79.0").down()
        assert "other1" in run("ip", "netns", "list")
    finally:
        run("ip", "netns", "del", "other1")


def test_a_smaller_lab_is_part_of_a_larger_one_and_a_larger_one_is_refused(lab):
    with Lab(2, PREFIX, NET) as part:
        assert ssh(part.nodes[1], "hostname") == "test2"
    assert ssh("test3", "hostname") == "test3"  # leaving the block has removed nothing
    with pytest.raises(LabError, match="3 nodes are up, and may be in use"):
        Lab(4, PREFIX, NET).up()


def test_a_half_made_lab_is_made_again(lab):
    (lab.hosts.parent / "ready").unlink()
    assert "already" not in lab.up()
    assert ssh("test3", "hostname") == "test3"


def test_without_root_the_reason_is_told(tmp_path):
    if os.getuid() != 0:
        pytest.skip("shows what happens to a user who is not root, and needs root to become one")
    copy = tmp_path / "nodes"
    copy.write_bytes(SCRIPT.read_bytes())
    for path in (tmp_path, *list(tmp_path.parents)[:-2]):
        path.chmod(path.stat().st_mode | 0o055)
    ran = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "bash", copy, "up", "1"],
        env=os.environ | {"LAB_PREFIX": "nobody"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert ran.returncode == 3
    assert "needs root" in ran.stderr
    assert "ranks on this machine alone" in ran.stderr


# ---------------------------------------------------------------- a cluster on them


@pytest.fixture(scope="module")
def cluster(lab, tmp_path_factory):
    """Three ranks, started beside a stale controller's files, which must not be read."""
    home = tmp_path_factory.mktemp("ipython")
    stale = home / "profile_default/security"
    stale.mkdir(parents=True)
    for kind in ("client", "engine"):
        (stale / f"ipcontroller-{kind}.json").write_text('{"location": "10.0.0.1"}')
    before = ours()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(home))
        with Cluster(lab.hosts, 1, oversubscribe=True) as running:
            yield running
    assert gone_within(before, 5) == set()


@needs_mpi
def test_a_rank_on_each_node(cluster, lab):
    assert [place["host"] for place in cluster.places] == lab.nodes
    assert [place["rank"] for place in cluster.places] == [0, 1, 2]
    assert {place["nic"] for place in cluster.places} == {"eth0"}
    assert "<td>test3</td>" in cluster.table()._repr_html_()


@needs_mpi
def test_ranks_train_over_oneccl_across_the_bridge(cluster, lab):
    before = lab.traffic()
    cluster.view.execute(TRAIN, block=True)
    after = lab.traffic()
    assert {found.backend for found in cluster.view["found"]} == {"ccl"}
    # by hand: the mean of what each rank's own samples give
    expected = np.zeros((1024, 1024))
    for weight, inputs in cluster.view[("weight", "inputs")]:
        outputs = inputs @ weight.T
        expected += 2 / outputs.size * outputs.T @ inputs / 3
    for gradient in cluster.view["gradient"]:
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-7)
    # no sum without sending each rank's gradients, and getting those of others
    crossed = np.array([np.subtract(after[node], before[node]) for node in lab.nodes])
    assert (crossed > MESSAGE_BYTES).all()
    assert (crossed.sum(axis=0) >= 2 * (len(lab.nodes) - 1) * MESSAGE_BYTES).all()


@needs_mpi
@pytest.mark.slow
def test_the_master_can_be_a_node_and_a_rank_that_dies_on_another_is_noticed(lab):
    before = ours()
    with Cluster(["localhost", "test1"], 1, oversubscribe=True) as mixed:
        mixed.view.execute(TRAIN, block=True)
        np.testing.assert_array_equal(*mixed.view["gradient"])
        assert [place["nic"] for place in mixed.places] == ["tests", "eth0"]
        work = mixed.view.apply_async(time.sleep, 60)
        time.sleep(1)
        os.kill(mixed.places[1]["pid"], 9)
        work.wait(30)
        assert work.ready()
    assert gone_within(before, 10) == set()


@needs_mpi
def test_mpiexec_alone_reaches_all_nodes(lab):
    code = (  # one write a line, so that ranks don't write into each other's
        "import os, socket; from mpi4py import MPI; "
        "os.write(1, f'{MPI.COMM_WORLD.size} {socket.gethostname()}\\n'.encode())"
    )
    command = [mpi.MPIEXEC, "-f", lab.hosts, "-n", "3", "-ppn", "1", sys.executable, "-c", code]
    said = subprocess.run(
        command, env=os.environ | {"FI_PROVIDER": "tcp"}, capture_output=True, text=True, timeout=60
    )
    assert sorted(said.stdout.split("\n")[:-1]) == [f"3 {node}" for node in lab.nodes], said.stderr


@needs_mpi
def test_nothing_is_left_on_the_nodes_where_the_notebook_is_killed(lab):
    before = ours()
    code = (
        "import sys, time\n"
        "from helpers.cluster import Cluster\n"
        "say = lambda text: print(text, flush=True)\n"
        "with Cluster(['test1'], 1, say=say): time.sleep(60)"
    )
    notebook = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert b"ready" in notebook.stdout.readline()
    assert ours() - before
    notebook.kill()
    notebook.wait(timeout=20)
    notebook.stdout.close()
    assert gone_within(before, 10) == set()


# ---------------------------------------------------------------- what stops a start


def refused(lines, message: str) -> None:
    """A cluster on those hosts is refused with that message, soon, and leaves nothing."""
    before, began = ours(), time.monotonic()
    with pytest.raises(ClusterError, match=message), Cluster(lines, 1, oversubscribe=True):
        pass
    assert time.monotonic() - began < 30
    assert gone_within(before, 5) == set()


@pytest.fixture
def state(lab):
    """The lab's folder, put right again after the test."""
    kept = {path: path.read_bytes() for path in lab.hosts.parent.iterdir()}
    yield lab.hosts.parent
    for path, content in kept.items():
        path.write_bytes(content)


def reload(state: Path, node: str) -> None:
    os.kill(int((state / f"{node}.pid").read_text()), 1)
    time.sleep(0.5)


@needs_mpi
def test_a_node_that_is_off(lab):
    refused(["test1", f"{NET}.99"], rf"{NET}\.99: .*(No route|no network leads|does not answer)")


@needs_mpi
def test_a_node_without_sshd(lab):
    lab_without = [f"{NET}.1"]
    refused(["test1", *lab_without], rf"{NET}\.1: no ssh server answers there")


@needs_mpi
def test_a_node_that_asks_for_a_password(lab, state):
    (state / "authorized_keys").write_text("")
    refused(["test1", "test2"], "test2: it wants a password.*ssh-copy-id test2")


@needs_mpi
def test_a_changed_host_key(lab, state):
    lines = (state / "known_hosts").read_text().splitlines()
    keys = [line.rpartition(" ")[2] for line in lines]
    lines[1] = lines[1].replace(keys[1], keys[0])
    (state / "known_hosts").write_text("\n".join(lines) + "\n")
    refused(["test1", "test2"], "test2: its host key has changed.*ssh-keygen -R test2")


@needs_mpi
def test_one_node_under_two_names(lab):
    refused(["test1", f"{NET}.11"], rf"test1 and {NET}\.11 are the same node: remove one")


@needs_mpi
def test_another_torch_on_a_node(lab, state, tmp_path):
    other = tmp_path / "torch-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    settings = state / "test2.sshd"
    settings.write_text(settings.read_text() + f"SetEnv PYTHONPATH={tmp_path}\n")
    reload(state, "test2")
    try:
        refused(["test1", "test2"], r"test2 has torch 9\.9\.9, test1 has 2.*env/setup.sh on test2")
    finally:
        settings.write_text(settings.read_text().rpartition("SetEnv")[0])
        reload(state, "test2")


@needs_mpi
def test_closed_ports_between_nodes(lab):
    for node in ("test2", "test3"):  # they still reach the master, but not each other
        run("ip", "link", "set", node, "type", "bridge_slave", "isolated", "on")
    try:
        refused(lab.hosts, "test[23]: can't reach test[23] at .*, port .*open them between")
    finally:
        for node in ("test2", "test3"):
            run("ip", "link", "set", node, "type", "bridge_slave", "isolated", "off")


@needs_mpi
def test_nodes_that_share_a_machine_share_its_cores(lab):
    cores = len(os.sched_getaffinity(0))
    each = cores // 3 + 1
    with pytest.raises(ClusterError, match=rf"cores for {3 * each} ranks.*oversubscribe=True"):
        Cluster(lab.hosts, each).start()
    found = nodes.survey(nodes.read_hosts(lab.hosts))
    assert found.shares_machines
    assert found.variables(1)["OMP_NUM_THREADS"] == str(max(1, found.threads(1)))
