"""The glossary: is the page the one that is made from the words, are the words there that a newcomer meets, and are their numbers true?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import pytest
from click.testing import CliRunner

from mxdebug import MxdebugError
from mxdebug.cli import main
from mxdebug.diagnosis.finding import STRENGTHS
from mxdebug.formats import E4M3_SCALE, E8M0, FORMATS, S0E5M3
from mxdebug.glossary import ENTRIES, GROUPS, anchor, explain, find, page, words
from mxdebug.layouts import SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_8x4, SWIZZLE_128x4

ROOT = Path(__file__).parent.parent
# What notebooks 01 to 04 introduce, in the order in which a reader meets it.
INTRODUCED = """kernel, path, stage, call, relative L2, cosine, norm ratio, block, block scale, payload, mixture of experts, gate,
up, down, w13, contract, operand, emulate, linear, SM90 scale fold, logical, physical, SM90 weight interleave, recipe, finding,
activation, alpha, beta, limit, pre-activation, SwiGLU, W4A16, SM100, SM12x, fault, NVFP4, global scale, 128x4, view, SQNR, GEMV,
fake, tile, swizzled, proved, consistent, suspected"""


def test_page_is_made_from_the_words() -> None:
    assert (ROOT / "notebooks" / "glossary.md").read_text() == page(), "run: python -m mxdebug.glossary > notebooks/glossary.md"


def test_every_heading_has_an_anchor_of_its_own_and_is_in_the_index() -> None:
    headings = re.findall(r"^### (.+)$", page(), re.M)
    assert headings == [e.word for e in ENTRIES] and len({anchor(h) for h in headings} | {anchor(g) for g in GROUPS}) == len(ENTRIES) + 5
    index = re.findall(r"^\[(.+)\]\(#(.+)\)", page(), re.M)
    assert sorted(index) == sorted((h, anchor(h)) for h in headings)
    assert anchor("gate, up, down") == "gate-up-down" and anchor("SM90 scale fold") == "sm90-scale-fold"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.word)
def test_each_is_short_and_whole(entry: object) -> None:
    sentences = re.findall(r"[^.]\.(?= [A-Z\"]|$)", entry.says)
    assert 1 <= len(sentences) <= 3 and len(entry.says.split()) <= 60 and entry.says.endswith(".")
    assert entry.source is None or entry.source[1].startswith("https://")
    assert max(map(len, (line for line in str(entry).splitlines() if "https" not in line))) <= 105


def test_no_name_leads_to_two_entries() -> None:
    names = [n.lower() for e in ENTRIES for n in (e.word, *e.also)]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


def test_words_that_the_course_introduces_are_explained() -> None:
    """Notebook 00 and README's list set a word in italics where they introduce it."""
    cells = json.loads((ROOT / "notebooks" / "00_start_here.ipynb").read_text())["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    words_of_readme = re.search(r"^The words: .*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)
    assert words_of_readme is not None
    met = {w for t in (*texts, words_of_readme.group()) for w in re.findall(r"(?<![*\w])\*([^*\n]+)\*(?![*\w])", t)}
    assert {"payload", "block scale", "swizzle", "contract"} <= met
    missing = [w for w in sorted((met - {"italics", "high"}) | set(re.split(r",\s+", INTRODUCED))) if not named(w)]
    assert not missing, "add them to mxdebug/glossary.py"


def named(word: str) -> bool:
    """Whether it is an entry's word or another name of one, not just mentioned in a text."""
    word = word.lower().removesuffix("s").replace(" / ", " and ")
    try:
        entry = find(word)
    except MxdebugError:
        return False
    return len(entry) == 1 and word in ", ".join((entry[0].word, *entry[0].also)).lower()


def test_words_of_the_code_are_explained() -> None:
    layouts = [layout.name for layout in (SWIZZLE_128x4, SWIZZLE_8x4, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE)]
    codecs = [c.name for f in FORMATS.values() for c in (f.element, f.scale)] + [S0E5M3.name]
    assert not [w for w in (*FORMATS, *layouts, *codecs, *STRENGTHS, "engine", "up", "row order") if not named(w.removesuffix("_E5M2"))]


def test_numbers_in_it_are_true() -> None:
    """What the texts say, by ml_dtypes, which is not ours, and by the code."""
    def says(word: str) -> str:
        return find(word)[0].says

    e2m1 = sorted({abs(float(ml_dtypes.float4_e2m1fn(v))) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)})
    assert ", ".join(f"{v:g}" for v in e2m1) in says("E2M1")
    assert f"at most {float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max):g}" in says("E4M3")
    assert f"up to {float(ml_dtypes.finfo(ml_dtypes.float8_e5m2).max):.0f}" in says("E4M3")
    assert float(E8M0.table()[128]) == 2 and "byte b means 2^(b - 127)" in says("E8M0")
    for f in FORMATS.values():
        assert (f"{f.block} of them" in f.name or f"for each {f.block} of them" in says(f.name.removesuffix("_E5M2")))
        assert f.scale.name in says(f.name.removesuffix("_E5M2"))
    assert f"{FORMATS['MXFP4'].bits_per_element:g} bits a number" in says("MXFP4") and FORMATS["NVFP4"].scale is E4M3_SCALE
    assert SWIZZLE_128x4.tile == (128, 4) and SWIZZLE_128x4.pattern in says("layout")
    assert SM90_SCALE_FOLD.tile == (64, 4) and "tiles of 64 rows by 4 columns" in says("SM90 scale fold")
    assert all(text.split(" for it")[0].split(";")[0].split(",")[0].split(" speak")[0] in says(s) for s, text in STRENGTHS.items())


# -- looking a word up ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "found"), [
    ("swizzle", "swizzle"), ("Swizzles", "swizzle"), ("SF", "block scale"), ("scale factor", "block scale"), ("w3", "gate, up, down"),
    ("up", "gate, up, down"), ("physical", "logical and physical"), ("N", "K and N"), ("nibble", "payload"), ("SM90", "SM90, SM100"),
    (" dump ", "call"), ("activation", "activation"), ("activations", "activations"), ("sfa", "block scale"), ("vLLM", "engine"),
])
def test_a_word_is_found_by_any_of_its_names(word: str, found: str) -> None:
    assert find(word)[0].word == found


def test_a_part_of_a_word_finds_all_that_have_it() -> None:
    assert {e.word for e in find("scale")} >= {"block scale", "global scale", "SM90 scale fold"}
    assert explain("scale").count("\n\n") == len(find("scale")) - 1


@pytest.mark.parametrize(("word", "expected"), [("swizle", "one like swizzle"), ("qqqq", "one of `mxdebug glossary`"), ("", "one of")])
def test_an_unknown_word_is_refused(word: str, expected: str) -> None:
    with pytest.raises(MxdebugError, match=re.escape(expected)):
        find(word)


def test_on_the_command_line() -> None:
    run = CliRunner().invoke
    assert run(main, ["glossary"]).output == words() + "\n" and all(e.word in " ".join(words().split()) for e in ENTRIES)
    one = run(main, ["glossary", "tile"])
    assert one.exit_code == 0 and one.output.startswith("tile (also: padding)\n  The part of a matrix")
    none = run(main, ["glossary", "swizle"])
    assert none.exit_code == 2 and "one like swizzle" in none.output


@pytest.mark.parametrize("word", [None, 3, ["tile"]])
def test_words_are_texts(word: object) -> None:
    with pytest.raises(MxdebugError, match="a text"):
        explain(word)
