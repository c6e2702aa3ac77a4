"""Run the two ends of a link in sandboxes, each with its own files and processes, and one peer.

MPI lets both processes of a link start commands on both machines (docs/explanation/security.md). Landlock
limits files, a seccomp filter limits system calls, and rlimits limit memory and open files. A process outside
of the sandbox performs the calls of sockets, and counts processes, threads, files and connections.
"""
