"""Allowed host names."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from bertserve.serving.security.keys import ApiKeys
    from bertserve.serving.settings import Settings


def known_hosts(settings: Settings, address: str, keys: ApiKeys | None) -> frozenset[str] | None:
    """The allowed host names of a port at an address besides loopback; empty if none are set; None if all are allowed.

    A page whose name resolves to 127.0.0.1 has the same origin as a server there, so the browser lets it do what the
    console does (DNS rebinding). Only the Host header tells them apart.
    """
    names = settings.host_names
    if "*" in names or not (names or (keys is None and is_loopback(address))):
        return None
    return names


def is_known_host(host: bytes, names: Collection[str]) -> bool:
    """Whether a valid Host is an allowed name, `localhost` or a loopback address, with any port.

    Without names, two more kinds are allowed: an empty Host, which no browser sends, and a single label, such as that
    of an nginx upstream or a container. A single label is in no domain that an attacker could own.
    """
    name = host.decode("latin-1").lower()
    name = name[: name.index("]") + 1] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
    if name in names or name == "localhost" or is_loopback(name.strip("[]")):
        return True
    return not names and "." not in name and (not name or name[0].isalpha())


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
