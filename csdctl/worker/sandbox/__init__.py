"""Run the two ends of a link in sandboxes: no files but its own, no processes but its own, one peer.

MPI lets both processes of a link start commands on both machines. Here they run with nothing in reach
(docs/explanation/security.md):

- files: Landlock admits the system's libraries, this Python and a scratch directory; root first becomes a
  user of this link alone
- system calls: a seccomp filter allows those that a link needs; signals reach processes of the sandbox only
- sockets: the filter hands `socket`, `bind`, `connect` and `accept` to the process outside of the sandbox,
  which performs them. It connects to the peer alone, opens every TCP connection with a token made from the
  link's key, and accepts none without
- limits: of memory and open files by rlimits; of processes, threads, files and connections by counting
"""
