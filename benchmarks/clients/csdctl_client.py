"""One command on every node through csdctl's pool; prints outputs as they arrive, then delay and memory."""

import resource
import sys
import time
from pathlib import Path

from csdctl.fleet.model import Fleet, Node
from csdctl.transport.many import Outcome, run_on_nodes
from csdctl.transport.session import Session

user, port, key, known_hosts, *addresses = sys.argv[1:]
nodes = tuple(
    Node(f"n{number}", address, int(port), user, Path(key)) for number, address in enumerate(addresses)
)
answered_s: list[float] = []
shown_s: list[float] = []


def ping(session: Session) -> str:
    output = session.run(["echo", "pong"]).output
    answered_s.append(time.monotonic())
    return output


def show(outcome: Outcome[str]) -> None:
    print(outcome.error or outcome.value, end="", flush=True)
    shown_s.append(time.monotonic())


run_on_nodes(Fleet(nodes), ping, directory=Path(known_hosts).parents[1], connect_deadline_s=60, on_done=show)
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"first output shown after: {shown_s[0] - min(answered_s):.3f} s; peak memory: {peak_mb:.0f} MB")
