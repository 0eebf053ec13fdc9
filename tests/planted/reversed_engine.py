"""An engine that asks the controller for another number than its rank."""

from ipyparallel.engine.app import IPEngine
from traitlets import default


class ReversedEngine(IPEngine):
    @default("id")
    def _default_id(self):
        from mpi4py import MPI

        return MPI.COMM_WORLD.size - 1 - MPI.COMM_WORLD.rank


if __name__ == "__main__":
    ReversedEngine.launch_instance()
