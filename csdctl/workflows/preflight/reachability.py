"""Every machine opens listeners and connects to the listeners of the others, to find which pairs can connect.

A small program runs on each machine, on all at once, over one conversation each: listen, connect, exit.
"""

import contextlib
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from csdctl.fleet.checks import Check, ConnectAttempt, Status, judge_attempts, judge_error, pairs_to_try
from csdctl.fleet.facts import Condition
from csdctl.fleet.model import HOST_NAME, Fleet, Level
from csdctl.fleet.network import addresses_in
from csdctl.transport.commands import build_program_command
from csdctl.transport.many import errors_of, run_on_all
from csdctl.transport.program import MAX_TEXT_LENGTH, Patience, Program
from csdctl.transport.session import Session
from csdctl.worker.protocol.json_codec import Between, MaxLength, ShortText

CONNECT_DEADLINE_S = 3.0
MAX_LISTENERS = 2
FIRST_PORT, LAST_PORT = 1024, 65535
_DOING = "connecting to the other machines"
_REMEDY = "check its Python: `python3 -I -S -c 'import socket'`"

Port = Annotated[int, Between(FIRST_PORT, LAST_PORT)]
"""Never one below those that ranks use: the other machines connect to it."""


@dataclass(frozen=True)
class _Listening:
    """The answer of the program that listens."""

    ports: Annotated[tuple[Port, ...], MaxLength(MAX_LISTENERS)]


@dataclass(frozen=True)
class _Attempted:
    """The answer of the program that connects: name, port, and reason of failure of each attempt."""

    attempts: tuple[tuple[ShortText, Port, str], ...]


@dataclass(frozen=True)
class PortListener:
    """The program on one machine, and the address and ports where it listens."""

    program: Program
    address: str
    ports: tuple[int, ...]


def check_reachability(
    level: Level,
    fleet: Fleet,
    sessions: Mapping[str, Session],
    conditions: Mapping[str, Condition],
    deadline_s: float,
) -> list[Check]:
    """Return a check for every machine of `level`: whether the pairs that connect in training can."""
    token = secrets.token_hex(8)

    def start(session: Session) -> PortListener:
        address = _listen_address(session.name, level, fleet, conditions)
        return _start_listener(session, fleet.python_of(session.name), address, token, deadline_s)

    outcomes = run_on_all({name: sessions[name] for name in level.machines}, start)
    listeners = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
    servers = pairs_to_try(level.machines)

    def connect_to_others(name: str) -> list[ConnectAttempt]:
        others = {server: listeners[server] for server in servers[name] if server in listeners}
        return _connect(name, listeners[name], others, deadline_s)

    try:
        tried = run_on_all({name: name for name in listeners}, connect_to_others)
    finally:
        run_on_all(listeners, lambda listener: listener.program.close())
    errors = errors_of(outcomes) | errors_of(tried)
    attempts = [attempt for outcome in tried.values() for attempt in outcome.value or ()]
    judged = judge_attempts(list(listeners), attempts)
    return [judge_error(name, "ports", error) for name, error in errors.items()] + [
        check for check in judged if check.machine not in errors or check.status != Status.OK
    ]


def _start_listener(
    session: Session, python: str, address: str, token: str, deadline_s: float
) -> PortListener:
    is_host = session.name == HOST_NAME
    patience = Patience(deadline_s, 2 * deadline_s, 2 * deadline_s)  # for two requests
    command = build_program_command(python, "reachability")
    program = Program(session, command, _DOING, patience, _REMEDY)
    try:
        request = {"name": session.name, "token": token, "address": address, "is_host": is_host}
        return PortListener(program, address, program.call(request, _Listening).ports)
    except BaseException:
        program.close()
        raise


def _connect(
    name: str, client: PortListener, others: Mapping[str, PortListener], deadline_s: float
) -> list[ConnectAttempt]:
    listeners = [(server, other.address, port) for server, other in others.items() for port in other.ports]
    request = {"listeners": listeners, "deadline_s": min(CONNECT_DEADLINE_S, deadline_s)}
    attempts = client.program.call(request, _Attempted).attempts
    if [attempt[:2] for attempt in attempts] != [listener[::2] for listener in listeners]:
        problem = f"received {len(attempts)} attempts to connect that are not the {len(listeners)} wanted"
        raise client.program.error(problem)
    return [
        ConnectAttempt(name, server, address, port, reason[:MAX_TEXT_LENGTH])
        for (server, address, port), (_, _, reason) in zip(listeners, attempts, strict=True)
    ]


def _listen_address(name: str, level: Level, fleet: Fleet, conditions: Mapping[str, Condition]) -> str:
    """Return an address in `network:`, else the one that the machine is reached at, else any of its own."""
    own = conditions[name].addresses or ()
    if level.network:
        return next(iter(addresses_in(level.network, own)), "0.0.0.0")
    peer = fleet.node(level.machines[1] if name == HOST_NAME else name).address
    address = _local_address_towards(peer) if name == HOST_NAME else _resolve(peer)
    return address if address in own else next(iter(addresses_in("", own)), "127.0.0.1")


def _local_address_towards(address: str) -> str:
    """Return this machine's own address on the route to `address`, '' without a route; sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect((address, 9))
        return str(unsent.getsockname()[0])
    return ""


def _resolve(address: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(address)
    return ""
