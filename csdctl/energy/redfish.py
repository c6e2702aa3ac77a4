"""Redfish: the power of a chassis by its management controller, over HTTPS, read by the host.

DMTF DSP0268: `Power` has PowerControl[].PowerConsumedWatts; `EnvironmentMetrics` of a chassis has
PowerWatts.Reading and EnergyJoules or EnergykWh. `PowerSubsystem` itself says what was allocated, which is no
measurement. Nor are its power supplies one of the machine: there are several, some report what they give
instead of what they take, and some as `PowerInputWatts` the most that they can take.
"""

import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from csdctl.energy.reading import Reading, parse_machine_watts
from csdctl.errors import InputError
from csdctl.fleet.model import PowerSource

MAX_BYTES = 1 << 20
REMEDY = (
    "try `curl --user USER URL`; `url` is that of Power or EnvironmentMetrics below /redfish/v1/Chassis/ID"
)


def parse_redfish(text: str) -> Reading:
    """Return the power that a Redfish document has; raises ValueError for one that has none."""
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"expected JSON, received {text[:60]!r}") from None
    if not isinstance(content, dict):
        raise ValueError("expected a Redfish resource")
    controls = content.get("PowerControl")
    if isinstance(controls, list) and controls and isinstance(controls[0], dict):
        # Further members are parts of the first, such as processors and memory.
        return Reading(_watts(controls[0].get("PowerConsumedWatts"), "PowerConsumedWatts"))
    if isinstance(sensor := content.get("PowerWatts"), dict):
        return Reading(_watts(sensor.get("Reading"), "PowerWatts.Reading"))
    if "InputPowerWatts" in content:
        raise ValueError("these are the metrics of one power supply: use EnvironmentMetrics of the chassis")
    if "PowerSupplies" in content and "PowerControl" not in content:
        raise ValueError("expected PowerControl, received power supplies alone: use EnvironmentMetrics")
    if "Allocation" in content or "CapacityWatts" in content:
        raise ValueError("PowerSubsystem says what is allocated, not what is used: use EnvironmentMetrics")
    raise ValueError("expected PowerControl or PowerWatts")


def _watts(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number as {what}, received {str(value)[:40]!r}")
    return parse_machine_watts(str(value), what)


def read_redfish(power: PowerSource, *, deadline_s: float) -> Reading:
    """Get the document; raises ValueError, OSError, or InputError for the files that fleet.yaml names."""
    request = urllib.request.Request(power.url, headers={"Accept": "application/json"})
    if power.credentials:
        try:
            secret = power.credentials.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise InputError(f"the credentials of {power.url} cannot be read: {error}") from None
        if request.type != "https":
            raise InputError(f"{power.url}: a password is sent over https only")
        encoded = base64.b64encode(secret.encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    context = _tls(power) if request.type == "https" else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), _NoRedirect(), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=deadline_s) as response:
            body = response.read(MAX_BYTES)
    except http.client.HTTPException as error:  # no OSError, although the other side is at fault
        raise ValueError(f"expected an HTTP answer, received a damaged one: {str(error)[:100]!r}") from None
    return parse_redfish(body.decode(errors="replace"))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A management controller answers where it was asked; the password goes nowhere else."""

    def redirect_request(self, *args: Any, **keywords: Any) -> None:
        """Follow nothing: the answer becomes an HTTPError."""


def _tls(power: PowerSource) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=power.certificate)
    except OSError as error:
        raise InputError(f"the certificate {power.certificate} cannot be read: {error}") from None
    # The certificate itself is trusted, whatever name the maker has put into it.
    context.check_hostname = power.certificate is None
    return context
