"""Starts the process an engine lives in. Imports nothing but the standard library, so that `mint serve` can do it first
of all: until the child has imported torch, nothing else is as urgent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mint.engine.pipe import Pipe

# What the child runs: it finds modules where we do.
BOOT = """
import sys
sys.path[:] = sys.argv[2].split(sys.argv[3])
from mint.engine.child import main
main(int(sys.argv[1]), sys.argv[4:])
"""


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen[bytes]
    pipe: Pipe


def start_child(imports: Sequence[str] = ()) -> Child:
    """A child that waits for its first message, and imports these modules meanwhile. On Linux it dies with the thread
    that calls this."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", BOOT, str(theirs.fileno()), os.pathsep.join(sys.path), os.pathsep, *imports]
    with theirs:
        # A process group of its own: Ctrl-C in the terminal is for the parent, which closes the child when it is done.
        # What the child prints belongs with its log.
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, process_group=0
        )
    return Child(process, Pipe(ours))
