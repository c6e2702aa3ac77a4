"""Every machine opens listeners and connects to the listeners of the others, to find which pairs can connect.

A small program runs on each machine, on all at once, over one conversation each: listen, connect, exit.
"""

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from csdctl.errors import DeadlineError, RemoteCommandError
from csdctl.fleet.checks import Check, ConnectAttempt, Status, judge_attempts, judge_error, pairs_to_try
from csdctl.fleet.facts import Condition
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.network import addresses_in
from csdctl.transport.answer import MAX_TEXT_LENGTH, Answer
from csdctl.transport.commands import build_program_command
from csdctl.transport.many import Outcome, run_on_all
from csdctl.transport.session import Conversation, Session

CONNECT_DEADLINE_S = 3.0
EXIT_DEADLINE_S = 5.0
MAX_LISTENERS = 2
FIRST_PORT, LAST_PORT = 1024, 65535
_DOING = "connecting to the other machines"


@dataclass(frozen=True)
class PortListener:
    """The program on one machine: its conversation, and the address and ports where it listens."""

    conversation: Conversation
    address: str
    ports: tuple[int, ...]


def check_reachability(
    fleet: Fleet, sessions: Mapping[str, Session], conditions: Mapping[str, Condition], deadline_s: float
) -> list[Check]:
    """Return a check for every machine of `sessions`: whether the pairs that connect in training can."""
    token = secrets.token_hex(8)

    def start(session: Session) -> PortListener:
        address = _listen_address(session.name, fleet, conditions)
        return _start_listener(session, fleet.python_of(session.name), address, token, deadline_s)

    with _closing(run_on_all(sessions, start)) as outcomes:
        checks = [
            judge_error(name, "ports", outcome.error) for name, outcome in outcomes.items() if outcome.error
        ]
        listeners = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
        servers = pairs_to_try(list(listeners))

        def connect_to_others(name: str) -> list[ConnectAttempt]:
            others = {server: listeners[server] for server in servers[name]}
            return _connect(name, listeners[name], others, deadline_s)

        tried = run_on_all({name: name for name in listeners}, connect_to_others)
        checks += [
            judge_error(name, "ports", outcome.error) for name, outcome in tried.items() if outcome.error
        ]
        attempts = [attempt for outcome in tried.values() for attempt in outcome.value or ()]
    judged = judge_attempts(list(listeners), attempts)
    failed = {check.machine for check in checks}
    return checks + [check for check in judged if check.machine not in failed or check.status != Status.OK]


def _start_listener(
    session: Session, python: str, address: str, token: str, deadline_s: float
) -> PortListener:
    conversation = session.converse(build_program_command(python, "reachability"))
    try:
        request = {
            "name": session.name,
            "token": token,
            "address": address,
            "is_host": session.name == HOST_NAME,
        }
        answer = _request(conversation, session.name, request, deadline_s)
        if "error" in answer:
            raise RemoteCommandError(
                answer.text("error"), node=session.name, remedy="check which ports are in use"
            )
        # The other machines connect to these: never to a port below those that ranks use.
        ports = answer.numbers("ports", MAX_LISTENERS, FIRST_PORT, LAST_PORT)
    except BaseException:
        conversation.close()
        raise
    return PortListener(conversation, address, tuple(ports))


def _connect(
    name: str, client: PortListener, others: Mapping[str, PortListener], deadline_s: float
) -> list[ConnectAttempt]:
    listeners = [(server, other.address, port) for server, other in others.items() for port in other.ports]
    request = {"listeners": listeners, "deadline_s": min(CONNECT_DEADLINE_S, deadline_s)}
    answer = _request(client.conversation, name, request, deadline_s)
    attempts = answer.items("attempts", len(listeners))
    tried = [list(listener[::2]) for listener in listeners]
    if [attempt[:2] for attempt in attempts if _is_attempt(attempt)] != tried:
        raise answer.error(
            f"received {len(attempts)} attempts to connect that are not the {len(tried)} wanted"
        )
    return [
        ConnectAttempt(name, server, address, port, reason[:MAX_TEXT_LENGTH])
        for (server, address, port), (_, _, reason) in zip(listeners, attempts, strict=True)
    ]


def _is_attempt(attempt: object) -> bool:
    return isinstance(attempt, list) and [type(value) for value in attempt] == [str, int, str]


def _request(conversation: Conversation, name: str, request: object, deadline_s: float) -> Answer:
    """Send one line and return the answer; raises RemoteCommandError or DeadlineError."""
    remedy = "check its Python: `python3 -I -S -c 'import socket'`"
    try:
        conversation.send_line(json.dumps(request))
        return Answer.parse(conversation.read_line(deadline_s=deadline_s), name, _DOING, remedy=remedy)
    except EOFError:
        cause = conversation.wait(deadline_s=EXIT_DEADLINE_S).last_error_line
        message = f"{_DOING} failed: {cause or 'no message'}"
        raise RemoteCommandError(message, node=name, remedy=remedy) from None
    except DeadlineError:
        message = f"{_DOING} took more than {deadline_s:g} s"
        raise DeadlineError(message, node=name, remedy=remedy) from None


def _listen_address(name: str, fleet: Fleet, conditions: Mapping[str, Condition]) -> str:
    """Return an address in `network:`, else the one that the machine is reached at, else any of its own."""
    own = conditions[name].addresses or ()
    if fleet.network:
        return next(iter(addresses_in(fleet.network, own)), "0.0.0.0")
    peer = fleet.nodes[0].address if name == HOST_NAME else fleet.node(name).address
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


@contextlib.contextmanager
def _closing(outcomes: dict[str, Outcome[PortListener]]) -> Iterator[dict[str, Outcome[PortListener]]]:
    """Close all conversations at the end; the programs then exit."""
    try:
        yield outcomes
    finally:
        opened = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
        close: Callable[[PortListener], None] = lambda listener: listener.conversation.close()  # noqa: E731
        run_on_all(opened, close)
