"""A training that was interrupted goes on as if nothing had happened.

``FineTuning(..., checkpoint=folder)`` and ``python -m helpers.finetune --checkpoint folder`` use
it. The notebook that teaches it: ``10_scaling``.
"""

import os
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch


class CheckpointError(RuntimeError):
    """A checkpoint that is broken, or another training's, or can't be written."""


@contextmanager
def _clear_errors(what: str):
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


class Checkpoint:
    """The file ``checkpoint.pt`` of a folder, which is made: the last state of a training.

    At any moment it holds a whole state, or is not there: a new one gets another name until all
    of it is on the disk. Raises CheckpointError where nothing can be written there.
    """

    def __init__(self, folder: str | Path):
        self.file = Path(folder).expanduser() / "checkpoint.pt"
        self._partial = self.file.with_suffix(".partial")
        with _clear_errors(f"no checkpoint can be written in {self.file.parent}"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._partial.touch()
            self._partial.unlink()

    def write(self, state: dict) -> None:
        """Writes a dictionary of tensors, numbers, texts, and lists and dictionaries of them."""
        with _clear_errors(f"{self._partial} can't be written"):
            with self._partial.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            self._partial.replace(self.file)
            folder = os.open(self.file.parent, os.O_RDONLY)
            os.fsync(folder)  # the new name, too, is on the disk
            os.close(folder)

    def read(self) -> dict | None:
        """The state that was written last; None where there is none. Its checksums are checked."""
        if not self.file.exists():
            return None
        try:
            with zipfile.ZipFile(self.file) as members:
                if broken := members.testzip():
                    raise zipfile.BadZipFile(f"wrong checksum of {broken}")
            return torch.load(self.file, weights_only=True)
        except Exception as error:  # zipfile and torch have many for a broken file
            raise CheckpointError(
                f"{self.file} is broken: {error}; remove it to start from the beginning"
            ) from error

    def check(self, saved: dict, run: dict) -> None:
        """Raises CheckpointError where the description of the saved training is not this run's."""
        differ = [
            f"{key} is {saved.get(key)!r} there and {run.get(key)!r} here"
            for key in {**saved, **run}
            if saved.get(key) != run.get(key)
        ]
        if differ:
            raise CheckpointError(
                f"{self.file} is another training's: {', '.join(differ)}; "
                "start this one as that one was, or choose another folder"
            )
