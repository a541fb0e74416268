"""The index of row hashes: which layer, projection and expert hold the rows of a call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from making_scan import CT_MXFP4, EXPERT, GPT_OSS, INTERMEDIATE, MODELOPT, config, save, tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mxdebug.errors import MxdebugError
from mxdebug.layouts import row_hashes
from mxdebug.scan import Index, load_index, measure, scan


def index_of(folder: Path, kind: str) -> tuple[Index, dict[str, torch.Tensor]]:
    made = tensors(kind)
    scan(save(folder / "c", made, config(kind), shards=2), index=folder / "index")
    return load_index(folder / "index"), made


@pytest.mark.parametrize("chunk", [1 << 24, 4096])
@pytest.mark.parametrize(("kind", "leaf"), [(MODELOPT, "weight"), (CT_MXFP4, "weight_packed")])
def test_shuffled_rows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, leaf: str, chunk: int) -> None:
    monkeypatch.setattr(measure, "CHUNK", chunk)
    index, made = index_of(tmp_path, kind)
    assert index.layers == (0, 1) and len(index.places) == 32
    rows = made[f"{EXPERT.format(1, 2, 'up_proj')}.{leaf}"]
    hashes = row_hashes(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))])
    (held,) = index.find(hashes)
    assert (held.place.module, held.place.layer, held.place.projection, held.place.expert, held.found, held.kept) == (
        "model.layers.1.mlp.experts",
        1,
        "w3",
        2,
        64,
        64,
    )
    assert (
        held.place.rows == INTERMEDIATE
        and held.place.equals(hashes)
        and not held.place.equals(hashes[1:])
        and not held.place.equals(hashes + 1)
    )
    (linear,) = index.find(row_hashes(made[f"model.layers.0.self_attn.k_proj.{leaf}"]))
    assert (linear.place.module, linear.place.layer, linear.place.expert) == ("model.layers.0.self_attn.k_proj", 0, None)
    assert index.find(row_hashes(torch.zeros(4, 128, dtype=torch.uint8))) == []


def test_rows_of_gpt_oss_alternate(tmp_path: Path) -> None:
    index, made = index_of(tmp_path, GPT_OSS)
    rows = made["model.layers.0.mlp.experts.gate_up_proj_blocks"][3].flatten(-2)
    for projection, half in (("w1", rows[0::2]), ("w3", rows[1::2])):
        (held,) = index.find(row_hashes(half))
        assert (held.place.layer, held.place.projection, held.place.expert, held.share) == (0, projection, 3, 1.0) and held.place.equals(
            row_hashes(half)
        )
    assert {h.place.projection for h in index.find(row_hashes(rows))} == {"w1", "w3"}


def test_a_tensor_parallel_part_has_its_share(tmp_path: Path) -> None:
    """64 of 512 rows are kept, evenly: a rank with every second half has 32 of them."""
    index, made = index_of(tmp_path, MODELOPT)
    (held,) = index.find(row_hashes(made[f"{EXPERT.format(0, 1, 'gate_proj')}.weight"][:256]))
    assert (held.found, held.kept, held.place.expert) == (32, 64, 1)


def test_a_stale_index_says_so(tmp_path: Path) -> None:
    index, _ = index_of(tmp_path, MODELOPT)
    assert index.stale(tmp_path / "c") == []
    file = next((tmp_path / "c").glob("*.safetensors"))
    file.write_bytes(file.read_bytes() + b"x")
    assert index.stale(tmp_path / "c") == [f"{file.name} has {file.stat().st_size} bytes, had {file.stat().st_size - 1}"]
    assert len(index.stale(tmp_path)) == 2


def test_the_sizes_of_the_index_are_bounded(tmp_path: Path) -> None:
    """32 places of 64 rows with 8 + 4 + 4 bytes, and 36 bytes a place."""
    index_of(tmp_path, MODELOPT)
    with safe_open(tmp_path / "index", "pt") as f:
        assert sum(f.get_tensor(k).nbytes for k in f.keys()) == 32 * 64 * 16 + 32 * 36


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: t.pop("hashes"),
        lambda t, m: t.update(hashes=t["hashes"].int()),
        lambda t, m: t.update(row=t["row"][1:]),
        lambda t, m: t.update(place=t["place"] + 1),
        lambda t, m: t.update(module=t["module"] - 1),
        lambda t, m: t.update(expert=t["expert"] - 5),
        lambda t, m: t.update(rows=t["rows"] * 0),
        lambda t, m: t.update(sum=t["sum"].reshape(1, -1)),
        lambda t, m: m.clear(),
        lambda t, m: m.update(schema=2),
        lambda t, m: m.update(modules=[1]),
        lambda t, m: m.update(modules=[]),
        lambda t, m: m.update(files={"../x": 1}),
        lambda t, m: m.update(files=[]),
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, change) -> None:
    index_of(tmp_path, MODELOPT)
    made = load_file(tmp_path / "index")
    with safe_open(tmp_path / "index", "pt") as f:
        about = json.loads(f.metadata()["mxdebug"])
    change(made, about)
    save_file(made, tmp_path / "hostile", {"mxdebug": json.dumps(about)})
    with pytest.raises(MxdebugError):
        load_index(tmp_path / "hostile")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100, (1 << 62).to_bytes(8, "little")])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index").write_bytes(content)
    with pytest.raises(MxdebugError):
        load_index(tmp_path / "index")
    with pytest.raises(MxdebugError):
        load_index(tmp_path / "no")


def test_rows_of_zeros_are_no_evidence(tmp_path: Path) -> None:
    """The first half of 512 rows is zero: 32 of the 64 kept ones are left, and zeros in a call hold nothing."""
    made = tensors(MODELOPT)
    rows = made[f"{EXPERT.format(0, 0, 'up_proj')}.weight"]
    rows[:256] = 0
    scan(save(tmp_path / "c", made, config(MODELOPT)), index=tmp_path / "index")
    index = load_index(tmp_path / "index")
    assert index.find(row_hashes(torch.zeros_like(rows))) == []
    (held,) = index.find(row_hashes(rows))
    assert (held.found, held.kept, held.place.projection) == (32, 32, "w3")
