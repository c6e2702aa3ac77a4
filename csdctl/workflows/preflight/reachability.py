"""Every machine opens a door and knocks at those of the others: which pairs can connect, and which cannot.

A small program on each machine, all at once, in three steps over one conversation each: open, knock, leave.
"""

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from csdctl.errors import DeadlineError, RemoteCommandError
from csdctl.fleet.checks import Check, Status, judge_error
from csdctl.fleet.condition import Condition
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.network import addresses_in
from csdctl.fleet.reachability import ConnectAttempt, judge_attempts, pairs_to_try
from csdctl.transport.many import Outcome, run_on_all
from csdctl.transport.session import Conversation, Session
from csdctl.transport.standalone import build_program_command

KNOCK_DEADLINE_S = 3.0


@dataclass(frozen=True)
class PortListener:
    """The program on one machine: its conversation, and the address and ports where it listens."""

    conversation: Conversation
    address: str
    ports: tuple[int, ...]


def check_reachability(
    fleet: Fleet, sessions: Mapping[str, Session], conditions: Mapping[str, Condition], deadline_s: float
) -> list[Check]:
    """A check for every machine of `sessions` whether those that talk in training can connect."""
    token = secrets.token_hex(8)

    def open_doors(session: Session) -> PortListener:
        address = _address(session.name, fleet, conditions)
        return _open(session, fleet.python_of(session.name), address, token, deadline_s)

    with _closing(run_on_all(sessions, open_doors)) as outcomes:
        checks = [judge_error(name, "ports", one.error) for name, one in outcomes.items() if one.error]
        keepers = {name: one.value for name, one in outcomes.items() if one.value}
        wanted = pairs_to_try(list(keepers))

        def knock_at_others(name: str) -> list[ConnectAttempt]:
            others = {owner: keepers[owner] for owner in wanted[name]}
            return _knock(name, keepers[name], others, deadline_s)

        tried = run_on_all({name: name for name in keepers}, knock_at_others)
        checks += [judge_error(name, "ports", one.error) for name, one in tried.items() if one.error]
        knocks = [one for outcome in tried.values() for one in outcome.value or ()]
    judged = judge_attempts(list(keepers), knocks)
    failed = {check.machine for check in checks}
    return checks + [check for check in judged if check.machine not in failed or check.status != Status.OK]


def _open(session: Session, python: str, address: str, token: str, deadline_s: float) -> PortListener:
    conversation = session.converse(build_program_command(python, "reachability"))
    try:
        asked = {
            "name": session.name,
            "token": token,
            "address": address,
            "is_host": session.name == HOST_NAME,
        }
        answer = _ask(conversation, session.name, asked, deadline_s)
        if "error" in answer:
            raise RemoteCommandError(answer["error"], node=session.name, remedy="see which ports are in use")
    except BaseException:
        conversation.close()
        raise
    return PortListener(conversation, address, tuple(answer["ports"]))


def _knock(
    name: str, keeper: PortListener, others: Mapping[str, PortListener], deadline_s: float
) -> list[ConnectAttempt]:
    listeners = [(server, other.address, port) for server, other in others.items() for port in other.ports]
    asked = {"listeners": listeners, "deadline_s": min(KNOCK_DEADLINE_S, deadline_s)}
    answer = _ask(keeper.conversation, name, asked, deadline_s)
    return [
        ConnectAttempt(name, server, address, port, reason)
        for (server, address, port), (_, _, reason) in zip(listeners, answer["attempts"], strict=True)
    ]


def _ask(conversation: Conversation, name: str, asked: object, deadline_s: float) -> dict[str, Any]:
    """One line each way; raises NodeError or DeadlineError."""
    remedy = "look what its Python says: `python3 -I -S -c 'import socket'`"
    try:
        conversation.send_line(json.dumps(asked))
        answer: dict[str, Any] = json.loads(conversation.read_line(deadline_s=deadline_s))
        return answer
    except EOFError:
        words = conversation.wait(deadline_s=5).last_error_line
        message = f"knocking at the others failed: {words or 'no message'}"
        raise RemoteCommandError(message, node=name, remedy=remedy) from None
    except DeadlineError:
        message = f"knocking at the others took more than {deadline_s:g} s"
        raise DeadlineError(message, node=name, remedy=remedy) from None
    except ValueError as error:
        raise RemoteCommandError(f"unreadable answer: {error}", node=name, remedy=remedy) from None


def _address(name: str, fleet: Fleet, conditions: Mapping[str, Condition]) -> str:
    """Where the machine listens: inside `network:`, else where it is reached, else anywhere."""
    own = conditions[name].addresses or ()
    if fleet.network:
        return next(iter(addresses_in(fleet.network, own)), "0.0.0.0")
    towards = fleet.nodes[0].address if name == HOST_NAME else fleet.node(name).address
    reached = _route_to(towards) if name == HOST_NAME else _resolve(towards)
    return reached if reached in own else next(iter(addresses_in("", own)), "127.0.0.1")


def _route_to(address: str) -> str:
    """This machine's own address on the way to `address`; '' when there is none. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((address, 9))
        return str(trial.getsockname()[0])
    return ""


def _resolve(address: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(address)
    return ""


@contextlib.contextmanager
def _closing(outcomes: dict[str, Outcome[PortListener]]) -> Iterator[dict[str, Outcome[PortListener]]]:
    """Shut all doors at the end; the programs leave by themselves."""
    try:
        yield outcomes
    finally:
        opened = {name: one.value for name, one in outcomes.items() if one.value}
        closing: Callable[[PortListener], None] = lambda keeper: keeper.conversation.close()  # noqa: E731
        run_on_all(opened, closing)
