"""NVMe drives of a machine: a CSD and its host both report the serial number of the same drive."""

import re

from csdctl.fleet.facts import Drive
from csdctl.probes.probe import FactProbe, FactValues

SECTOR_BYTES = 512
"""The unit of /sys, whatever the drive's sector size is."""

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
    """Parse the drives, in device order, without those that have no serial number."""
    if not output.startswith("begin"):
        raise ValueError("no output")
    drives = []
    for block in re.split(r"^controller ", output, flags=re.MULTILINE)[1:]:
        device, *lines = block.splitlines()
        values = [line.partition(" ")[::2] for line in lines]
        named = {key: value.strip() for key, value in values}
        sizes = [int(value) * SECTOR_BYTES for key, value in values if key == "sectors" and value.isdigit()]
        if named.get("serial"):
            drives.append(
                Drive(
                    device=f"/dev/{device}",
                    serial=named["serial"],
                    model=named.get("model", ""),
                    size_bytes=sum(sizes) if sizes else None,
                )
            )
    return {"drives": tuple(sorted(drives, key=lambda drive: (len(drive.device), drive.device)))}


NVME = FactProbe("NVMe drives", _SCRIPT, parse_nvme)
