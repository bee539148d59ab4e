"""The errors of an item whose bytes cannot be decoded."""

from xpmir_uform.data.items import Item


class UnreadableItem(ValueError):
    """An item's content is not what its modality says, is damaged, or is larger than a declared limit.

    Args:
        message: what stops the run; says the item's key, the reason, and what to do.
        key: the item's key.
        reason: why it cannot be decoded.

    ``key`` and ``reason`` are None where only the message survived, as when a worker process hands on the error.
    """

    def __init__(self, message: str, key: int | None = None, reason: str | None = None):
        super().__init__(message)
        self.key = key
        self.reason = reason

    @classmethod
    def of(cls, item: Item, reason: str) -> "UnreadableItem":
        """The error that ``item`` cannot be decoded for ``reason``."""
        return cls(f"cannot decode {item}: {reason}. Repair the item or leave it out.", item.key, reason)


def out_of_memory(item: Item) -> MemoryError:
    """The error that memory ran out while ``item`` was decoded: no fault of the item, which is not skipped for it."""
    return MemoryError(
        f"memory ran out while {item} was decoded: lower the number of workers or the limits of the item's shape"
    )
