"""Kernels that fork from one process with the large imports done: each notebook starts some seconds earlier.

    python -P warm_kernel.py serve SOCKET            loads the libraries, forks a kernel for each connection, and ends
                                                     with its standard input
    python -P warm_kernel.py SOCKET CONNECTION_FILE  is what Jupyter starts: lives as long as its kernel does

The package itself is not loaded here: every kernel imports it anew.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys
import threading

LARGE = (
    "ipykernel.kernelapp",
    "peft.auto",
    "transformers.modeling_utils",
    "datasets",
    "scipy.stats",
    "pandas",
    "trl",
)


def serve(path: str) -> None:
    for name in LARGE:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that ended are not kept
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            ready, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel(connection)


def kernel(connection: socket.socket) -> None:
    """Becomes the kernel that was asked for, and ends when the process that asked does."""
    from ipykernel.kernelapp import IPKernelApp

    lines = connection.makefile()
    asked = json.loads(lines.readline())
    threading.Thread(target=lambda: (lines.read(), os._exit(1)), daemon=True).start()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path.insert(0, "")
    IPKernelApp.launch_instance(argv=["-f", asked["file"]])


def ask(path: str, file: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        asked = {"file": file, "folder": os.getcwd(), "environment": dict(os.environ)}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        connection.recv(1)  # nothing is sent: it returns when the kernel has ended


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "serve" else ask(*sys.argv[1:])
