"""Groups of replicas that are complete on the hosts of a job together."""

from collections.abc import Sequence

from jaxforge.checkpoint.replica.store import Group, Store

Inventory = list[tuple[str, int, list[int]]]
"""Name of each group on a host, the number of its senders, and the senders whose files are here."""


def inventory(store: Store) -> Inventory:
    """Return the intact files on this host."""
    entries: Inventory = []
    for group in store.groups():
        senders = {sender: manifest.senders for sender, manifest in store.manifests(group)}
        if senders:
            entries.append((group.name, max(senders.values()), sorted(senders)))
    return entries


def complete(
    inventories: Sequence[Inventory],
) -> list[tuple[Group, int, dict[int, list[int]]]]:
    """Return the groups with every sender's files on some host, the newest first.

    Args:
        inventories: inventory of each process.

    Returns:
        For each group, the number of senders, and the processes whose host has each sender's files.
    """
    holders: dict[Group, dict[int, list[int]]] = {}
    counts: dict[Group, int] = {}
    for process, entries in enumerate(inventories):
        for name, count, senders in entries:
            group = Group.parse(name)
            assert group is not None
            counts[group] = count
            for sender in senders:
                holders.setdefault(group, {}).setdefault(sender, []).append(process)
    return [
        (group, counts[group], holders[group])
        for group in sorted(holders, reverse=True)
        if holders[group].keys() >= set(range(counts[group]))
    ]
