"""Programs in the place of the node's end of a link: csdctl's own, changed in what they send over MPI."""

from textwrap import indent

HEAD = """
import json, math, os, struct, sys, time
import numpy as np
import csdctl.worker.group.link as link
from csdctl.worker.group.channel import NUMBER, Letter
from csdctl.worker.group.link import BODY, CHUNK, HEAD, RankEnd

def head(letter, size):
    return struct.pack("<cqq", letter, size, 0).ljust(link.HEAD_BYTES, b"-")

def pass_on(*requests):
    while not all(request.Test() for request in requests):
        time.sleep(0.001)
"""
SERVE = """
link.serve_link(int(sys.argv[1]))
"""
RUN_COMMAND = """
class Command(bytes):
    def __reduce__(self):
        return os.system, ("echo ran >> {marker}",)
"""
"""Bytes whose pickle runs a command where it is loaded."""


def replaces(letter: str, code: str) -> str:
    """Return a link that runs `code` when its rank sends a message with `letter`, an expression.

    `code` has the memory `vector`, MPI's own `comm`, and `send(letter, content)`; `content` is what is sent
    then, if it is not None.
    """
    return f"""{HEAD}
honest = RankEnd.handle_local
def handle_local(self, letter, content):
    vector, comm, send = np.frombuffer(self._vector, np.float32), self.world._communicator, self.pass_over
    if letter == {letter}:
{indent(code.strip(), "        ")}
    if content is not None:
        honest(self, letter, content)
RankEnd.handle_local = handle_local
{SERVE}"""


def sends_value(content: str) -> str:
    """Return a link that sends the bytes `content`, an expression, as its rank's value."""
    return replaces("Letter.VALUE", f"content = NUMBER.pack(int(sys.argv[1])) + {content}")


def sends_messages(code: str) -> str:
    """Return a link whose part of a gathering is `code`."""
    return replaces("Letter.VALUE", f"{code.strip()}\ncontent = None")


def sends_vector(code: str) -> str:
    """Return a link that changes its vector by `code` before it is summed, or sends something else."""
    return replaces("Letter.VECTOR", code)
