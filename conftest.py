"""Hand-typed pytest, too, gets a home folder where the user's is read-only (see the Makefile)."""

import os
from pathlib import Path

if not os.access(Path.home(), os.W_OK):
    home = Path(__file__).parent / "build" / "home"
    home.mkdir(parents=True, exist_ok=True)
    os.environ["HOME"] = str(home)
