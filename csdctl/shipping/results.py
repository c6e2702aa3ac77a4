"""Fetch what a machine has computed: the rows that `predict` was asked for, or features of public samples."""

import base64
import binascii
import hashlib
from contextlib import closing, suppress
from typing import BinaryIO

from csdctl.shipping.worker_calls import END_DEADLINE_S, build_worker_command, worker_error
from csdctl.transport.answer import Answer
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Session
from csdctl.worker.protocol.features import SendSpec
from csdctl.worker.protocol.json_codec import ANSWER_PREFIX, DATA_PREFIX, to_json

LINE_DEADLINE_S = 120.0


def fetch_results(
    session: Session,
    python: str,
    worker_path: str,
    spec: SendSpec,
    target: BinaryIO,
    traffic_class: TrafficClass,
    *,
    doing: str,
) -> None:
    """Write the file that `spec` describes to `target`; record its bytes as `traffic_class`.

    Raises the error that the worker reports, RemoteCommandError for another file than described, and
    DeadlineError.
    """
    digest, num_bytes, is_complete = hashlib.sha256(), 0, False
    answer = Answer({}, session.name, doing)
    with closing(session.converse(build_worker_command(python, worker_path, ["send"]))) as conversation:
        with suppress(EOFError):
            conversation.send_line(to_json(spec))
        with suppress(EOFError):
            while not is_complete:
                line = conversation.read_line(deadline_s=LINE_DEADLINE_S)
                is_complete = line.startswith(ANSWER_PREFIX)
                if not line.startswith(DATA_PREFIX):
                    continue
                session.meter.record(traffic_class, received=len(line) + 1)
                try:
                    block = base64.b64decode(line.removeprefix(DATA_PREFIX), validate=True)
                except binascii.Error:
                    raise answer.error("received a line that is not base64") from None
                num_bytes += len(block)
                if num_bytes > spec.num_bytes:
                    raise answer.error(f"received more than {spec.num_bytes:,} bytes")
                digest.update(block)
                target.write(block)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
    if done.exit_code != 0 or not is_complete:
        raise worker_error(done, session.name, doing)
    if digest.hexdigest() != spec.sha256:
        raise answer.error(f"received a file with SHA-256 {digest.hexdigest()}, expected {spec.sha256}")
