"""Stop strings in a text that comes in pieces. Every character is looked at once or twice, however long the strings are."""

from __future__ import annotations


class StopString:
    """How much of one stop string a growing text ends with, by Knuth, Morris and Pratt (https://doi.org/10.1137/0206024).

    Attributes:
        size: the text ends with this many of the string's first characters, and with no longer beginning of it. The whole
            string does not count, because the text may go on after it.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.size = 0
        # For each size of a beginning, the longest shorter beginning with which that one ends. It is worked out as far as
        # the text has come, because few texts come far into a long string.
        self._shorter = [0, 0]

    def read(self, text: str) -> int | None:
        """Take the text's next characters.

        Returns:
            How many of them there are up to the first end of the string; None if it does not end in them.
        """
        first = None
        for count, character in enumerate(text, start=1):
            size = self._longer(self.size, character)
            if size == len(self._shorter):
                self._shorter.append(self._longer(self._shorter[-1], character))
            if size == len(self.string):
                first = first or count
                size = self._shorter[size]
            self.size = size
        return first

    def _longer(self, size: int, character: str) -> int:
        """The longest beginning with which the beginning of `size` ends when the character follows it."""
        while size and self.string[size] != character:
            size = self._shorter[size]
        return size + (self.string[size] == character)
