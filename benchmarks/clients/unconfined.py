"""csdctl with MPI as it runs on machines that cannot confine it: for benchmarks of what confinement costs.

python unconfined.py train job.yaml
"""

from csdctl.cli.app import main
from csdctl.workflows.train import run

run.find_obstacles = lambda fleet, sessions, worker_path: dict.fromkeys(sessions, "as in a benchmark")
main()
