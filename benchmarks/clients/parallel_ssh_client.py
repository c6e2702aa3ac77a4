"""One command on every node through parallel-ssh, which checks no host keys."""

import sys

from pssh.clients import ParallelSSHClient

user, port, key, _, *addresses = sys.argv[1:]
client = ParallelSSHClient(
    addresses, user=user, port=int(port), pkey=key, pool_size=len(addresses), allow_agent=False, timeout=60
)
for output in client.run_command("echo pong", stop_on_errors=False):
    print(output.exception or "\n".join(output.stdout))
