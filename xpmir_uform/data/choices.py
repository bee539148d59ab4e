"""Choice sets: items that offer choices, of which one is right."""

from abc import ABC, abstractmethod

from experimaestro import Config

from xpmir_uform.data.items import Item


def right(choices: bytes, choice: bytes) -> tuple[float, ...]:
    """The targets of ``choices`` of which ``choice``, one byte, is right."""
    return tuple(float(byte == ord(choice)) for byte in choices)


class ChoiceSet(Config, ABC):
    """Describes held-out items whose right answers are known."""

    __xpmid__ = "uform.choice-set"

    @abstractmethod
    def load(self) -> list[Item]:
        """The items, the same at every call. All offer equally many choices; the target of the right one is 1."""
