"""Read the text of a Python signature, as `str(inspect.signature(f))` writes it, without evaluating any of it.

The text holds annotations of types that are not installed here and defaults such as `<nvfp4_4over6 unset: read ...>`,
which are no Python, so `ast` cannot read it whole.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import MxdebugError
from .tensors import DTYPES
from .values import EnumMember

UNAVAILABLE = "<unavailable>"  # what FlashInfer writes where Python has no signature


class _Sentinel(enum.Enum):
    UNKNOWN_DEFAULT = "a default that the signature's text does not define"
    REQUIRED = "no default"

    def __repr__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        raise MxdebugError("argument", "a value", self.name, "it was not passed, and FlashInfer's dump does not say what its default is")


UNKNOWN_DEFAULT = _Sentinel.UNKNOWN_DEFAULT
_REQUIRED = _Sentinel.REQUIRED


@dataclass(frozen=True)
class Parameter:
    """One parameter; `kind` is "positional only", "positional", "variadic", "keyword only" or "variadic keyword"."""

    name: str
    kind: str
    default: Any = _REQUIRED

    @property
    def has_default(self) -> bool:
        """Whether the signature gives a default, known or not."""
        return self.default is not _REQUIRED


def parse(text: str) -> tuple[Parameter, ...]:
    """The parameters of "(a: int, *, b: str = 'x') -> c", in order; () for "<unavailable>". MxdebugError for anything else."""
    if text == UNAVAILABLE:
        return ()
    parameters: list[Parameter] = []
    kind = "positional"
    for piece in _pieces(text):
        if piece == "/":
            parameters = [Parameter(p.name, "positional only", p.default) for p in parameters]
            continue
        if piece == "*":
            kind = "keyword only"
            continue
        match = re.fullmatch(r"(\*{0,2})([^\W\d]\w*)\s*((?:[:=].*)?)", piece, re.DOTALL)
        if not match:
            raise _unreadable(text, f"{piece!r} among the parameters")
        stars, name, rest = match.groups()
        if stars:
            parameters.append(Parameter(name, "variadic" if stars == "*" else "variadic keyword"))
            kind = "keyword only"
            continue
        equals = next((i for i, char, depth in _outside(rest) if char == "=" and depth == 0), None)
        parameters.append(Parameter(name, kind, _REQUIRED if equals is None else _default(rest[equals + 1:].strip())))
    return tuple(parameters)


def _default(text: str) -> Any:
    """The value of a default's repr: literals, float specials, torch dtypes, enum members; else UNKNOWN_DEFAULT."""
    if text in DTYPES:
        return DTYPES[text]
    if text in ("inf", "-inf", "nan"):
        return float(text)
    # An enum's repr is <Class.member: value> unless the class defines another; FlashInfer's since 0.7 write Class.member.
    member = re.fullmatch(r"([A-Z]\w*)\.([^\W\d]\w*)", text) or re.fullmatch(r"<([^\W\d]\w*)\.([^\W\d]\w*): [-\w'\"]+>", text)
    if member:
        return EnumMember(member[2], member[1])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return UNKNOWN_DEFAULT


def _pieces(text: str) -> list[str]:
    """The comma-separated pieces between the first parenthesis and its partner; what follows is the return annotation."""
    pieces, start = [], 1
    if text.startswith("("):
        for i, char, depth in _outside(text):
            if (char == "," and depth == 1) or depth == 0:
                pieces.append(text[start:i].strip())
                start = i + 1
            if depth == 0 and text[i + 1:].lstrip()[:2] not in ("", "->"):
                break
            if depth == 0:
                return pieces if pieces != [""] else []
    raise _unreadable(text, "no balanced parentheses")


_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


def _outside(text: str) -> Iterator[tuple[int, str, int]]:
    """(index, character, bracket depth after it) of each character that is outside of strings and of <...> reprs."""
    stack: list[str] = []
    quote = ""
    escaped = False
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
            continue
        if stack and stack[-1] == "<" and char not in "<>":
            continue  # free text, where an apostrophe opens no string
        if char in "'\"":
            quote = char
            continue
        if char in _CLOSING:
            stack.append(char)
        elif stack and char == _CLOSING[stack[-1]]:
            stack.pop()
        yield i, char, len(stack)


def _unreadable(text: str, got: str) -> MxdebugError:
    return MxdebugError("function signature", 'a text like "(x: torch.Tensor, n: int = 1) -> torch.Tensor"', f"{got} in {text[:200]!r}",
                        "not written by FlashInfer, or by a version that mxdebug does not know")
