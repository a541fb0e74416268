"""Texts without the paths of this machine: a path becomes the name that it ends in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import printable

# /home/me/models/x, ~/x, C:\models\x: two parts and more, not within a word. nvfp4_w4a16/flashinfer_cutedsl/sm100 and 2/3 are none.
_PATH = re.compile(
    r"(?<![\w./~<-])(?:~|[A-Za-z]:(?=[\\/]))?(?:[\\/][^\s/\\'\"<>|:;,()\[\]]+){2,}[\\/]?|(?<![\w./])~[\\/][^\s'\"<>|:;,()\[\]]+"
)


@dataclass(frozen=True)
class Private:
    """roots: (folder or file of this machine as text, what stands for it), the longest first; they may hold blanks, which no pattern could know.

    Home and the current folder become "~", so that what follows is still a path and is hidden with it.
    """

    roots: tuple[tuple[str, str], ...]

    @staticmethod
    def of(*paths: Path | None) -> Private:
        """These paths as they were given, and as they are in full; and the home and the current folder."""
        named = [(p, p.resolve().name) for p in paths if p is not None]
        roots = {str(form): name for p, name in [(Path.home(), "~"), (Path.cwd(), "~"), *named] for form in (p, p.absolute(), p.resolve())}
        return Private(tuple(sorted(((t, n) for t, n in roots.items() if len(Path(t).parts) > 1), key=lambda root: -len(root[0]))))

    def __call__(self, text: str) -> str:
        """The text with each path replaced by its last part, and what cannot be printed by its escape."""
        text = printable(text)
        for root, name in self.roots:
            text = re.sub(rf"{re.escape(root)}(?![\w-]|\.\w)", lambda m, name=name: name, text)
        return _PATH.sub(lambda m: re.split(r"[\\/]", m[0].rstrip("\\/"))[-1], text)
