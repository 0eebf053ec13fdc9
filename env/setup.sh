#!/usr/bin/env bash
# Makes .venv with the course stack and checks that it works. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
requirements=env/requirements.txt
stamp=$venv/requirements.sha256
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] ERROR: %s\n' "$*" >&2; exit 1; }

find_python() {
    local python
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    die "no Python 3.11-3.13 found (tried: ${PYTHON:-python3, python3.13, python3.12, python3.11}).
        On Debian or Ubuntu: sudo apt-get install python3 python3-venv
        Or name one: PYTHON=/path/to/python3.12 env/setup.sh"
}

checksum=$(sha256sum "$requirements" | cut -d' ' -f1)
if [[ -f $stamp && $(<"$stamp") == "$checksum" && -x $venv/bin/python ]]; then
    exit 0
fi

python=$(find_python)
say "Python: $("$python" --version) ($(command -v "$python"))"
"$python" -m venv "$venv" || die "cannot make $venv. On Debian or Ubuntu: sudo apt-get install python3-venv"

# One short probe, so that an unreachable index is found out at once and not after pip's retries.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip download --quiet --no-deps --retries 0 --timeout 10 --dest "$venv/probe" six==1.17.0 \
    || die "the Python package index cannot be reached. Check the network, HTTPS_PROXY, or 'pip config list', then run env/setup.sh again."
rm -rf "$venv/probe"

torch_index=()
if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$cpu_index/torch/', timeout=5)" 2>/dev/null; then
    say "torch: CPU build, from $cpu_index"
    torch_index=(--extra-index-url "$cpu_index")
    torch_pin=$(grep '^torch==' "$requirements")+cpu
    pip install "${torch_index[@]}" "$torch_pin"
else
    say "torch: default build from the package index (its CPU-only index cannot be reached). About 6.8 GB on disk."
fi

say "installing $requirements (a few minutes)"
pip install "${torch_index[@]}" -r "$requirements" \
    || die "the installation failed; the reason stands above. Run env/setup.sh again: finished downloads are kept."

"$venv/bin/python" - <<'PY' || die "the installed stack does not import; delete .venv and run env/setup.sh again."
import warnings

warnings.simplefilter("ignore")
import intel_extension_for_pytorch as ipex
import torch
import transformers

print(f"[setup] torch {torch.__version__}, IPEX {ipex.__version__}, transformers {transformers.__version__}")
PY
echo "$checksum" > "$stamp"
say "ready"
