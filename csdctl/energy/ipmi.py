"""IPMI: the power of a chassis by its management controller, as `ipmitool dcmi power reading` prints it.

DCMI 1.5, section 6.6.1: watts of the moment, and their mean over the sampling period.
"""

import re

from csdctl.energy.reading import Reading, parse_machine_watts

SCRIPT = "ipmitool dcmi power reading 2>&1"
REMEDY = "run `ipmitool dcmi power reading` there; it needs ipmitool, the driver ipmi_si and root"

_INSTANT = re.compile(r"^\s*Instantaneous power reading\s*:\s*(\S+)\s+Watts", re.MULTILINE)
_STATE = re.compile(r"^\s*Power reading state is\s*:\s*(\S+)", re.MULTILINE)


def parse_dcmi(output: str) -> Reading:
    """Return the power of the moment; raises ValueError when the controller does not measure."""
    found, state = _INSTANT.search(output), _STATE.search(output)
    if found is None:
        first = next((line for line in map(str.strip, output.splitlines()) if line), "")
        raise ValueError(f"expected `Instantaneous power reading`, received {first[:100]!r}")
    if state and state[1] != "activated":
        raise ValueError(f"the power reading is {state[1][:40]}")
    return Reading(parse_machine_watts(found[1]))
