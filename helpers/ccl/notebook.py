"""The cell magic ``%%ranks``: a cell that runs on several ranks of this machine.

    %load_ext helpers.ccl.notebook

    %%ranks 2 CCL_LOG_LEVEL=info
    ...

Each rank is a fresh process that knows nothing of the notebook's variables. ``%%ranks 2 fails``
is for a cell that shows a failure: it raises where the ranks end well. The notebook that teaches
it: ``07_collectives``.
"""

import shlex
import tempfile
from pathlib import Path

from helpers.ccl.mpi import RanksError, run

USAGE = "%%ranks NUMBER [fails] [VARIABLE=VALUE ...]"
TIMEOUT = 120
# whole lines, so that two ranks don't write into each other's
PREFIX = "import sys; sys.stdout.reconfigure(line_buffering=True, write_through=False)\n"


def ranks(line: str, cell: str) -> None:
    """Runs the cell on so many ranks, each line of output with its rank before it.

    Raises RanksError where a rank fails (with ``fails``: where none does) or takes over 120 s,
    ValueError for a line that it doesn't understand.
    """
    number, *settings = shlex.split(line) or [""]
    fails = settings[:1] == ["fails"]
    settings = settings[fails:]
    if not number.isdecimal() or not int(number) or not all("=" in setting for setting in settings):
        raise ValueError(f"usage: {USAGE}")
    variables = dict(setting.split("=", 1) for setting in settings)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "cell.py")
        program.write_text(PREFIX + cell)
        try:
            run([str(program)], int(number), TIMEOUT, variables, say=print)
        except RanksError as error:
            if not fails or error.late:
                raise RanksError(f"the ranks {error.cause}: read their output above") from None
        else:
            if fails:
                raise RanksError("the ranks should have failed, and ended well")


def load_ipython_extension(ipython) -> None:
    """What ``%load_ext`` calls."""
    ipython.register_magic_function(ranks, "cell")
