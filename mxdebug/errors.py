"""The one exception that mxdebug raises on bad input."""

from __future__ import annotations

import html

_MOST = 4000  # characters of one part of a message: names come from files, at any length


def printable(text: str) -> str:
    """A text as it may reach a terminal or a page: what a file calls its tensors must not move the cursor, or turn the line around.

    Control, bidirectional and other invisible characters, and halves of surrogates, become their escape, such as \\x1b; line ends stay.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def escaped(text: str) -> str:
    """A text as a page holds it: HTML's characters, and what cannot be printed, become escapes."""
    return html.escape(printable(text))


def brief(value: object, most: int = 80) -> str:
    """repr of a value from a file, cut to `most` characters: it can be of any length or depth."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits, or more levels, than Python prints
        text = "..."
    return text if len(text) <= most else text[: most - 3] + "..."


class MxdebugError(ValueError):
    """Something handed to mxdebug is not what it must be.

    The message always has four parts: the operand (or file, or name) that is wrong, what was expected of it, what
    was found, and the likely reason. Nothing is ever repaired or guessed silently: where mxdebug cannot know, it
    raises this.
    """

    def __init__(self, operand: str, expected: str, got: str, reason: str = "") -> None:
        # What is wrong is named in one line: a name from a file must not look like a verdict of ours.
        self.operand, self.expected, self.got, self.reason = map(_part, (operand.replace("\n", "\\n"), expected, got, reason))
        message = f"{self.operand}: expected {self.expected}, got {self.got}"
        if reason:
            message += f". Likely reason: {self.reason}"
        super().__init__(message)


def _part(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text) - _MOST} characters more)"
