"""The language of a name, as a choice among letters."""

from dataclasses import replace
from functools import cached_property

from experimaestro import Param

from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.problems import ChoiceSet, right
from xpmir_uform.data.sampling import BagSource
from xpmir_uform.datasets.emoji import Emoji, EmojiCollection

LETTERS = {"en": b"e", "es": b"s", "fr": b"f", "de": b"d", "it": b"i", "pt": b"p"}


def names_of(emoji: list[Emoji], languages: list[str]) -> list[Item]:
    """The name of each emoji in each language, which is the right choice; some names are those of two languages.

    Raises:
        ValueError: a language has no letter.
    """
    if not set(languages) <= set(LETTERS):
        raise ValueError(f"languages are {', '.join(languages)}, expected some of {', '.join(LETTERS)}")
    choices = b"".join(LETTERS[language] for language in languages)
    return [
        replace(one.name(language), choices=choices, targets=right(choices, LETTERS[language]))
        for one in emoji
        for language in languages
    ]


class LanguageBags(BagSource):
    """A bag is the name of a training emoji in one language, which is asked for."""

    __xpmid__ = "uform.language-bags"

    collection: Param[EmojiCollection]
    """Where the names come from"""

    @cached_property
    def items(self) -> list[Item]:
        """The names of the training emoji."""
        return names_of(self.collection.train(), self.collection.languages)

    def __len__(self) -> int:
        return len(self.items)

    def bag(self, index: int, seed: int, epoch: int) -> Bag:
        """The bag of one name, the same in every epoch."""
        return Bag((self.items[index],))


class LanguageChoices(ChoiceSet):
    """The names of the held-out emoji in each language."""

    __xpmid__ = "uform.language-choices"

    collection: Param[EmojiCollection]
    """Where the names come from"""

    def load(self) -> list[Item]:
        """The names, emoji after emoji."""
        return names_of(self.collection.test(), self.collection.languages)
