"""Which addresses webhooks may go to: the URL at submit, the host when connecting."""

import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from .errors import InvalidRequest
from .messages import PoolCard

MAX_URL: Final = 2048
"""Characters of a webhook's address."""
_URL: Final = re.compile(r"[!-~]+")
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_LONGEST_LABEL: Final = 63
"""Of a name, between two dots; look-ups of a longer one break."""
_PORTS: Final = frozenset({80, 443})
_FIRST_FREE_PORT: Final = 1024
"""Below it only those of the web: nothing else there speaks HTTP."""
_DENIED: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        # Beyond what `is_global` refuses: shared (carrier-grade NAT), relays of 6to4,
        # reserved and documentation ranges, and all that carries another address.
        *("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24"),
        *("198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
)
_UNICAST_6: Final = ipaddress.ip_network("2000::/3")
"""All that is assigned for public use; NAT64 and mapped addresses lie elsewhere."""
_LOCAL: Final = ("localhost", ".localhost", ".local", ".internal", ".lan", ".home.arpa")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def url_problem(url: str, *, allow_private: bool) -> str | None:
    """Says what is wrong with a webhook's address; None when nothing is.

    The address itself is not repeated: it may carry a secret. Names are not looked up
    here, since what they stand for may change: see `is_public`.

    Args:
        url: As it was given.
        allow_private: Whether addresses that are not public, and any port, will do.
    """
    if len(url) > MAX_URL or not _URL.fullmatch(url):
        return (
            f"has {len(url)} characters; expected at most {MAX_URL} printable ASCII "
            "characters without blanks"
        )
    try:
        parts, port = split(url)
    except ValueError as error:
        return f"is no address that can be called: {error}; expected https://host/path"
    if parts.username is not None or parts.password is not None:
        return (
            "holds a user or password; expected none: deliveries are signed, and the "
            "address is shown to operators"
        )
    if parts.fragment:
        return "has a fragment (#…), which is never sent; expected none"
    if allow_private:
        return None
    if port not in _PORTS and port < _FIRST_FREE_PORT:
        return f"has port {port}; expected 80, 443, or one from {_FIRST_FREE_PORT} on"
    host = (parts.hostname or "").rstrip(".")
    address = parse_address(host)
    if (address is not None and not is_public(address)) or host.endswith(_LOCAL):
        return (
            "names a host that is not of the public internet; expected a public one, "
            "unless the pool has webhooks.allow_private"
        )
    return None


def check_webhook(url: str, pool: PoolCard) -> None:
    """Refuses an address that this pool would deliver no webhook to.

    Raises:
        InvalidRequest: The pool sends none, or the address is none of those allowed.
    """
    if pool.webhooks == "none":
        raise InvalidRequest(
            "webhook",
            "this pool sends none: it has no webhooks.secret to sign them with; set "
            "one for its scheduler and janitor, or submit without a webhook",
        )
    problem = url_problem(url, allow_private=pool.webhooks == "any")
    if problem is not None:
        raise InvalidRequest("webhook", problem)


def split(url: str) -> tuple[SplitResult, int]:
    """Takes an address apart.

    Returns:
        Its parts and its port.

    Raises:
        ValueError: It is not of http or https, or names no host.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its words may repeat a password
        raise ValueError("its host or port cannot be read") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError("its scheme is neither http nor https")
    host = parts.hostname or ""
    if not host or not (":" in host or _HOST.fullmatch(host)) or ".." in host:
        raise ValueError("it names no host")
    if max(map(len, host.split("."))) > _LONGEST_LABEL:
        raise ValueError(
            f"a part of its host is longer than {_LONGEST_LABEL} characters"
        )
    if ":" in host and parse_address(host) is None:
        raise ValueError("its IPv6 address cannot be read")
    if port == 0:
        raise ValueError("its port is 0")
    return parts, default_port(parts.scheme) if port is None else port


def default_port(scheme: str) -> int:
    """Returns the port of a scheme."""
    return 443 if scheme == "https" else 80


def shown_target(url: str) -> str:
    """Returns scheme, host and port alone: paths and queries may carry a secret."""
    try:
        parts, port = split(url)
    except ValueError:
        return "an address that cannot be read"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    suffix = "" if port == default_port(parts.scheme) else f":{port}"
    return f"{parts.scheme}://{host}{suffix}"


def parse_address(host: str) -> Address | None:
    """Returns the IP address that `host` is, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether an address is of the public internet.

    Not so are loopback, private, link-local, shared (carrier-grade NAT), multicast,
    reserved and documentation ranges, 0.0.0.0, and every IPv6 address that stands for
    an IPv4 address (mapped, 6to4, Teredo, NAT64), whatever that is.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None or address not in _UNICAST_6:
            return False
    elif address.is_multicast:
        return False
    denied = any(address in net for net in _DENIED if net.version == address.version)
    return address.is_global and not denied
