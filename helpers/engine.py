"""An MPI rank that is an engine of ipyparallel: what ``helpers.cluster`` starts on the nodes."""

import faulthandler
import json
import os
import signal
import sys

from helpers import network

# Each library chooses an interface of its own where a machine has several, and may choose one
# that leads nowhere.
INTERFACE_VARIABLES = ("FI_TCP_IFACE", "CCL_KVS_IFACE", "GLOO_SOCKET_IFNAME")


def choose_interface() -> None:
    """Sends MPI's, oneCCL's and gloo's traffic where the controller is, unless told otherwise."""
    controller = json.loads(os.environ["IPP_CONNECTION_INFO"])["location"]
    if controller != "127.0.0.1":
        interface = network.interface_towards(controller)
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)


if __name__ == "__main__":
    from ipyparallel.engine.app import main

    # For Cluster.stacks; works also while a rank waits inside a library. The kernel will send
    # what is written to stderr elsewhere, but not to a copy of it.
    faulthandler.register(signal.SIGUSR1, file=os.dup(sys.stderr.fileno()), all_threads=False)
    choose_interface()
    main()
