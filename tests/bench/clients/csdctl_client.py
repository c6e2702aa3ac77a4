"""One command on every node through csdctl's own pool."""

import sys
from pathlib import Path

from csdctl.fleet.model import Fleet, Node
from csdctl.transport.many import run_on_nodes

user, port, key, known_hosts, *addresses = sys.argv[1:]
nodes = tuple(
    Node(f"n{number}", address, int(port), user, Path(key)) for number, address in enumerate(addresses)
)
outcomes = run_on_nodes(
    Fleet(nodes),
    lambda session: session.run(["echo", "pong"]).output,
    directory=Path(),
    known_hosts=[Path(known_hosts)],
    connect_deadline_s=60,
)
for outcome in outcomes.values():
    print(outcome.error or outcome.value, end="")
