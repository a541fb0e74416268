"""Right keys, wrong values: metadata, config and index files by hypothesis. The same is asked of each case as in test_fuzz.py.

MXDEBUG_FUZZ=N raises the number of examples of all tests together, MXDEBUG_FUZZ_SEED chooses others.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz import guard, seeds, strategies
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

TESTS = 12  # in this file
EXAMPLES = max(1, int(os.environ.get("MXDEBUG_FUZZ", "360")) // TESTS)
SEED = int(os.environ.get("MXDEBUG_FUZZ_SEED", "0"))
Places = tuple[Path, Path, Path]


def fuzz(test: Callable[..., None]) -> Callable[..., None]:
    """`given(data=...)`, without a database, and with the same examples for the same seed."""
    calm = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    return seed(SEED)(calm(given(data=st.data())(test)))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """(seeds to change, whole ones to read beside, whole ones that nobody may open); link.safetensors leads to the last."""
    root = tmp_path_factory.mktemp("fuzz")
    made = seeds.make(root / "changed")
    for other in ("given", "outside"):
        shutil.copytree(made, root / other)
    for name in seeds.NAMES:  # imports and caches are no part of a case
        seeds.ENTRIES[name](made / name, root / "given")
    model = made / "mxfp4" / "model"
    (model / "link.safetensors").symlink_to(root / "outside" / "gpt-oss" / "model" / "model.safetensors")
    (model / "folder.safetensors").mkdir()
    os.mkfifo(model / "fifo.safetensors")
    (model / "MODEL.SAFETENSORS").write_bytes((model / "model-00001-of-00002.safetensors").read_bytes())
    guard.install()
    return made, root / "given", root / "outside"


def attack(name: str, places: Places, file: str, change: Callable[[Any], Any], cli: bool = False) -> None:
    """Read a seed with one of its JSON files changed, and put the file back."""
    made, whole, _ = places
    path = next((made / name).rglob(file))
    before = path.read_bytes()
    path.write_text(json.dumps(change(json.loads(before if file != "metadata.jsonl" else before.splitlines()[-1]))) + "\n")
    try:
        entry = (seeds.CLI if cli else seeds.ENTRIES)[name]
        out = guard.attack(lambda folder: entry(folder, whole), made / name, whole)
    finally:
        path.write_bytes(before)
    assert not out.problem, f"{out.crash}\n{out.problem}"


@pytest.mark.parametrize("cli", [False, True])
@pytest.mark.parametrize("name", ["dump-pt", "dump-safetensors", "dump-linear"])
@fuzz
def test_metadata(name: str, cli: bool, places: Places, data: st.DataObject) -> None:
    attack(name, places, "metadata.jsonl", lambda whole: data.draw(strategies.edited(whole)), cli)


@pytest.mark.parametrize("name", ["gpt-oss", "mxfp4", "modelopt-moe", "nvfp4-linear"])
@fuzz
def test_config(name: str, places: Places, data: st.DataObject) -> None:
    attack(name, places, "config.json", lambda whole: data.draw(strategies.edited(whole)))


@fuzz
def test_index_is_edited(places: Places, data: st.DataObject) -> None:
    attack("mxfp4", places, "*.index.json", lambda whole: data.draw(strategies.edited(whole, most=5)))


@fuzz
def test_index_with_path_tricks(places: Places, data: st.DataObject) -> None:
    attack("mxfp4", places, "*.index.json", lambda whole: {**whole, "weight_map": data.draw(strategies.weight_maps(whole["weight_map"]))})
