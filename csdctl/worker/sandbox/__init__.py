"""Run what speaks MPI in a sandbox: no files but its own, no processes but its own, no sockets but MPI's.

MPI lets every member of a job start commands on all its machines. Here they run, on the host and on the
nodes, with nothing in reach (docs/explanation/security.md):

- files: Landlock admits the system's libraries, this Python and a scratch directory; root first becomes a
  user without an account
- processes: signals reach processes of the sandbox only; no ptrace, no new namespaces, no privileges
- sockets: a seccomp filter hands `socket`, `bind`, `connect`, `accept` and `kill` to the process outside of
  the sandbox, which performs them. It connects to peers alone, opens every TCP connection with a token made
  from the run's key, and accepts none without.
"""
