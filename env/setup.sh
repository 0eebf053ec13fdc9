#!/usr/bin/env bash
# Makes .venv with the course stack and checks that it works. Safe to run again.
#   PYTHON=/path/to/python3.12 env/setup.sh    chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
stamp=.venv/setup.stamp
cpu_index=https://download.pytorch.org/whl/cpu
candidates=(python3 python3.13 python3.12 python3.11 python3.10)
if [[ ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] ERROR: %s\n' "$*" >&2; exit 1; }
trap 'die "interrupted. Run env/setup.sh again: it goes on from the finished downloads."' INT TERM

# An environment cannot be moved, so the stamp also tells where it was made.
wanted="$PWD $(cat env/requirements.txt env/requirements.lock | sha256sum)"
works() { "$python" -c '' 2>/dev/null; }
ready() { [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && works; }
if ready; then exit 0; fi

exec 9<env/setup.sh
if ! flock --nonblock 9; then
    say "another set-up is at work here; waiting for it (30 minutes at most)"
    flock --wait 1800 9 || die "the other set-up has not finished. Stop it, then run env/setup.sh again."
    if ready; then exit 0; fi
fi

[[ $(uname -sm) == "Linux x86_64" ]] || die "the course needs x86-64 Linux; this is $(uname -sm)."

find_python() {
    local candidate
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.10-3.13 found (tried: ${candidates[*]}).
    On Debian or Ubuntu: sudo apt-get install python3 python3-venv
    Or name one: PYTHON=/path/to/python3.12 env/setup.sh"
}

if [[ -f $stamp && $(<"$stamp") == "$PWD "* ]] && works; then
    say "the pins have changed; bringing .venv up to date"
else
    base=$(find_python)
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "Python $version ($(command -v "$base"))"
    "$base" -c 'import ensurepip, venv' 2>/dev/null || die "this Python cannot make environments.
    On Debian or Ubuntu: sudo apt-get install python$version-venv"
    # What a half-way set-up has left is removed, except its downloads.
    if [[ -d .venv ]]; then
        find .venv/ -mindepth 1 -maxdepth 1 ! -name cache -exec rm -rf {} +
    fi
    "$base" -m venv .venv || die "cannot make $PWD/.venv; the reason stands above."
fi
rm -f "$stamp"

# uv is several times faster than pip. Fetching it with pip, without retries, also finds out in
# seconds whether the index can be reached.
pip() { "$python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
say "fetching the installer"
pip install --quiet --retries 0 --timeout 10 "$(grep '^uv==' env/requirements.txt)" \
    || die "the Python package index cannot be reached.
    Check the network, HTTPS_PROXY and '.venv/bin/pip config list', then run env/setup.sh again."

# uv does not read pip's configuration: hand over an index or a certificate that stands there.
pip_setting() { pip config list | sed -n "s/^.*\.$1='\(.*\)'$/\1/p" | head -n 1; }
index=$(pip_setting index-url)
certificate=$(pip_setting cert)
if [[ $index ]]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
if [[ $certificate ]]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificate}; fi
export UV_CACHE_DIR=${UV_CACHE_DIR:-$PWD/.venv/cache}

if timeout 10 "$python" -c "import urllib.request as u; u.urlopen('$cpu_index/torch/', timeout=5)" 2>/dev/null; then
    say "torch: the CPU build, from $cpu_index"
    # the lock holds the hashes of the package index, which this build is not on
    torch=(--torch-backend cpu --no-verify-hashes)
    gigabytes=3
else
    say "torch: the default build, from the package index ($cpu_index cannot be reached)"
    torch=()
    gigabytes=8
fi

free=$(df --output=avail -k . | tail -n 1)
used=$(du -sk .venv | cut -f1)
(((free + used) >> 20 >= gigabytes)) || die "not enough disk space: $PWD needs $gigabytes GB, $((free >> 20)) GB are free.
    Make room, then run env/setup.sh again."

say "installing env/requirements.txt, about $gigabytes GB (a few minutes)"
.venv/bin/uv pip install --python "$python" -r env/requirements.txt -c env/requirements.lock -e . "${torch[@]}" \
    || die "the installation failed; the reason stands above.
    Mend it, or wait for a better line, then run env/setup.sh again: finished downloads are kept."

say "checking that it works"
"$python" - 2>.venv/check.log <<'PY' || die "the stack does not import: $(tail -n 1 .venv/check.log)
    .venv/check.log has it all. Run env/setup.sh again: it builds .venv afresh."
import importlib
from importlib.metadata import version

for module in ("torch", "intel_extension_for_pytorch", "transformers", "datasets", "helpers"):
    importlib.import_module(module)
for package in ("torch", "intel-extension-for-pytorch", "transformers"):
    print(f"[setup] {package} {version(package)}")
PY
"$python" -m helpers.ccl.build || say "WARNING: no oneCCL backend; the reason stands above.
    The course goes on with gloo in its place, and says so. Mend it, then: $python -m helpers.ccl.build"
rm -rf .venv/cache .venv/check.log
echo "$wanted" > "$stamp"
say "ready: .venv"
