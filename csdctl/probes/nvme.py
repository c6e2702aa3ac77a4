"""The NVMe drives that a machine shows: a CSD and its host both show the serial of the one drive."""

import re

from csdctl.fleet.facts import Drive
from csdctl.probes.probe import FactProbe, FactValues

SECTOR_BYTES = 512
"""What /sys counts in, whatever the drive's own sectors are."""

# With multipath, a controller has nvme0c1n1, and the block device nvme0n1 belongs to the subsystem.
_SCRIPT = """\
echo begin
for controller in /sys/class/nvme/nvme*; do
  [ -r "$controller/serial" ] || continue
  echo "controller ${controller##*/}"
  echo "serial $(cat "$controller/serial")"
  echo "model $(cat "$controller/model")"
  for namespace in "$controller"/nvme*n*; do
    name=$(echo "${namespace##*/}" | sed 's/c[0-9]*n/n/')
    [ ! -r "/sys/block/$name/size" ] || echo "sectors $(cat "/sys/block/$name/size")"
  done
done"""


def parse_nvme(output: str) -> FactValues:
    """The drives, in the order of their devices; one without a serial is none that could be told apart."""
    if not output.startswith("begin"):
        raise ValueError("nothing was printed")
    drives = []
    for block in re.split(r"^controller ", output, flags=re.MULTILINE)[1:]:
        device, *lines = block.splitlines()
        values = [line.partition(" ")[::2] for line in lines]
        named = {key: value.strip() for key, value in values}
        sizes = [int(value) * SECTOR_BYTES for key, value in values if key == "sectors" and value.isdigit()]
        if named.get("serial"):
            drives.append(
                Drive(
                    f"/dev/{device}", named["serial"], named.get("model", ""), sum(sizes) if sizes else None
                )
            )
    return {"drives": tuple(sorted(drives, key=lambda drive: (len(drive.device), drive.device)))}


NVME = FactProbe("NVMe drives", _SCRIPT, parse_nvme)
