"""Texts without the paths of this machine: a path becomes the name that it ends in."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import printable

# /home/me/models/x, ~/x, C:\models\x: two parts and more, not within a word. nvfp4_w4a16/flashinfer_cutedsl/sm100 and 2/3 are none.
_PATH = re.compile(
    r"(?<![\w./~<-])(?:~|[A-Za-z]:(?=[\\/]))?(?:[\\/][^\s/\\'\"<>|:;,()\[\]]+){2,}[\\/]?|(?<![\w./])~[\\/][^\s'\"<>|:;,()\[\]]+"
)


@dataclass(frozen=True)
class Private:
    """roots: folders and files of this machine as texts, the longest first; they may hold blanks, which no pattern could know."""

    roots: tuple[str, ...]

    @staticmethod
    def of(*paths: Path | None) -> Private:
        """These paths as they were given, and as they are in full; and the home and the current folder."""
        texts = {str(form) for p in (*paths, Path.home(), Path.cwd()) if p is not None for form in (p, p.absolute(), p.resolve())}
        return Private(tuple(sorted((t for t in texts if len(Path(t).parts) > 1), key=len, reverse=True)))

    def __call__(self, text: str) -> str:
        """The text with each path replaced by its last part, and what cannot be printed by its escape."""
        text = printable(text)
        for root in self.roots:
            text = re.sub(rf"{re.escape(root)}(?![\w.-])", lambda m, root=root: Path(root).name, text)
        return _PATH.sub(lambda m: re.split(r"[\\/]", m[0].rstrip("\\/"))[-1], text)


def escaped(text: str) -> str:
    """A text as a page holds it: HTML's characters, and what cannot be printed (such as turns a line around), become escapes."""
    return html.escape(printable(text))
