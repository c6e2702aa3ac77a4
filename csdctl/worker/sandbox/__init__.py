"""Run the two ends of a link in sandboxes: no files but its own, no processes but its own, one peer.

MPI lets both processes of a link start commands on both machines (docs/explanation/security.md). Landlock
limits files, a seccomp filter system calls, rlimits memory and open files. The process outside of the sandbox
performs calls of sockets, and counts processes, threads, files and connections.
"""
