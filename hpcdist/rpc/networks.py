"""Networks between nodes: by which addresses a rank can be reached, in which order. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hpcdist.errors import UsageError

_FAST = ("ib", "hsn", "opa", "hfi")
"""InfiniBand, Slingshot, Omni-Path: what their networks are called."""
_LOCAL = ("docker", "virbr", "veth", "br-", "cni", "podman", "lxc")
"""Networks inside a node; the addresses are the same on all nodes."""
_LOOPBACK = "127."


def addresses(networks: Mapping[str, str], wanted: str | None) -> list[str]:
    """Return the addresses at which others should try this rank, the best first.

    Args:
        networks: the networks of this node, and its address in each.
        wanted: names of networks, their beginnings or addresses, separated by commas; None for
            all but those inside a node.

    Raises:
        UsageError: there is no such network.

    """
    if wanted is None:
        ordered = sorted(networks, key=_preference)
        outside = [name for name in ordered if not _is_local(name, networks[name])]
        return [networks[name] for name in outside or ordered]
    found = [
        address
        for each in wanted.split(",")
        for name, address in networks.items()
        if each.strip() in (name, address) or (each.strip() and name.startswith(each.strip()))
    ]
    if not found:
        shown = ", ".join(f"{name} ({address})" for name, address in networks.items())
        raise UsageError(
            f"there is no network {wanted!r} on this node; there are {shown or 'none'}: name one "
            "of them by interface= or HPCDIST_RPC_INTERFACE"
        )
    return list(dict.fromkeys(found))


def _preference(name: str) -> int:
    return 0 if name.startswith(_FAST) else 1


def _is_local(name: str, address: str) -> bool:
    return address.startswith(_LOOPBACK) or name.startswith(_LOCAL)
