"""All targets, by name."""

from tests.fuzz import documents, messages, ssh, worker_files

_ALL = (*documents.TARGETS, *messages.TARGETS, *ssh.TARGETS, *worker_files.TARGETS)
TARGETS = {target.name: target for target in _ALL}
