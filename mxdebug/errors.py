"""The one exception that mxdebug raises on bad input."""

from __future__ import annotations


class MxdebugError(ValueError):
    """Something handed to mxdebug is not what it must be.

    The message always has four parts: the operand (or file, or name) that is wrong, what was expected of it, what
    was found, and the likely reason. Nothing is ever repaired or guessed silently: where mxdebug cannot know, it
    raises this.
    """

    def __init__(self, operand: str, expected: str, got: str, reason: str = "") -> None:
        self.operand, self.expected, self.got, self.reason = operand, expected, got, reason
        message = f"{operand}: expected {expected}, got {got}"
        if reason:
            message += f". Likely reason: {reason}"
        super().__init__(message)
