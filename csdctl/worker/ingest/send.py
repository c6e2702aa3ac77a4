"""`send`: sends results of `predict`, or features, to the host. Nothing else can be requested."""

import base64
import re
from collections.abc import Callable
from pathlib import Path

from csdctl.worker.data.file_hash import hash_file, open_regular
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.features import FEATURE_STORE, SendSpec, Sent

LINE_BYTES = 48 << 10
"""Of the file in one line; 64 KiB in base64."""


def send(spec: SendSpec, write: Callable[[str], None], *, home: Path = Path()) -> Sent:
    """Write the stored numbers as lines of base64; raises WorkerError unless they are what was described."""
    what = "features" if spec.store == FEATURE_STORE else "results"
    again = "run the same command again"
    if not re.fullmatch(r"[0-9a-f]{64}", spec.fingerprint):
        raise WorkerError(f"no {what} have this fingerprint", exit_code=2)
    try:
        with open_regular(home / spec.store / spec.fingerprint / "images.npy") as file:
            if hash_file(file, what) != spec.sha256:
                raise WorkerError(f"the {what} have changed since they were computed", remedy=again)
            file.seek(0)
            num_bytes = 0
            while block := file.read(LINE_BYTES):
                num_bytes += len(block)
                write(base64.b64encode(block).decode())
            return Sent(num_bytes)
    except (OSError, ValueError) as error:
        raise WorkerError(f"the {what} cannot be read: {type(error).__name__}", remedy=again) from None
