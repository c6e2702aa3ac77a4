"""Architecture, CPU model, features and cores."""

import re

from csdctl.probes.probe import FactProbe, FactValues

# From the "MIDR_EL1, Main ID Register" tables of Arm's technical reference manuals; NVIDIA's from Linux.
_ARM_PARTS = {
    (0x41, 0xC07): "Cortex-A7",
    (0x41, 0xC09): "Cortex-A9",
    (0x41, 0xC0F): "Cortex-A15",
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD04): "Cortex-A35",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD0D): "Cortex-A77",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD47): "Cortex-A710",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x4E, 0x003): "NVIDIA Denver 2",
    (0x4E, 0x004): "NVIDIA Carmel",
}


def parse_architecture(output: str) -> FactValues:
    """Parse `uname -m`."""
    architecture = output.strip()
    if not re.fullmatch(r"\w+", architecture):
        raise ValueError(f"`uname -m` printed {architecture[:80]!r}")
    return {"architecture": architecture}


def parse_cpuinfo(output: str) -> FactValues:
    """Parse /proc/cpuinfo of x86 (model name, flags) or ARM (CPU part, Features)."""
    lines = [line.partition(":") for line in output.splitlines()]
    entries = [(key.strip(), value.strip()) for key, colon, value in lines if colon]
    num_cores = sum(key == "processor" and value.isdigit() for key, value in entries)
    if not num_cores:
        raise ValueError("/proc/cpuinfo lists no processor")
    by_key = dict(reversed(entries))  # the first processor's
    features = by_key.get("flags") or by_key.get("Features") or ""
    model = _arm_model(entries) or by_key.get("model name") or by_key.get("Model") or by_key.get("uarch")
    return {"num_cores": num_cores, "cpu_model": model, "cpu_features": tuple(sorted(features.split()))}


def _arm_model(entries: list[tuple[str, str]]) -> str | None:
    """Return the names of the core types, each once: a machine may have big and little cores."""
    implementer, models = 0, []
    for key, value in entries:
        if key == "CPU implementer":
            implementer = int(value, 16)
        elif key == "CPU part":
            part = int(value, 16)
            models.append(_ARM_PARTS.get((implementer, part), f"ARM {implementer:#04x}/{part:#05x}"))
    return " + ".join(dict.fromkeys(models)) or None


ARCHITECTURE = FactProbe("architecture", "uname -m", parse_architecture)
CPUINFO = FactProbe("CPU", "cat /proc/cpuinfo", parse_cpuinfo)
