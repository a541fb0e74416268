"""README's claims against the data that they come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mxdebug.cli import main
from mxdebug.views import measured

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_table_is_the_measured_one() -> None:
    assert measured.readme_table(measured.load()) in README


def test_shares_are_the_measured_ones() -> None:
    cases = measured.load()["cases"]
    differing, elements = sum(c["differing"] for c in cases), sum(c["elements"] for c in cases)
    assert f"{1e4 * differing / elements:.2f} in 10,000 outputs over all {len(cases)} calls" in README
    assert f"relative L2 of any call at most {max(c['kernel_relative_l2'] for c in cases):.1e}".replace("e-0", "e-") in README
    assert min(c["truth_relative_l2"] for c in cases if c["fault"] != "none") == pytest.approx(0.03, abs=0.005)


def test_sample_output_is_what_the_demo_prints() -> None:
    shown = re.search(r"```text\n(.*?)```", README, re.S).group(1).strip()
    assert shown in CliRunner().invoke(main, ["demo"]).output


def test_pictures_exist() -> None:
    for picture in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (Path(__file__).parent.parent / picture).is_file(), picture
