"""A lab of a test file's own, beside those that someone may be using."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from helpers.lab import Lab, NoLab


@contextmanager
def lab_or_skip(count: int, prefix: str, network: str) -> Iterator[Lab]:
    """So many nodes, gone at the end; skips with the reason where there can be none."""
    lab = Lab(count, prefix, network)
    try:
        lab.up()
    except NoLab as reason:
        pytest.skip(f"no nodes here: {reason}")
    yield lab
    lab.down()
