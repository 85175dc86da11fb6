"""A server that `chaos_kill.py` starts: runs `mlxgen` commands in forked children, so that each begins in a fraction of
a second.

What takes long at the start of a command is importing the libraries around MLX; those are imported here, once. MLX
itself never is (a fork after that hangs), so a child imports MLX and mlxgen, loads the model and works as a process
started by hand does, and may be killed in any of it.

Protocol, over the socket whose descriptor is the only argument: the parent sends one JSON message {"args", "cwd"} with
two descriptors (standard output and error); the server answers with the child's pid and, when that has ended, with its
wait status. It ends when the parent closes the socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib import import_module

HEAVY = (
    "numpy",
    "jinja2.sandbox",
    "safetensors.numpy",
    "huggingface_hub.hf_api",
    "tokenizers.decoders",
    "transformers.models.auto.tokenization_auto",
    "xxhash",
)


def main() -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for name in HEAVY:
        import_module(name)
    loaded = [name for name in ("mlx.core", "mlx_lm", "torch") if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{', '.join(loaded)} was imported by a library here: forking now would hang the children")
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return 0
    # In the child from here on.
    os.chdir(request["cwd"])
    sys.argv = ["mlxgen", *request["args"]]
    code: int = import_module("mlxgen.cli.main").main()
    return code


def serve(connection: socket.socket) -> dict | None:
    """Fork for every request; returns the request in the child, None in the server when the parent is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not message:
            return None
        output, errors = descriptors
        pid = os.fork()
        if pid == 0:
            connection.close()
            for source, target in ((output, 1), (errors, 2)):
                os.dup2(source, target)
                os.close(source)
            return json.loads(message)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{status}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
