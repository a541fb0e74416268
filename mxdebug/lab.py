"""The course's notebooks and its glossary, copied to a folder of the user's, where they may be changed; and JupyterLab on them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import MxdebugError

FIRST = "00_start_here.ipynb"
FILES = ("*.ipynb", "glossary.md")
INSTALLED = Path("share", "mxdebug", "notebooks")  # below the prefix; pyproject.toml's data-files puts them there


@dataclass(frozen=True)
class Copied:
    """What `copy` did in `folder`, by the notebooks' names.

    new    copied now
    same   were there, byte for byte
    kept   were there and differ: changed by the user, or an earlier version's
    aside  (notebook, the name that the user's file has now): `fresh` put a new one in its place
    """

    folder: Path
    new: tuple[str, ...]
    same: tuple[str, ...]
    kept: tuple[str, ...]
    aside: tuple[tuple[str, str], ...]

    @property
    def first(self) -> str:
        """The notebook to open: the first of the course."""
        names = sorted((*self.new, *self.same, *self.kept))
        return FIRST if FIRST in names else names[0]

    def __str__(self) -> str:
        counted = [f"{n} {what}" for n, what in ((len(self.new), "copied"), (len(self.same), "unchanged"), (len(self.kept), "kept")) if n]
        lines = [f"{self.folder}: {', '.join(counted)}"]
        lines += [f"  kept   {name}: not as it is shipped (changed by you, or of an earlier version)" for name in self.kept]
        lines += [f"  moved  {name}: yours is now {backup}" for name, backup in self.aside]
        if self.kept:
            lines.append("  --fresh puts new ones there, and leaves yours beside them")
        return "\n".join(lines)


def source() -> Path:
    """The folder of the notebooks: in the repository, for an editable installation; else where the wheel put them.

    Raises MxdebugError where there are none.
    """
    package = Path(__file__).resolve().parent
    places = [package.parent / "notebooks"] if (package.parent / "pyproject.toml").is_file() else []
    # The prefix is a folder above the package, also with pip's --user and --target, where sys.prefix is another.
    places += [prefix / INSTALLED for prefix in (*package.parents, Path(sys.prefix))]
    for place in places:
        if any(place.glob("*.ipynb")):
            return place
    raise MxdebugError("notebooks", f"{INSTALLED.as_posix()} below {sys.prefix}, where pip puts them", "no such folder",
                       "mxdebug was installed without its data files; pip install it, or clone the repository")


def copy(folder: Path, fresh: bool = False) -> Copied:
    """Copy the notebooks and the glossary, and nothing else, to `folder`, which is made where it does not exist.

    A file that differs is never written to.

    fresh   move a file that differs to NAME.bak-1.ipynb (or the next free number), and copy the new one

    Raises MxdebugError for a folder that cannot be written.
    """
    new, same, kept, aside = [], [], [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for notebook in (path for pattern in FILES for path in sorted(source().glob(pattern))):
            target = folder / notebook.name
            if target.is_file() and target.read_bytes() == notebook.read_bytes():
                same.append(notebook.name)
                continue
            if os.path.lexists(target):
                if not fresh:
                    kept.append(notebook.name)
                    continue
                aside.append((notebook.name, target.rename(_free(target)).name))
            shutil.copyfile(notebook, target)
            new.append(notebook.name)
    except OSError as error:
        raise MxdebugError("folder", f"one that can be written: {folder}", error.strerror or str(error)) from error
    return Copied(folder, tuple(new), tuple(same), tuple(kept), tuple(aside))


def _free(target: Path) -> Path:
    """NAME.bak-N.ipynb that does not exist; the ending stays, so that it still opens as a notebook."""
    n = 1
    while os.path.lexists(target.with_suffix(f".bak-{n}{target.suffix}")):
        n += 1
    return target.with_suffix(f".bak-{n}{target.suffix}")


def arguments(copied: Copied, options: Sequence[str] = ()) -> list[str]:
    """What `jupyter lab` is called with; `options` come last, so that they win.

    The notebook is the default URL, not a file to open: so it is in the address that the server prints, too, which is all that one
    has of it with --no-browser on another machine.
    """
    return [f"--notebook-dir={copied.folder}", f"--LabApp.default_url=/lab/tree/{copied.first}", *options]


def command(copied: Copied, options: Sequence[str] = ()) -> str:
    """The same as a line for a shell."""
    return shlex.join(["jupyter", "lab", *arguments(copied, options)])


def launch(copied: Copied, options: Sequence[str] = ()) -> None:
    """Run JupyterLab of this Python on the folder, until it is stopped. Raises MxdebugError where it is not installed."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise MxdebugError("JupyterLab", f"installed for {sys.executable}", "not found", "pip install 'jupyterlab>=4'")
    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(arguments(copied, options))
