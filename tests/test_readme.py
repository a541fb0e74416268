"""README's claims against the data that they come from."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import mxdebug
from mxdebug.cli import main
from mxdebug.contracts import contract
from mxdebug.views import measured

README = (Path(__file__).parent.parent / "README.md").read_text()
NAMED = sorted(set(re.findall(r"(?<!from )\bmxdebug(?:\.[A-Za-z_]\w*)+", README)))


def test_table_is_the_measured_one() -> None:
    assert measured.readme_table(measured.load()) in README


def test_shares_are_the_measured_ones() -> None:
    cases = measured.load()["cases"]
    differing, elements = sum(c["differing"] for c in cases), sum(c["elements"] for c in cases)
    assert f"{1e4 * differing / elements:.2f} in 10,000 outputs over all {len(cases)} calls" in README
    share = f"{1e4 * differing / elements:.2f} in 10,000"
    assert share in " ".join(README.split("## ")[0].split())
    record = next(v.result for v in contract("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16").verified if v.how == "run on an H200")
    assert f"{len(cases)} calls" in record and share in record
    assert share in (Path(__file__).parent.parent / "mxdebug" / "doctor.py").read_text()
    assert f"relative L2 of any call at most {max(c['kernel_relative_l2'] for c in cases):.1e}".replace("e-0", "e-") in README
    # Bytes in the padding of one operand meet zeros, and GELU by erf instead of tanh is below the rounding of a right call.
    small = ("none", "padding-not-zero", "gelu-tanh-as-erf")
    assert min(c["truth_relative_l2"] for c in cases if c["fault"] not in small) == pytest.approx(0.03, abs=0.005)
    assert max(c["truth_relative_l2"] for c in cases if c["fault"] in ("none", "gelu-tanh-as-erf")) < 0.004


def test_sample_output_is_what_the_demo_prints() -> None:
    shown = re.search(r"```text\n(.*?)```", README, re.S).group(1).strip()
    assert shown in CliRunner().invoke(main, ["demo"]).output


def test_pictures_exist() -> None:
    for picture in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (Path(__file__).parent.parent / picture).is_file(), picture


def test_linear_setups_are_those_that_were_compared() -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parent / "data"))
    from make_vllm_select_linear import setups

    assert f"{2 * sum(1 for _ in setups()):,} setups" in README  # two versions


def test_what_is_named_is_reachable() -> None:
    """After `import mxdebug` alone: what loads a room is `__getattr__`."""
    assert {name.split(".")[1] for name in NAMED} <= set(dir(mxdebug)) and {"probe", "recipes"} <= {name.split(".")[1] for name in NAMED}
    for name in NAMED:
        _, room, *rest = name.split(".")
        functools.reduce(getattr, rest, mxdebug.__getattr__(room))


def test_every_command_and_path_is_there() -> None:
    from mxdebug.contracts import ALL

    for path in ALL:
        assert path.rpartition("/")[2] in README or path.rpartition("_")[2] in README, path
    for command in re.findall(r"`mxdebug ([a-z-]+)", README):
        assert command in main.commands, command


def test_symptoms_of_the_readme_are_known() -> None:
    for text in re.findall(r'`mxdebug symptom "([^"]+)"`', README):
        assert CliRunner().invoke(main, ["symptom", text]).exit_code == 0, text
