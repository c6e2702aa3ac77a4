"""Options and arguments that several commands share."""

from csdctl.cli.parameters import DEFAULT_FLEET, DEFAULT_JOB, argument, nodes, option, selection, strategy

FLEET = option(DEFAULT_FLEET, "Path of the fleet file.", envvar="CSDCTL_FLEET")
JOB = argument(DEFAULT_JOB, "Path of the job file.")
LIMIT = nodes("Only these nodes: names, ranges (csd[0-7]), groups, jump hosts (nodes behind them), or all.")
EXCLUDE = nodes("Leave out these nodes; same syntax as --limit.")
FAILED_FROM = selection(
    None,
    "Select only the nodes that an earlier command failed on: .csdctl/failed.json or --json output.",
    metavar="FILE",
)
JSON = option(False, "Print JSON to stdout, and everything else to stderr.")
FORCE = option(False, "Overwrite existing files.")
DRY_RUN = option(False, "Show what would be done, without doing it.")
YES = option(False, "Do not ask for confirmation.", "--yes", "-y")
PLAN = option(None, "Plan; default: the job's plan from `tune`.")
BATCH_SIZE = option(None, "Use this batch size on every rank instead of a plan.", min=1)
MAX_STEPS = option(None, "Stop after this many steps, for benchmarks.", min=1)
STRATEGY = strategy(
    "auto",
    "auto: as the plan says; features: compute frozen layers once per sample, then train the head; "
    "split: nodes compute the layers up to --cut, the host the rest.",
)
CUT = strategy("", "split: last layer that nodes compute.", metavar="LAYER")
MICRO_BATCHES = strategy(4, "split: micro-batches of each rank's batch.", min=1)
FEATURE_PRECISION = strategy("float32", "features: type of stored features.")
SKIP_DOCTOR = selection(False, "Start without checking the machines first.")
CONNECT_TIMEOUT = option(10.0, "Seconds to connect to a node.", min=0.001, envvar="CSDCTL_CONNECT_TIMEOUT")
HTML = option(None, "Write charts and tables as self-contained HTML.", metavar="FILE")
