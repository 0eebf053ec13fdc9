"""env/nodes/prepare against the lab's nodes, made separate machines for it.

Each process of a node, and the script itself, sees through mounts of its own: a home folder, a
course folder, and stand-ins for programs. What takes long (apt-get, env/setup.sh) is a stand-in;
ssh is real.
"""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.lab import Lab
from tests.labs import lab_or_skip

ROOT = Path(__file__).resolve().parents[1]
PREFIX, NET = "prep", "10.76.0"
CARRIED = (
    "env/nodes",
    "env/requirements.txt",
    "env/requirements.lock",
    "helpers",
    "README.md",
    ".gitignore",
)
SITE = next(path for path in sys.path if path.endswith("site-packages"))
BASE = Path(sys.executable).resolve()
SET_UP = f"""#!/bin/bash
set -e
cd "$(dirname "$0")/.."
mkdir -p .venv && echo "$PYTHON" >> .venv/calls
real=$("$PYTHON" -c 'import os, sys; print(os.path.realpath(sys.executable))')
site=.venv/lib/${{real##*/}}/site-packages
mkdir -p .venv/bin "$site"
ln -sf "$real" .venv/bin/python
echo "home = ${{real%/*}}" > .venv/pyvenv.cfg
printf '%s\\n' "$PWD" '{SITE}' > "$site/course.pth"
echo "$PWD $(cat env/requirements.txt env/requirements.lock | sha256sum)" > .venv/setup.stamp
"""
# "secret", as /etc/shadow has it
SECRET = (
    "$6$course$d6TKapBjoWVRZlwX6CQj2hDrQQxBshjfwIRIe1mnaTNTdlt9sjm5hXBmZ6V8VzDasa5/"
    "MNcGRpUS6x5e6zs1w/"
)
# `installed` names the file that apt-get makes
LDCONFIG = "#!/bin/sh\ncat {installed} 2>/dev/null\n"
APT = """#!/bin/sh
echo "$*" >> {calls}
case $* in *install*) echo libtcmalloc.so.4 > {installed};; esac
"""


def run(*command, **options) -> str:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True, **options
    ).stdout


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Machine:
    """A folder for a home folder of its own, and for programs that stand in for others."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(mode=0o700, parents=True)
        self.installed, self.calls = folder / "installed", folder / "calls"
        self.installed.write_text("libtcmalloc.so.4")
        users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        for user in users:
            if int(user[2]) == os.getuid():
                user[5] = str(self.home)
        (folder / "passwd").write_text("".join(":".join(user) + "\n" for user in users))
        self.see(folder / "passwd", Path("/etc/passwd"))
        self.stand_in("/sbin/ldconfig", LDCONFIG)
        self.stand_in("/usr/bin/apt-get", APT)

    def see(self, source: Path, target: Path) -> None:
        """The machine finds ``source`` at the place of ``target``."""
        raise NotImplementedError

    def stand_in(self, path: str, text: str) -> None:
        target = Path(path).resolve()
        number = sum(1 for _ in self.folder.iterdir())
        text = text.format(installed=self.installed, calls=self.calls)
        self.see(program(self.folder / f"{target.name}-{number}", text), target)


class Node(Machine):
    """A node of the lab as a machine of its own."""

    def __init__(self, name: str, state: Path, folder: Path, course: Path):
        self.settings = state / f"{name}.sshd"
        self.host_key = state / f"{name}.hostkey"
        self._pid = int((state / f"{name}.pid").read_text())
        self._kept = self.settings.read_text()
        self._mounted: list[Path] = []
        super().__init__(folder)
        self.course = folder / "course"
        self.course.mkdir()
        self.see(self.course, course)
        # a quick key exchange: the default one takes more time than all else here
        self.set(AuthorizedKeysFile=".ssh/authorized_keys", KexAlgorithms="curve25519-sha256")

    def see(self, source: Path, target: Path) -> None:
        run("nsenter", "-m", "-t", self._pid, "mount", "--bind", source, target)
        self._mounted.append(target)

    def set(self, **settings) -> None:
        """Other settings for its sshd."""
        lines = self.settings.read_text().splitlines()
        lines = [line for line in lines if line.partition(" ")[0] not in settings]
        lines += [f"{name} {value}" for name, value in settings.items()]
        self.settings.write_text("\n".join(lines) + "\n")
        self._reload()

    def _reload(self) -> None:
        log = self.settings.with_suffix(".log")
        before = log.read_text().count("Server listening")
        os.kill(self._pid, 1)
        limit = time.monotonic() + 10
        while log.read_text().count("Server listening") == before:
            assert time.monotonic() < limit
            time.sleep(0.02)

    @property
    def keys(self) -> Path:
        return self.home / ".ssh/authorized_keys"

    def let_in(self, key: Path) -> None:
        self.keys.parent.mkdir(mode=0o700, exist_ok=True)
        self.keys.write_text(key.with_suffix(".pub").read_text().strip())  # its line has no end

    def close(self) -> None:
        for target in reversed(self._mounted):
            run("nsenter", "-m", "-t", self._pid, "umount", "--lazy", target)
        self.settings.write_text(self._kept)
        self._reload()


class World(Machine):
    """Where a person stands who has the course, two nodes, and a key that lets in."""

    def __init__(self, lab: Lab, folder: Path, course: Path):
        self._mounts: dict[Path, Path] = {}
        super().__init__(folder)
        self.course = course
        self.ssh = self.home / ".ssh"
        self.ssh.mkdir(mode=0o700)
        # the names of the nodes, and none of the lab's settings for ssh
        self.see(lab.hosts.parent / "names", Path("/etc/hosts"))
        (folder / "empty").mkdir()
        self.see(folder / "empty", Path("/etc/ssh/ssh_config.d"))
        key = self.ssh / "id_ed25519"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        self.nodes = [Node(name, lab.hosts.parent, folder / name, course) for name in lab.nodes]
        for node in self.nodes:
            node.let_in(key)
        self.hosts = folder / "hosts"
        self.hosts.write_text("prep1\n")

    def see(self, source: Path, target: Path) -> None:
        self._mounts[target] = source

    def command(self, *words) -> list[str]:
        """A command that sees all that, as no other process does."""
        mounts = [f"mount --bind {source} {target}" for target, source in self._mounts.items()]
        script = " && ".join([*mounts, 'exec "$@"'])
        return ["unshare", "-m", "bash", "-c", script, "-", *map(str, words)]

    def prepare(self, *words, code: int = 0) -> str:
        ran = subprocess.run(
            self.command(self.course / "env/nodes/prepare", self.hosts, *words),
            env=os.environ | {"HOME": "/proc/nowhere"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert ran.returncode == code, ran.stdout
        return ran.stdout

    def files(self) -> dict[str, tuple]:
        """All that the script could touch: content, mode and time of each file."""
        found = {}
        for path in [*self.folder.rglob("*"), *self.course.rglob("*")]:
            if path.is_file() and "__pycache__" not in path.parts:
                found[str(path)] = (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        return found


@pytest.fixture(scope="module")
def lab():
    if not Path("/usr/bin/apt-get").exists():
        pytest.skip("a stand-in takes the place of apt-get, which is not here")
    with lab_or_skip(2, PREFIX, NET) as nodes:
        yield nodes


@pytest.fixture
def course(tmp_path):
    """A checkout of the course, with a small environment and a quick env/setup.sh."""
    course = tmp_path / "checkout"
    for name in CARRIED:
        (course / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, course / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, course / name)
    program(course / "env/setup.sh", SET_UP)
    run("git", "init", "-q", course)
    run("git", "-C", course, "add", ".")
    run(course / "env/setup.sh", env=os.environ | {"PYTHON": str(BASE)})
    return course


@pytest.fixture
def world(lab, tmp_path, course):
    place = World(lab, tmp_path / "world", course)
    yield place
    for node in place.nodes:
        node.close()


# ---------------------------------------------------------------- what it does


def test_without_yes_it_shows_all_and_changes_nothing(world):
    world.nodes[0].installed.unlink()
    world.hosts.write_text("prep1\nprep2:4  # with slots\n")
    (world.ssh / "config").write_text("Host other\n    Port 2222\n")
    before = world.files()
    said = world.prepare()
    assert world.files() == before
    lines = said.splitlines()
    for number, node in enumerate(world.nodes, 1):
        fingerprint = run("ssh-keygen", "-lf", node.host_key).split()[1]
        assert f"[here] would trust the host key of prep{number}: {fingerprint} (ED25519)" in lines
        for what in (
            f"[here] would tell ssh in {world.ssh}/course_config how to reach prep{number}",
            f"[prep{number}] would add the key to ~/.ssh/authorized_keys of root",
            f"[prep{number}] would copy the course to {world.course}",
            f"[prep{number}] would run env/setup.sh in {world.course} (some minutes)",
        ):
            assert what in lines
    assert "[prep1] would install libgoogle-perftools4" in lines
    assert f"[here] would make the key {world.ssh}/course_ed25519" in lines
    assert (
        f"[here] would put on top of {world.ssh}/config: Include {world.ssh}/course_config" in lines
    )
    assert lines[-1] == "[here] nothing has been changed; with --yes it will be"


def test_with_yes_it_does_it_and_a_second_run_does_nothing(world):
    own = "# mine\nHost other\n    Port 2222\n"
    (world.ssh / "config").write_text(own)
    (world.ssh / "config").chmod(0o640)
    world.hosts.write_text("prep1\nprep2\n")
    said = world.prepare("--yes")
    assert "would" not in said
    assert said.splitlines()[-1].startswith("All reach each other")
    assert (world.ssh / "config").read_text() == f"Include {world.ssh}/course_config\n{own}"
    assert (world.ssh / "config").stat().st_mode & 0o777 == 0o640
    for name in ("course_ed25519", "course_config", "course_known_hosts"):
        assert (world.ssh / name).stat().st_mode & 0o777 == 0o600
    public = (world.ssh / "course_ed25519.pub").read_text()
    for node in world.nodes:
        first, second = node.keys.read_text().splitlines()
        assert [first, second + "\n"] == [
            (world.ssh / "id_ed25519.pub").read_text().strip(),
            public,
        ]
        assert (node.course / "env/nodes/prepare").stat().st_mode & 0o100
        assert (node.course / ".venv/calls").read_text().count("\n") == 1
    before = world.files()
    said = world.prepare("--yes")
    assert world.files() == before
    assert said.splitlines()[:2] == ["[prep1] nothing to do", "[prep2] nothing to do"]
    assert "All reach each other" in said
    # plain ssh now gets in with this key alone
    (world.ssh / "id_ed25519").unlink()
    assert run(*world.command("ssh", "-oBatchMode=yes", "prep2", "hostname")) == "prep2\n"
    assert not list(world.nodes[1].home.rglob("course_ed25519"))


def test_what_has_changed_here_is_brought_to_the_nodes(world):
    world.prepare("--yes")
    node = world.nodes[0]
    (world.course / "README.md").write_text("new")
    (world.course / "helpers/new.py").touch()
    run("git", "-C", world.course, "add", ".")
    (world.course / "helpers/cluster.py").unlink()
    said = world.prepare("--yes").splitlines()
    assert said[0] == f"[prep1] copy the course to {world.course}, over other versions of README.md"
    assert "All reach" in said[-1]
    assert (node.course / "README.md").read_text() == "new"
    assert (node.course / "helpers/new.py").exists()
    with (world.course / "env/requirements.txt").open("a") as pins:
        pins.write("# changed\n")
    assert "there is no environment here, or not that of" in world.prepare(code=1)
    run(world.course / "env/setup.sh", env=os.environ | {"PYTHON": str(BASE)})
    assert "run env/setup.sh" in world.prepare("--yes")
    assert (node.course / ".venv/calls").read_text().count("\n") == 2


def test_nodes_can_be_named_and_are_written_into_the_hosts_file(world):
    world.hosts.unlink()
    said = world.prepare(code=1)
    assert f"there is no {world.hosts}: name the nodes behind it, and it is made" in said
    assert f"[here] would write prep1 prep2:2 into {world.hosts}" in world.prepare(
        "prep1", "prep2:2"
    )
    assert not world.hosts.exists()
    world.hosts.write_text("prep1:8  # the first")
    said = world.prepare("localhost", "prep1:2")
    assert f"[here] would write localhost into {world.hosts}" in said
    world.hosts.write_text("prep1\nprep2 2\n")
    assert f"ERROR: {world.hosts}, line 2: 'prep2 2' is not" in world.prepare(code=1)


def test_a_key_of_ones_own_serves_as_well(world):
    (world.ssh / "id_ed25519").rename(world.folder / "mine.pem")
    (world.ssh / "id_ed25519.pub").unlink()
    assert "All reach" in world.prepare("--key", world.folder / "mine.pem", "--yes")
    assert not (world.ssh / "course_ed25519").exists()
    assert world.nodes[0].keys.read_text().count("ssh-ed25519") == 1
    assert "[prep1] nothing to do" in world.prepare("--key", world.folder / "mine.pem")
    assert "there is no key /nowhere" in world.prepare("--key", "/nowhere", code=1)


def test_this_machine_among_the_nodes_gets_packages_alone(world):
    world.installed.unlink()
    world.hosts.write_text("# mine")
    write, key, include, packages, check, _ = world.prepare("localhost", "--yes").splitlines()
    assert world.hosts.read_text() == "# mine\nlocalhost\n"
    assert packages == "[localhost] install libgoogle-perftools4"
    assert check.startswith("localhost: ")
    assert world.calls.read_text().count("\n") == 2


# ---------------------------------------------------------------- what goes wrong


def test_a_host_key_that_changed_is_refused_and_the_other_node_goes_on(world):
    world.prepare("--yes")
    first, second = world.nodes
    known = world.ssh / "course_known_hosts"
    before = known.read_text()
    first.set(HostKey=second.host_key)
    world.hosts.write_text("prep1\nprep2\n")
    said = world.prepare("--yes", code=1)
    fingerprint = run("ssh-keygen", "-lf", second.host_key).split()[1]
    assert f"[prep1] ERROR: its host key has changed, to {fingerprint}" in said
    assert f"delete\n    line 1 of {known}, then run this again" in said
    assert "[prep2] run env/setup.sh" in said
    end = "not ready: prep1. Mend that and run this again: what is done stays done.\n"
    assert said.endswith(end)
    # what it knew is kept; the mend that it told
    kept, _, added = known.read_text().partition("\n")
    assert kept + "\n" == before
    known.write_text(added)
    assert f"[here] would trust the host key of prep1: {fingerprint}" in world.prepare()


def test_a_key_that_the_person_knows_otherwise_is_refused(world):
    other = world.nodes[1].host_key.with_suffix(".hostkey.pub").read_text()
    (world.ssh / "known_hosts").write_text(f"prep1 {other}")
    assert "[prep1] ERROR: its host key has changed" in world.prepare("--yes", code=1)
    assert world.nodes[0].keys.read_text().count("ssh-ed25519") == 1


def test_nodes_that_do_not_answer_are_named(world):
    world.hosts.write_text(f"{NET}.99\n{NET}.1\nnowhere\nprep1\n")
    said = world.prepare(code=1)
    assert f"[{NET}.99] ERROR: it does not answer. Is it on" in said
    assert f"[{NET}.1] ERROR: no ssh server answers there. Start sshd on the node" in said
    assert "[nowhere] ERROR: nobody knows this name. Put it into /etc/hosts" in said
    assert "[prep1] would run env/setup.sh" in said
    assert f"not ready: {NET}.99 {NET}.1 nowhere." in said


def test_a_node_that_takes_keys_only_and_none_of_ours(world):
    world.nodes[0].keys.write_text("")
    said = world.prepare("--yes", code=1)
    public = (world.ssh / "course_ed25519.pub").read_text()
    assert "[prep1] ERROR: it takes keys only, and none of yours. Add this line there" in said
    assert f"~/.ssh/authorized_keys of root: {public}" in said


def on_a_terminal(command: list[str], answers: list[str]) -> tuple[int, str, int]:
    """Its exit code, what it said, and how often it asked for prep1's password."""
    child, terminal = pty.fork()
    if not child:
        os.execvp(command[0], command)
    said, asked, limit = "", 0, time.monotonic() + 40
    while time.monotonic() < limit:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                said += os.read(terminal, 4096).decode()
            except OSError:  # its end
                break
        if said.count("root@prep1's password: ") > asked:
            asked += 1
            if asked > len(answers):
                break
            os.write(terminal, answers[asked - 1].encode() + b"\n")
    os.close(terminal)  # ends one that still waits
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said, asked


def wants_password(node: Node) -> None:
    node.keys.write_text("")
    node.set(PermitRootLogin="yes", PasswordAuthentication="yes")


def test_a_node_that_wants_a_password_is_told_and_nothing_waits_for_it(world):
    world.hosts.write_text("prep1\nprep2\n")
    wants_password(world.nodes[0])
    script = [world.course / "env/nodes/prepare", world.hosts]
    code, said, asked = on_a_terminal(world.command(*script), [])
    assert (code, asked) == (0, 0)
    assert "[prep1] would add the key to ~/.ssh/authorized_keys of root (asks for the pass" in said
    quiet = world.command("bash", "-c", 'exec "$@" </dev/null', "-", *script, "--yes")
    code, said, asked = on_a_terminal(quiet, [])
    assert (code, asked) == (1, 0)
    assert "[prep1] ERROR: it wants a password, and there is no terminal to ask on" in said
    assert f"ssh-copy-id -i {world.ssh}/course_ed25519.pub root@prep1" in said
    assert "[prep2] run env/setup.sh" in said


@pytest.mark.parametrize(
    ("answers", "code", "told"),
    [
        (["wrong", "secret"], 0, "All reach each other"),
        (["wrong"] * 3, 1, "ERROR: that failed: Permission denied"),
    ],
    ids=["known", "unknown"],
)
def test_the_password_is_asked_for_on_a_terminal(world, answers, code, told):
    node = world.nodes[0]
    wants_password(node)
    users = node.folder / "shadow"
    users.write_text(f"root:{SECRET}:20000:0:99999:7:::\n")
    node.see(users, Path("/etc/shadow"))
    command = world.command(world.course / "env/nodes/prepare", world.hosts, "--yes")
    ended, said, asked = on_a_terminal(command, answers)
    assert (ended, asked) == (code, len(answers)), said
    assert told in said
    assert node.keys.read_text().count("ssh-ed25519") == (code == 0)


def test_a_node_that_has_the_key_and_still_refuses_it(world):
    """Its sshd reads the keys elsewhere."""
    node = world.nodes[0]
    elsewhere = node.settings.with_suffix(".keys")
    shutil.copy(node.keys, elsewhere)
    node.set(AuthorizedKeysFile=elsewhere)
    said = world.prepare("--yes", code=1)
    assert (
        "[prep1] ERROR: it has the key, and still refuses it. See there: AuthorizedKeysFile" in said
    )


def test_packages_are_installed_by_apt_get(world):
    node = world.nodes[0]
    node.installed.unlink()
    assert "[prep1] install libgoogle-perftools4" in world.prepare("--yes")
    update, install = node.calls.read_text().splitlines()
    assert update.endswith(" update")
    assert install.endswith(" install -y --no-install-recommends libgoogle-perftools4")
    assert "[prep1] nothing to do" in world.prepare()


@pytest.mark.parametrize(
    ("apt", "told"),
    [
        ("echo E: no space left; exit 100", "ERROR: that failed: E: no space left"),
        ("true", "ERROR: apt-get did not fail, but libgoogle-perftools4 is not there"),
    ],
)
def test_packages_that_do_not_come_stop_the_node(world, apt, told):
    world.nodes[0].installed.unlink()
    world.nodes[0].stand_in("/usr/bin/apt-get", f"#!/bin/sh\n{apt}\n")
    said = world.prepare("--yes", code=1)
    assert told in said
    assert "env/setup.sh" not in said


def test_a_system_without_apt_get_and_without_a_compiler_is_told_what_it_needs(world):
    node = world.nodes[0]
    for command in ("apt-get", "c++"):
        node.see(Path("/dev/null"), Path(shutil.which(command)).resolve())
    said = world.prepare(code=1)
    assert "[prep1] ERROR: it has no apt-get. Install there: g++\n" in said
    assert "gcc-c++" in said


def test_a_user_who_may_not_become_root_is_told_the_command(world):
    node = world.nodes[0]
    node.installed.unlink()
    users = node.folder / "passwd"
    users.write_text(users.read_text() + "learner:x:65533:65533::/mnt:/bin/bash\n")
    home = node.folder / "learner"
    shutil.copytree(node.home, home)
    for path in (home, home / ".ssh", home / ".ssh/authorized_keys"):
        os.chown(path, 65533, 65533)
    node.see(home, Path("/mnt"))
    if sudo := shutil.which("sudo"):
        node.see(Path("/dev/null"), Path(sudo).resolve())
    node.set(AllowUsers="learner")
    said = world.prepare("--user", "learner", "--yes", code=1)
    assert "[prep1] ERROR: learner may not use sudo there without a password" in said
    assert "sudo apt-get install libgoogle-perftools4" in said
    assert "    User learner\n" in (world.ssh / "course_config").read_text()
    assert "course@" in (home / ".ssh/authorized_keys").read_text()


def test_another_python_is_refused_with_the_mend(world):
    node = world.nodes[0]
    real = node.folder / "real"
    real.touch()
    node.see(BASE, real)
    old = f"""#!/bin/sh
if [ "$1" = --version ]; then echo Python 3.9.1; exit; fi
PYTHONHOME={sys.base_prefix} exec {real} -c 'import sys
sys.version_info = (3, 9, 1)
exec(sys.argv[1])' "$2"
"""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("python3", f"python{version}"):
        program(node.folder / "bin" / name, old)
    node.stand_in(str(BASE), old)
    node.set(SetEnv=f"PATH={node.folder}/bin:/usr/bin:/bin")
    said = world.prepare(code=1)
    assert f"[prep1] ERROR: it has Python 3.9.1, the environment here has {version}" in said
    assert f"Install python{version} and python{version}-venv there" in said


def test_a_set_up_that_fails_is_told_in_its_own_words(world):
    program(world.course / "env/setup.sh", "#!/bin/sh\necho '[setup] ERROR: no disk'; exit 1\n")
    said = world.prepare("--yes", code=1)
    assert "[prep1] ERROR: that failed: [setup] ERROR: no disk" in said
    assert "not ready: prep1" in said
