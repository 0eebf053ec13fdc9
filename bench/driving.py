"""What it costs to drive a training from a notebook: ``make bench``.

The same training on the same two ranks of this machine, with the same variables, once on the
engines of ``helpers.cluster`` and once under bare mpiexec, taking turns within one run. Both wait
without using a core while the other one trains.
"""

import os
import sys
import threading
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener

from helpers import runtime
from helpers.ccl import mpi
from helpers.cluster import Cluster
from helpers.timing import compare

RANKS, STEPS, ROUNDS = 2, 5, 21
GOAL = 0.02
LIMIT_SECONDS = 900
SET_UP = """
from helpers import ccl, profiles
from helpers.finetune import FineTuning

ccl.init()
run = FineTuning("mrpc", profiles.load("laptop").mrpc)
"""


def rank(path: str) -> None:
    """A rank under bare mpiexec: trains so many steps whenever it is told to."""
    names: dict = {}
    exec(SET_UP, names)
    with Client(path) as master:
        while steps := master.recv():
            names["run"].train(steps)
            master.send(steps)


def bare(path: str, listener: Listener, stack: ExitStack) -> list[Connection]:
    """Starts the ranks under mpiexec; returns a connection to each."""
    arguments = ["-m", "bench.driving", path]
    settings = runtime.variables(runtime.settings(runtime.hardware(), RANKS))
    keywords = {
        "ranks": RANKS,
        "timeout": LIMIT_SECONDS,
        "variables": {"I_MPI_PIN": "1"} | settings,
    }

    def run() -> None:
        try:
            mpi.run(arguments, **keywords)
        except mpi.RanksError as error:  # nobody would ever connect
            print(error, file=sys.stderr)
            os._exit(1)

    thread = threading.Thread(target=run)
    thread.start()
    stack.callback(thread.join)
    masters = [stack.enter_context(listener.accept()) for _ in range(RANKS)]
    stack.callback(lambda: [master.send(0) for master in masters])
    return masters


def train_bare(masters: list[Connection]) -> None:
    for master in masters:
        master.send(STEPS)
    for master in masters:
        if not master.poll(LIMIT_SECONDS):
            sys.exit(f"a rank did not answer within {LIMIT_SECONDS} s")
        master.recv()


def main() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(family="AF_UNIX"))
        masters = bare(listener.address, listener, stack)
        cluster = stack.enter_context(Cluster(None, RANKS))
        cluster.view.execute(SET_UP, block=True)
        result = compare(
            {
                "mpiexec": lambda: train_bare(masters),
                "notebook": lambda: cluster.view.execute(f"run.train({STEPS})", block=True),
            },
            ROUNDS,
        )
    cost = 1 / result.speedup("notebook") - 1
    each = [1 / ratio - 1 for ratio in result.speedups("notebook")]
    print(
        f"{STEPS} steps on {RANKS} ranks: {result.median('mpiexec'):.2f} s under mpiexec, "
        f"{result.median('notebook'):.2f} s from the notebook: {cost:+.1%} "
        f"({min(each):+.1%} to {max(each):+.1%}, {ROUNDS} rounds; goal: under {GOAL:.0%})"
    )
    sys.exit(cost >= GOAL)


if __name__ == "__main__":
    rank(sys.argv[1]) if sys.argv[1:] else main()
