"""One command on every node through asyncssh, with keys and known_hosts read once."""

import asyncio
import sys

import asyncssh

user, port, key, known_hosts, *addresses = sys.argv[1:]


async def visit(address: str, options: asyncssh.SSHClientConnectionOptions) -> str:
    async with asyncssh.connect(address, int(port), options=options) as connection:
        return str((await connection.run("echo pong")).stdout)


async def main() -> None:
    options = asyncssh.SSHClientConnectionOptions(
        username=user,
        client_keys=[asyncssh.read_private_key(key)],
        known_hosts=asyncssh.read_known_hosts(known_hosts),
        agent_path=None,
        config=None,
        login_timeout=60,
    )
    outcomes = await asyncio.gather(
        *(visit(address, options) for address in addresses), return_exceptions=True
    )
    for outcome in outcomes:
        print(outcome, end="" if isinstance(outcome, str) else "\n")


asyncio.run(main())
