"""Checkpoints: the four real ones, the same bytes under other names and in shards, and everything that must be refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxdebug import recorded
from mxdebug import files
from mxdebug.checkpoints import COMPRESSED_TENSORS, GPT_OSS, Checkpoint, CheckpointLayer, open_checkpoint
from mxdebug.errors import MxdebugError
from mxdebug.formats import BlockTensor
from mxdebug.layouts import GATE_UP, INTERLEAVED
from mxdebug.reference import Parallel, moe

ROOT = recorded.ROOT / "checkpoints"
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
E = "model.layers.0.mlp.experts."
M = "model.layers.0.block_sparse_moe.experts."


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: on a busy machine threads that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def raw(name: str) -> Tensors:
    """The tensors of a real checkpoint, read without mxdebug; not to be changed."""
    return load_file(ROOT / name / "model.safetensors")


def config_of(name: str) -> Config:
    return json.loads((ROOT / name / "config.json").read_text())


def write(folder: Path, tensors: Tensors, config: Config | None, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shards(folder: Path, shards: dict[str, Tensors], config: Config) -> Path:
    for file, tensors in shards.items():
        write(folder, tensors, config, file)
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def small(name: str, experts: int = 2) -> tuple[Tensors, Config]:
    """The first experts of a real checkpoint, cut to H 64 and I 32, so that a changed copy is written in no time."""
    config = config_of(name) | {"num_local_experts": experts}
    out: Tensors = {}
    for key, t in raw(name).items():
        if name.startswith("gptoss"):
            t = t[:experts]
            rows, blocks = (64, 2) if "gate_up" in key else (64, 1)
            out[key] = t[:, :rows] if key.endswith("bias") else t[:, :rows, :blocks]
        elif int(key.split(".")[5]) < experts:
            rows, columns = (64, 32) if ".w2." in key else (32, 64)
            out[key] = t[:rows, : columns // (2 if "packed" in key else 32)]
    return {k: v.clone() for k, v in out.items()}, config


def same(a: CheckpointLayer, b: CheckpointLayer) -> bool:
    """Whether two layers hold the same bytes and parameters."""
    def parts(x: CheckpointLayer) -> list[torch.Tensor | None]:
        m = x.layer
        blocks = [t for w in (m.gate, m.up, m.down) for t in ((None, None) if w is None else (w.payload, w.scales))]
        return [*blocks, m.gate_bias, m.up_bias, m.down_bias, m.activation.alpha, m.activation.beta, m.activation.limit]
    return a.layer.activation.kind == b.layer.activation.kind and all(
        (p is None) == (q is None) and (p is None or (p.dtype == q.dtype and torch.equal(p, q)))
        for p, q in zip(parts(a), parts(b), strict=True))


# -- the real ones ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, kind, e, i, rows", [
    ("gptoss-tiny", GPT_OSS, 4, 256, INTERLEAVED), ("gptoss-192", GPT_OSS, 4, 192, INTERLEAVED),
    ("gptoss-8-experts", GPT_OSS, 8, 256, INTERLEAVED), ("minimax-tiny", COMPRESSED_TENSORS, 4, 256, GATE_UP)])
def test_real_checkpoint(name: str, kind: str, e: int, i: int, rows: object) -> None:
    checkpoint = open_checkpoint(ROOT / name)
    assert (checkpoint.kind, checkpoint.layers, checkpoint.experts, checkpoint.config) == (kind, (0,), e, config_of(name))
    found = checkpoint.layer()
    m = found.layer
    assert (found.index, found.kind, found.rows) == (0, kind, rows)
    assert (m.gate.shape, m.up.shape, m.down.shape) == ((e, i, 384), (e, i, 384), (e, 384, i))
    assert all(t.payload.is_contiguous() and t.scales.is_contiguous() for t in (m.gate, m.up, m.down))
    a = m.activation
    assert (a.kind, a.clamp) == ("swiglu", "gate above, up both")
    for value, want in ((a.alpha, 1.702), (a.beta, 1.0), (a.limit, 7.0)):
        assert value.dtype == torch.float32 and torch.equal(value, torch.full((e,), want))
    biases = (m.gate_bias, m.up_bias, m.down_bias)
    if kind == GPT_OSS:
        assert [(tuple(b.shape), b.dtype) for b in biases] == [((e, n), torch.bfloat16) for n in (i, i, 384)]
    else:
        assert biases == (None, None, None)


def test_provenance_and_names() -> None:
    gptoss, minimax = (open_checkpoint(ROOT / name).layer() for name in ("gptoss-tiny", "minimax-tiny"))
    by_type = "model_type gpt_oss (vLLM: 1.702, 1.0, 7.0)"
    assert gptoss.provenance == {"activation": by_type, "alpha": by_type, "beta": by_type, "limit": "config.json swiglu_limit"}
    assert gptoss.stated == {"limit"}
    assert minimax.provenance == {"activation": "config.json hidden_act swigluoai", "alpha": "config.json swiglu_alpha",
                                  "beta": "config.json swiglu_beta", "limit": "config.json swiglu_limit"}
    assert minimax.stated == {"alpha", "beta", "limit"}
    assert gptoss.names == {
        "w13": E + "gate_up_proj_blocks", "w13_scale": E + "gate_up_proj_scales", "w13_bias": E + "gate_up_proj_bias",
        "w2": E + "down_proj_blocks", "w2_scale": E + "down_proj_scales", "w2_bias": E + "down_proj_bias"}
    assert minimax.names == {"w13": M + "*.{w1,w3}.weight_packed", "w13_scale": M + "*.{w1,w3}.weight_scale",
                             "w2": M + "*.w2.weight_packed", "w2_scale": M + "*.w2.weight_scale"}


@pytest.mark.parametrize("name", ["gptoss-tiny", "gptoss-192", "gptoss-8-experts"])
def test_gptoss_rows_are_deinterleaved(name: str) -> None:
    t, m = raw(name), open_checkpoint(ROOT / name).layer().layer
    e, double_i = t[E + "gate_up_proj_bias"].shape
    for weight, bias, first in ((m.gate, m.gate_bias, 0), (m.up, m.up_bias, 1)):
        for r in range(double_i // 2):
            assert torch.equal(weight.payload[:, r], t[E + "gate_up_proj_blocks"][:, 2 * r + first].reshape(e, -1)), r
            assert torch.equal(weight.scales[:, r], t[E + "gate_up_proj_scales"][:, 2 * r + first]), r
        assert torch.equal(bias, t[E + "gate_up_proj_bias"][:, first::2])
    assert torch.equal(m.down.payload, t[E + "down_proj_blocks"].reshape(e, 384, -1))
    assert torch.equal(m.down.scales, t[E + "down_proj_scales"]) and torch.equal(m.down_bias, t[E + "down_proj_bias"])


def test_one_tensor_an_expert_is_stacked_in_order() -> None:
    t, m = raw("minimax-tiny"), open_checkpoint(ROOT / "minimax-tiny").layer().layer
    for word, weight in (("w1", m.gate), ("w3", m.up), ("w2", m.down)):
        for e in range(4):
            assert torch.equal(weight.payload[e], t[f"{M}{e}.{word}.weight_packed"])
            assert torch.equal(weight.scales[e], t[f"{M}{e}.{word}.weight_scale"])


def test_two_real_checkpoints_share_experts() -> None:
    """Expert-parallel rank 1 of gptoss-8-experts was made to hold gptoss-tiny's experts."""
    tiny, eight = open_checkpoint(ROOT / "gptoss-tiny").layer(), open_checkpoint(ROOT / "gptoss-8-experts")
    assert same(eight.layer(experts=slice(4, 8)), tiny)
    assert not same(eight.layer(experts=slice(0, 4)), tiny)


@pytest.mark.parametrize("name", ["gptoss-tiny", "minimax-tiny"])
def test_values_against_ml_dtypes(name: str) -> None:
    np, ml = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")

    def values(payload: torch.Tensor, scales: torch.Tensor) -> Any:
        p = payload.numpy()
        codes = np.stack([p & 15, p >> 4], axis=-1).reshape(*p.shape[:-1], -1)
        elements = codes.view(ml.float4_e2m1fn).astype(np.float32)
        return elements * np.repeat(scales.numpy().view(ml.float8_e8m0fnu).astype(np.float32), 32, axis=-1)

    t, m = raw(name), open_checkpoint(ROOT / name).layer().layer
    if name == "gptoss-tiny":
        w13 = values(t[E + "gate_up_proj_blocks"].flatten(-2), t[E + "gate_up_proj_scales"])
        want = {"gate": w13[:, 0::2], "up": w13[:, 1::2], "down": values(t[E + "down_proj_blocks"].flatten(-2), t[E + "down_proj_scales"])}
    else:
        want = {k: np.stack([values(t[f"{M}{e}.{w}.weight_packed"], t[f"{M}{e}.{w}.weight_scale"]) for e in range(4)])
                for k, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
    for k, v in want.items():
        assert np.array_equal(getattr(m, k).dequantise().numpy(), v), k


@pytest.mark.parametrize("call, experts, parallel", [
    ("c01", slice(None), Parallel()), ("c02", slice(None), Parallel()), ("c12", slice(4, 8), Parallel(ep_size=2, ep_rank=1))])
def test_layer_computes_what_the_gpu_computed(call: str, experts: slice, parallel: Parallel) -> None:
    """Correct calls recorded on an H200: 0.004 is the kernel's bf16 rounding, any wrong order or parameter gives above 0.6."""
    r = recorded.call(call)
    (dump,) = (p for p in r.path.iterdir() if p.is_dir())
    i, out = (torch.load(dump / f"{n}.pt", weights_only=True) for n in ("inputs", "outputs"))
    layer = open_checkpoint(r.checkpoint_path).layer(experts=experts).layer
    y = moe(i["kwarg_input"], i["kwarg_token_selected_experts"], i["kwarg_token_final_scales"], layer, parallel=parallel)
    assert (y - out["result__0"].float()).norm() / y.norm() < 0.006


# -- other names, shards, parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["gptoss-tiny", "minimax-tiny"])
def test_prefixes(tmp_path: Path, name: str, prefix: str) -> None:
    t, config = small(name)
    plain = open_checkpoint(write(tmp_path / "a", t, config)).layer()
    renamed = open_checkpoint(write(tmp_path / "b", {prefix + k.removeprefix("model."): v for k, v in t.items()}, config)).layer()
    assert same(plain, renamed) and renamed.names["w13"].startswith(f"{prefix}layers.0.")


@pytest.mark.parametrize("module", ["mlp", "feed_forward", "block_sparse_moe", "mixer.inner"])
def test_long_spelling_and_modules(tmp_path: Path, module: str) -> None:
    t, config = small("minimax-tiny")
    long = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    renamed = {k.replace("block_sparse_moe", module): v for k, v in t.items()}
    renamed = {next(k.replace(a, b) for a, b in long.items() if a in k): v for k, v in renamed.items()}
    got = open_checkpoint(write(tmp_path / "b", renamed, config)).layer()
    assert same(got, open_checkpoint(write(tmp_path / "a", t, config)).layer())
    assert got.names["w13_scale"] == f"model.layers.0.{module}.experts.*.{{gate_proj,up_proj}}.weight_scale"


def test_what_is_not_a_moe_layer_is_left_out(tmp_path: Path) -> None:
    t, config = small("minimax-tiny")
    bf16 = torch.zeros(2, 2, dtype=torch.bfloat16)
    more = {k.replace("layers.0", "layers.12"): v ^ 1 for k, v in t.items()} | {k.replace("layers.0", "layers.2"): v for k, v in t.items()}
    others = {"model.embed_tokens.weight": bf16, "mtp.layers.0.mlp.experts.0.w1.weight_packed": bf16,
              "model.layers.1.mlp.gate_proj.weight": bf16,
              "model.layers.3.mlp.experts.0.w1.weight": bf16, "model.layers.3.mlp.experts.0.w1.bias": bf16,
              "model.layers.0.block_sparse_moe.shared_experts.w1.weight_packed": bf16, M + "0.w1.weight_shape": bf16}
    checkpoint = open_checkpoint(write(tmp_path / "a", t | more | others, config))
    assert checkpoint.layers == (0, 2, 12) and checkpoint.experts == 2
    assert same(checkpoint.layer(2), checkpoint.layer(0)) and not same(checkpoint.layer(12), checkpoint.layer(0))
    assert torch.equal(checkpoint.layer(12).layer.up.payload, checkpoint.layer(0).layer.up.payload ^ 1) and checkpoint.layer(12).index == 12


def test_e8m0_dtype_is_read_as_bytes(tmp_path: Path) -> None:
    for name in ("gptoss-tiny", "minimax-tiny"):
        t, config = small(name)
        typed = {k: v.view(torch.float8_e8m0fnu) if "scale" in k else v for k, v in t.items()}
        a, b = (open_checkpoint(write(tmp_path / f"{name}{i}", x, config)).layer() for i, x in enumerate((t, typed)))
        assert same(a, b) and b.layer.up.scales.dtype == torch.uint8 and int(b.layer.up.scales.max()) > 2


def test_biases_of_single_experts(tmp_path: Path) -> None:
    t, config = small("minimax-tiny")
    sizes = (("w1", 32), ("w3", 32), ("w2", 64))
    t |= {f"{M}{e}.{w}.bias": torch.full((n,), 10.0 * e + i) for e in range(2) for i, (w, n) in enumerate(sizes)}
    found = open_checkpoint(write(tmp_path / "a", t, config)).layer(experts=slice(1, 2))
    m = found.layer
    assert [(b.shape[1], float(b[0, -1]), b.dtype) for b in (m.gate_bias, m.up_bias, m.down_bias)] == [
        (32, 10.0, torch.float32), (32, 11.0, torch.float32), (64, 12.0, torch.float32)]
    assert found.names["w13_bias"] == M + "*.{w1,w3}.bias"


@pytest.mark.parametrize("name", ["gptoss-tiny", "minimax-tiny"])
def test_shards_equal_the_single_file(tmp_path: Path, name: str) -> None:
    t = raw(name)
    keys = sorted(t)
    shards = {f"model-{n:05d}-of-00003.safetensors": {k: t[k] for k in keys[n - 1::3]} for n in (1, 2, 3)}
    want = open_checkpoint(ROOT / name).layer()
    assert same(open_checkpoint(write_shards(tmp_path / "index", shards, config_of(name))).layer(), want)
    (tmp_path / "index" / "model.safetensors.index.json").unlink()  # now only *.safetensors
    assert same(open_checkpoint(tmp_path / "index").layer(), want)


def test_one_file_and_string_paths() -> None:
    folder = ROOT / "minimax-tiny"
    assert same(open_checkpoint(folder / "model.safetensors").layer(), open_checkpoint(str(folder)).layer())


@pytest.mark.parametrize("name", ["gptoss-8-experts", "minimax-tiny"])
def test_expert_slices(name: str) -> None:
    checkpoint = open_checkpoint(ROOT / name)
    whole, part = checkpoint.layer(), checkpoint.layer(0, slice(1, 3))
    for field in ("gate", "up", "down"):
        a: BlockTensor = getattr(whole.layer, field)[1:3]
        b: BlockTensor = getattr(part.layer, field)
        assert torch.equal(a.payload, b.payload) and torch.equal(a.scales, b.scales)
    assert part.layer.experts == 2 and part.layer.activation.alpha.shape == (2,)
    assert same(checkpoint.layer(experts=slice(None)), whole) and same(checkpoint.layer(experts=slice(-0, None)), whole)
    for bad in (slice(2, 2), slice(3, 99), slice(-1, None), slice(0, 4, 2), slice("a", None), 1):
        with pytest.raises(MxdebugError, match="a slice within 0..[48], not empty, step 1"):
            checkpoint.layer(experts=bad)


# -- only what was asked for is read ------------------------------------------------------------------------------


class Spy:
    """Stands in for a safe_open handle and notes which tensors, and which part of their first axis, are read."""

    def __init__(self, handle: Any, log: list[tuple[str, Any]]) -> None:
        self.handle, self.log = handle, log

    def __enter__(self) -> Spy:
        self.handle.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.handle.__exit__(*exc)

    def keys(self) -> list[str]:
        return self.handle.keys()

    def get_slice(self, name: str) -> Any:
        inner, log = self.handle.get_slice(name), self.log

        class Slice:
            get_dtype, get_shape = inner.get_dtype, inner.get_shape

            def __getitem__(self, part: slice) -> torch.Tensor:
                log.append((name, part))
                return inner[part]
        return Slice()


def test_only_the_layer_and_experts_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, Any]] = []
    original = files.safe_open
    monkeypatch.setattr(files, "safe_open", lambda *a, **k: Spy(original(*a, **k), log))
    for name, module in (("gptoss-tiny", E), ("minimax-tiny", M)):
        t, config = small(name)
        other = {k.replace("layers.0", "layers.1"): v for k, v in t.items()} | {"lm_head.weight": torch.zeros(1000, 1000)}
        log.clear()
        checkpoint = open_checkpoint(write(tmp_path / name, t | other, config))
        assert (checkpoint.layers, checkpoint.experts, log) == ((0, 1), 2, [])
        checkpoint.layer(0, slice(1, 2))
        assert {k for k, _ in log} == {k for k in t if name == "gptoss-tiny" or ".experts.1." in k}
        if name == "gptoss-tiny":
            assert all(part == slice(1, 2) for _, part in log)
        assert all(k.startswith(module) for k, _ in log)


def test_shards_of_other_layers_are_not_opened(tmp_path: Path) -> None:
    t, config = small("gptoss-tiny")
    other = {k.replace("layers.0", "layers.1"): v for k, v in t.items()}
    folder = write_shards(tmp_path / "a", {"one.safetensors": t, "two.safetensors": other}, config)
    (folder / "two.safetensors").unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layer(0).layer.experts == 2
    with pytest.raises(MxdebugError, match=r"two\.safetensors: expected a file, since model.safetensors.index.json lists it, got no"):
        checkpoint.layer(1)


def test_a_read_layer_does_not_hang_on_the_file(tmp_path: Path) -> None:
    t, config = small("gptoss-tiny")
    path = write(tmp_path / "a", t, config) / "model.safetensors"
    found = open_checkpoint(path).layer()
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as f:  # in place: a view of the mapped file would change
        f.seek(header)
        f.write(b"\x11" * (path.stat().st_size - header))
    write(tmp_path / "b", t, config)
    assert same(found, open_checkpoint(tmp_path / "b").layer())


# -- activation ---------------------------------------------------------------------------------------------------


def activation(tmp_path: Path, *, drop: tuple[str, ...] = (), text: Config | None = None, gate: bool = True,
               **change: Any) -> CheckpointLayer:
    t, config = small("minimax-tiny")
    config = {k: v for k, v in config.items() if not k.startswith("swiglu_") and k not in drop} | change
    if text is not None:
        config["text_config"] = text
    return open_checkpoint(write(tmp_path / "a", {k: v for k, v in t.items() if gate or ".w1." not in k}, config)).layer()


def numbers(found: CheckpointLayer) -> tuple[Any, ...]:
    a = found.layer.activation
    return a.kind, *(None if p is None else round(float(p[0]), 6) for p in (a.alpha, a.beta, a.limit))


@pytest.mark.parametrize("change, want", [
    ({"hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_beta": 0, "swiglu_limit": 3}, ("swiglu", 1.5, 0.0, 3.0)),
    ({"hidden_act": "swigluoai_uninterleave", "swiglu_alpha": 1.5}, ("swiglu", 1.5, None, None)),
    ({"hidden_act": "swigluoai"}, ("swiglu", None, None, None)),
    ({"hidden_act": "silu", "swiglu_limit": 10.0}, ("swiglu", None, None, 10.0)),
    ({"hidden_act": "silu", "swiglu_limit": None}, ("silu", None, None, None)),
    ({"hidden_act": "gelu"}, ("gelu", None, None, None)),
    ({"hidden_act": "gelu_pytorch_tanh"}, ("gelu_tanh", None, None, None)),
    ({"hidden_act": "gelu_tanh"}, ("gelu_tanh", None, None, None)),
    ({"model_type": "gpt_oss", "hidden_act": "silu"}, None)])
def test_activation_by_hidden_act(tmp_path: Path, change: Config, want: tuple[Any, ...] | None) -> None:
    if want is None:  # gpt-oss has biases, whatever its names; without them nothing is assumed
        with pytest.raises(MxdebugError, match=r"0\.w1\.bias: expected a tensor for each expert 0\.\.1, got none"):
            activation(tmp_path, **change)
        return
    found = activation(tmp_path, **change)
    assert numbers(found) == want
    given = {p for p, v in zip(("alpha", "beta", "limit"), want[1:]) if v is not None}
    assert found.stated == given
    assert {p for p in ("alpha", "beta", "limit") if found.provenance[p] == "not stated"} == {"alpha", "beta", "limit"} - given
    assert found.provenance["activation"].startswith(f"config.json hidden_act {change['hidden_act']}")


def test_text_config(tmp_path: Path) -> None:
    found = activation(tmp_path, drop=("hidden_act",), model_type="minimax_m3_vl", swiglu_beta=0.5,
                       text={"model_type": "minimax_m3", "hidden_act": "swigluoai", "swiglu_alpha": 2.0, "swiglu_beta": 0.5,
                             "swiglu_limit": None})
    assert numbers(found) == ("swiglu", 2.0, 0.5, None) and found.stated == {"alpha", "beta"}
    assert found.provenance == {"activation": "config.json text_config.hidden_act swigluoai",
                                "alpha": "config.json text_config.swiglu_alpha",
                                "beta": "config.json swiglu_beta", "limit": "not stated"}
    with pytest.raises(MxdebugError, match=r"expected one value, got 0\.25 at the top, 0\.5 in text_config"):
        activation(tmp_path, swiglu_beta=0.25, text={"swiglu_beta": 0.5})


@pytest.mark.parametrize("key", ["hidden_act", "mlp_hidden_act"])
def test_a_layer_without_gate(tmp_path: Path, key: str) -> None:
    found = activation(tmp_path, drop=("hidden_act",), gate=False, **{key: "relu2"})
    assert found.layer.gate is None and found.layer.activation.kind == "relu2" and found.layer.up.shape == (2, 32, 64)
    assert found.names["w13"] == M + "*.w3.weight_packed" and found.provenance["activation"] == f"config.json {key} relu2"
    with pytest.raises(MxdebugError, match=r"\*\.w1\.weight_packed: expected no gate tensors"):
        activation(tmp_path, hidden_act="relu2")
    with pytest.raises(MxdebugError, match=r"0\.w1 \(or gate_proj\)\.weight_packed: expected a tensor for each expert"):
        activation(tmp_path, gate=False, hidden_act="swigluoai")


def test_gptoss_limit_by_model_type(tmp_path: Path) -> None:
    t, config = small("gptoss-tiny")
    language = {"model_type": "vision_and_gpt_oss", "text_config": {"model_type": "gpt_oss"}}  # text_config's type counts
    for change, want, where, stated in ((language, 7.0, "config.json swiglu_limit", {"limit"}),
                                        ({"swiglu_limit": None}, 7.0, "model_type gpt_oss (vLLM: 1.702, 1.0, 7.0)", set()),
                                        ({"swiglu_limit": 5.0}, 5.0, "config.json swiglu_limit", {"limit"}),
                                        ({"swiglu_alpha": 1.702}, 7.0, "config.json swiglu_limit", {"alpha", "limit"})):
        found = open_checkpoint(write(tmp_path / "a", t, config | change)).layer()
        assert numbers(found) == ("swiglu", 1.702, 1.0, want)
        assert (found.provenance["limit"], found.stated) == (where, stated)


@pytest.mark.parametrize("change, match", [
    ({"hidden_act": "situ"}, "expected one of swigluoai, .*relu2, got 'situ'"),
    ({"hidden_act": None}, "expected one of swigluoai, .*relu2, got none"),
    ({"hidden_act": ["silu"]}, r"hidden_act of .*: expected str, got list \['silu'\]"),
    ({"hidden_act": "silu", "mlp_hidden_act": "relu2"}, "hidden_act 'silu' and config.json mlp_hidden_act 'relu2'"),
    ({"hidden_act": "silu", "swiglu_alpha": 1.702}, "expected swigluoai, which has parameters .*got 'silu' next to swiglu_alpha"),
    ({"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, "got 'silu' next to swiglu_alpha, swiglu_limit"),
    ({"hidden_act": "gelu", "swiglu_limit": 7.0}, "got 'gelu' next to swiglu_limit"),
    ({"swiglu_limit": "7.0"}, "expected int or float, got str '7.0'"),
    ({"swiglu_limit": True}, "expected int or float, got bool True"),
    ({"swiglu_limit": [7.0, 7.0]}, r"expected int or float, got list \[7.0, 7.0\]"),
    ({"swiglu_limit": 0.0}, "expected above 0, got 0.0"),
    ({"swiglu_limit": -1}, "expected above 0, got -1.0"),
    ({"swiglu_alpha": float("nan")}, "expected a finite float32, got nan"),
    ({"swiglu_alpha": 1e39}, "expected a finite float32"),
    ({"swiglu_alpha": 10**400}, "expected a finite float32"),
    ({"swiglu_limits": [7.0]}, "expected swiglu_limit, one number"),
    ({"text_config": [1]}, r"text_config of .*: expected an object, got list \[1\]"),
    ({"model_type": 3}, "model_type of .*: expected str, got int 3"),
    ({"num_local_experts": "2"}, "num_local_experts of .*: expected int, got str '2'"),
    ({"num_local_experts": 3}, r"experts: expected 3 experts, as config.json num_local_experts says, got 2"),
    ({"num_local_experts": None, "n_routed_experts": 1}, "expected 1 experts, as config.json n_routed_experts says, got 2")])
def test_config_values_are_not_trusted(tmp_path: Path, change: Config, match: str) -> None:
    with pytest.raises(MxdebugError, match=match):
        activation(tmp_path, **({"hidden_act": "swigluoai"} | change))


@pytest.mark.parametrize("change, match", [
    ({"swiglu_alpha": 2.0}, "expected 1.702, which engines fix for model_type gpt_oss, got 2.0"),
    ({"model_type": "gpt_oss_puzzle"}, "expected model_type gpt_oss, or hidden_act swigluoai, got 'silu' with model_type 'gpt_oss_puzzle'"),
    ({"model_type": "x", "hidden_act": "relu2", "swiglu_limit": None}, "blocks: expected an activation with gate, got one without")])
def test_gptoss_names_with_another_activation(tmp_path: Path, change: Config, match: str) -> None:
    t, config = small("gptoss-tiny")
    with pytest.raises(MxdebugError, match=match):
        open_checkpoint(write(tmp_path / "a", t, config | change)).layer()


# -- quantisation kind --------------------------------------------------------------------------------------------


CT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


@pytest.mark.parametrize("name, quantisation, match", [
    ("minimax-tiny", None, "got none"),
    ("minimax-tiny", "mxfp4", "expected dict, got str 'mxfp4'"),
    ("minimax-tiny", {"quant_method": "mxfp4"}, "expected those of gpt-oss, .*got those of compressed-tensors"),
    ("gptoss-tiny", CT, "expected those of compressed-tensors.*got those of gpt-oss"),
    ("minimax-tiny", CT | {"format": "nvfp4-pack-quantized"}, "those of compressed-tensors nvfp4.*got those of compressed-tensors mxfp4"),
    ("minimax-tiny", CT | {"format": "float-quantized"}, "got quant_method 'compressed-tensors', format 'float-quantized'"),
    ("minimax-tiny", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "those of ModelOpt NVFP4.*got those of compressed-tensors mxfp4"),
    ("minimax-tiny", {"quant_method": ["mxfp4"]}, r"got quant_method \['mxfp4'\]"),
    ("minimax-tiny", CT | {"config_groups": {"g": {"weights": {"group_size": 16}}}},
     "expected group_size 32, which is MXFP4's, got 16"),
    ("minimax-tiny", CT | {"config_groups": [1]}, "expected objects with weights"),
    ("minimax-tiny", CT | {"config_groups": {"g": 1}}, "expected objects with weights")])
def test_kind_that_is_not_supported(tmp_path: Path, name: str, quantisation: Any, match: str) -> None:
    t, config = small(name)
    with pytest.raises(MxdebugError, match=match) as error:
        open_checkpoint(write(tmp_path / "a", t, config | {"quantization_config": quantisation}))
    if "quantization_config" in error.value.operand and isinstance(quantisation, dict) and "config_groups" not in quantisation:
        assert "mxfp4-pack-quantized" in error.value.expected and "gpt-oss" in error.value.expected  # says what is supported


# -- tensors that must be refused ---------------------------------------------------------------------------------

Change = Callable[[Tensors], Any]


def put(key: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda t: t.__setitem__(key, make(t[key]))


def drop(*keys: str) -> Change:
    return lambda t: [t.pop(k) for k in keys]


def add(key: str, value: torch.Tensor) -> Change:
    return lambda t: t.__setitem__(key, value)


def nan_at(*index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(t: torch.Tensor) -> torch.Tensor:
        t[index] = 0xFF
        return t
    return make


def doubled(word: str) -> Change:
    """Twice the rows in every expert's payload and scales."""
    return lambda t: [put(f"{M}{e}.{word}.weight_{x}", lambda p: torch.cat([p, p]))(t) for e in (0, 1) for x in ("packed", "scale")]


def cut(projection: str, rows: int) -> Change:
    return lambda t: [put(f"{E}{projection}_{x}", lambda v: v[:, :rows])(t) for x in ("blocks", "scales", "bias")]


def biases(odd: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Biases for all, one of them odd."""
    def change(t: Tensors) -> None:
        t |= {f"{M}{e}.{w}.bias": torch.zeros(n) for e in (0, 1) for w, n in (("w1", 32), ("w3", 32), ("w2", 64))}
        t[M + "1.w1.bias"] = odd(t[M + "1.w1.bias"])
    return change


BYTE = torch.zeros(1, dtype=torch.uint8)
BLOCKS, SCALES = E + "gate_up_proj_blocks", E + "gate_up_proj_scales"
REFUSED: dict[str, tuple[str, Change, tuple[str, str, str, str]]] = {
    # case: (checkpoint, change, fragments of operand, expected, got, reason)
    "fp32 scales": ("minimax-tiny", put(M + "1.w3.weight_scale", lambda s: torch.exp2(s.float() - 127)),
                    (M + "1.w3.weight_scale", "U8 or F8_E8M0", "F32", "cast by value")),
    "e4m3 scales": ("gptoss-tiny", put(SCALES, lambda s: s.view(torch.float8_e4m3fn)), (SCALES, "U8 or F8_E8M0", "F8_E4M3", "NVFP4")),
    "bf16 payload": ("minimax-tiny", put(M + "0.w2.weight_packed", lambda p: p.bfloat16()),
                     (M + "0.w2.weight_packed", "U8", "BF16", "not quantised")),
    "int8 payload": ("gptoss-tiny", put(BLOCKS, lambda p: p.view(torch.int8)), (BLOCKS, "U8", "I8", "")),
    "int bias": ("gptoss-tiny", put(E + "down_proj_bias", lambda b: b.int()), (E + "down_proj_bias", "BF16", "I32", "")),
    "NVFP4 global scale": ("minimax-tiny", add(M + "0.w1.weight_global_scale", BYTE),
                           ("weight_global_scale", "no global scale", "a global scale", "NVFP4")),
    "NVFP4 ModelOpt": ("minimax-tiny", add(M + "0.w1.weight_scale_2", BYTE),
                       ("weight_scale_2", "mxfp4-pack-quantized", "a global scale", "NVFP4")),
    "NVFP4 fused": ("gptoss-tiny", add(E + "gate_up_proj_weight_scale_2", BYTE),
                    ("weight_scale_2", "no global scale", "a global scale", "NVFP4")),
    "zero point": ("minimax-tiny", add(M + "0.w1.weight_zero_point", BYTE),
                   ("weight_zero_point", "known meaning", "not known", "zero points")),
    "expert missing": ("minimax-tiny", drop(*(f"{M}0.{w}.weight_{x}" for w in ("w1", "w2", "w3") for x in ("packed", "scale"))),
                       (M + "0.w", "each expert 0..1", "none for expert 0; 1 of 2 missing", "incomplete")),
    "last expert missing": ("minimax-tiny", drop(*(f"{M}1.{w}.weight_{x}" for w in ("w1", "w2", "w3") for x in ("packed", "scale"))),
                            (M[:-1], "2 experts, as config.json num_local_experts says", "1", "incomplete")),
    "scale missing": ("minimax-tiny", drop(M + "1.w2.weight_scale"),
                      (M + "1.w2.weight_scale", "each expert 0..1", "none for expert 1", "incomplete")),
    "fused scale missing": ("gptoss-tiny", drop(E + "down_proj_scales"),
                            (E + "down_proj_scales", "a tensor", "no such tensor", "incomplete")),
    "fused bias missing": ("gptoss-tiny", drop(E + "down_proj_bias"),
                           (E + "down_proj_bias", "both projections", "no such tensor", "dropped biases")),
    "no bias at all": ("gptoss-tiny", drop(E + "down_proj_bias", E + "gate_up_proj_bias"),
                       ("gate_up_proj_bias", "gpt-oss has both", "no such tensor", "")),
    "experts of two shapes": ("minimax-tiny", put(M + "1.w1.weight_packed", lambda p: torch.cat([p, p])),
                              (M + "1.w1.weight_packed", f"shape [32, 32] next to {M}0.w1.weight_packed", "shape [64, 32]", "")),
    "gate unlike up": ("minimax-tiny", doubled("w1"), (M + "*.w1.weight_packed", "[32, 64] elements next to w3 [32, 64]", "[64, 64]", "")),
    "down unlike up": ("minimax-tiny", doubled("w2"), (M + "*.w2.weight_packed", "[64, 32] elements", "[128, 32]", "")),
    "transposed scales": ("minimax-tiny", put(M + "0.w1.weight_scale", lambda s: s.T),
                          (M + "0.w1.weight_scale", "shape [32, 2]", "shape [2, 32]", "transposed")),
    "blocks of 16": ("minimax-tiny", put(M + "0.w1.weight_scale", lambda s: s.repeat(1, 2)),
                     (M + "0.w1.weight_scale", "shape [32, 2]", "shape [32, 4]", "another block size")),
    "K of 24": ("minimax-tiny", put(M + "0.w1.weight_packed", lambda p: p[:, :12]),
                (M + "0.w1.weight_packed", "a multiple of the block of 32", "K 24", "cuts a block")),
    "3-D payload": ("minimax-tiny", put(M + "0.w1.weight_packed", lambda p: p[None]),
                    (M + "0.w1.weight_packed", "2 dimensions", "shape [1, 32, 32]", "")),
    "flat payload": ("gptoss-tiny", put(BLOCKS, lambda p: p.flatten(-2)), (BLOCKS, "4 dimensions", "shape [2, 64, 32]", "")),
    "8-byte blocks": ("gptoss-tiny", put(BLOCKS, lambda p: p.reshape(2, 64, 4, 8)),
                      (BLOCKS, "last dimension of 16 bytes", "shape [2, 64, 4, 8]", "NVFP4")),
    "no experts": ("gptoss-tiny", put(BLOCKS, lambda p: p[:0]), (BLOCKS, "none empty", "shape [0, 64, 2, 16]", "")),
    "odd rows": ("gptoss-tiny", cut("gate_up_proj", 63), (BLOCKS, "an even number of rows", "63", "")),
    "down of another layer": ("gptoss-tiny", cut("down_proj", 32),
                              (E + "down_proj_blocks", "shape [2, 64, 32/32, 16] next to gate_up_proj", "shape [2, 32, 1, 16]", "")),
    "bias of another layer": ("gptoss-tiny", put(E + "gate_up_proj_bias", lambda b: b[:, :32]),
                              (E + "gate_up_proj_bias", "shape [2, 64]", "shape [2, 32]", "")),
    "NaN scale": ("minimax-tiny", put(M + "1.w2.weight_scale", nan_at(5, 0)),
                  (M + "1.w2.weight_scale, expert 1, row 5, block 0", "below 0xFF", "1 NaN (byte 0xFF) in 1 rows", "overflow")),
    "NaN scales, fused": ("gptoss-tiny", put(SCALES, nan_at(1, 7)),
                          (SCALES + ", expert 1, row 7, block 0", "below 0xFF", "2 NaN (byte 0xFF) in 1 rows", "overflow")),
    "single biases of two dtypes": ("minimax-tiny", biases(lambda t: t.half()),
                                    (M + "*.w1.bias", "one dtype", "torch.float16", "two exports")),
    "single bias of another layer": ("minimax-tiny", biases(lambda t: t[:8]), (M + "1.w1.bias", "shape [32]", "shape [8]", "two layers")),
    "single bias of int": ("minimax-tiny", biases(lambda t: t.int()), (M + "1.w1.bias", "BF16", "I32", "")),
    "only one has a bias": ("minimax-tiny", add(M + "1.w2.bias", torch.zeros(64)), (".bias", "each expert 0..1", "none for expert 0", "")),
    "mixed spelling": ("minimax-tiny", lambda t: t.__setitem__(M + "0.gate_proj.weight_scale", t.pop(M + "0.w1.weight_scale")),
                       (M[:-1], "one spelling", "gate_proj", "two exports")),
    "both kinds in a layer": ("gptoss-tiny", add(E + "0.w1.weight_packed", BYTE), (E[:-1], "one kind", "both", "two checkpoints")),
    "unquantised next to fused": ("gptoss-tiny", add(E + "0.w1.weight", BYTE), (E + "0.w1.weight", "known meaning", "not known", "")),
    "both kinds": ("gptoss-tiny", add("model.layers.1.mlp.experts.0.w1.weight_packed", BYTE),
                   ("tensor names", "one kind", " and ", "two checkpoints")),
    "two modules": ("gptoss-tiny", add("layers.0.mlp.experts.gate_up_proj_blocks", BYTE),
                    ("layer 0", "one module", "layers.0.mlp.experts", "two models")),
    "no MoE": ("gptoss-tiny", lambda t: [t.clear(), t.update(x=BYTE)], ("tensor names", "gpt-oss names", "x", "no MoE layers")),
    "unquantised": ("minimax-tiny", lambda t: [t.clear(), t.update({M + "0.w1.weight": BYTE})],
                    ("tensor names", "weight_packed", M + "0.w1.weight", "another format")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_tensors(tmp_path: Path, case: str) -> None:
    name, change, fragments = REFUSED[case]
    t, config = small(name)
    assert open_checkpoint(write(tmp_path / "good", t, config)).layer().layer.experts == 2  # so that the change is to blame
    change(t)
    with pytest.raises(MxdebugError) as error:
        open_checkpoint(write(tmp_path / "bad", t, config)).layer()
    e = error.value
    for text, fragment in zip((e.operand, e.expected, e.got, e.reason), fragments, strict=True):
        assert fragment in text, str(e)


def test_nan_scales_of_other_experts_do_not_matter(tmp_path: Path) -> None:
    t, config = small("gptoss-tiny")
    t[SCALES][1, 7] = 0xFF
    checkpoint = open_checkpoint(write(tmp_path / "a", t, config))
    assert checkpoint.layer(experts=slice(0, 1)).layer.experts == 1
    with pytest.raises(MxdebugError, match="expert 1, row 7"):
        checkpoint.layer(experts=slice(1, 2))


def test_layer_index(tmp_path: Path) -> None:
    t, config = small("gptoss-tiny")
    two: Checkpoint = open_checkpoint(write(tmp_path / "a", t | {k.replace("layers.0", "layers.3"): v for k, v in t.items()}, config))
    for index, got in ((None, "none"), (1, "1"), (-1, "-1"), (True, "True"), ("0", "'0'")):
        with pytest.raises(MxdebugError, match=f"layer index: expected one of 0, 3, got {got}"):
            two.layer(index)


# -- files that must be refused -----------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    t, config = small("minimax-tiny")
    with pytest.raises(MxdebugError, match="got no such path.*model name instead of a local path"):
        open_checkpoint(tmp_path / "missing")
    folder = write(tmp_path / "a", t, None)
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(MxdebugError, match="config.json: expected a file, got no such file"):
            open_checkpoint(path)
    for text, match in (("{", "expected JSON"), ("[]", "expected a JSON object, got list"), ("[" * 100_000, "expected JSON"),
                        ("\xff", "expected JSON")):
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(MxdebugError, match=match):
            open_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).experts == 2
    (folder / "model.bin").write_bytes(b"")
    with pytest.raises(MxdebugError, match="expected a folder or a .safetensors file, got a file .bin"):
        open_checkpoint(folder / "model.bin")
    whole = (folder / "model.safetensors").read_bytes()
    for data in (whole[:-1], whole[:20], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(MxdebugError, match="model.safetensors: expected a whole safetensors file, got .*interrupted download"):
            open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(MxdebugError, match="got none of them"):
        open_checkpoint(folder)


def test_index(tmp_path: Path) -> None:
    t, config = small("minimax-tiny")
    folder = write_shards(tmp_path / "a", {"one.safetensors": t}, config)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    write(tmp_path, t, config, "one.safetensors")  # so that the escapes below would be found
    for file in ("../one.safetensors", str(tmp_path / "one.safetensors"), "..\\one.safetensors", "a/../one.safetensors", "one.bin", "",
                 3, None, ["one.safetensors"]):
        index.write_text(json.dumps({"weight_map": good["weight_map"] | {M + "0.w1.weight_scale": file}}))
        with pytest.raises(MxdebugError, match=r"file of tensor .*0\.w1\.weight_scale.*: expected the name of a .safetensors file in the"):
            open_checkpoint(folder)
    for bad in ({}, {"weight_map": None}, {"weight_map": ["one.safetensors"]}):
        index.write_text(json.dumps(bad))
        with pytest.raises(MxdebugError, match="weight_map of .*: expected an object"):
            open_checkpoint(folder)
    index.write_text(json.dumps(good))
    write(folder, {k: v for k, v in t.items() if k != M + "1.w2.weight_scale"}, config, "one.safetensors")
    with pytest.raises(MxdebugError, match=r"1\.w2\.weight_scale: expected in one.safetensors, where .* puts it, got no such tensor there"):
        open_checkpoint(folder).layer()
    (folder / "one.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(MxdebugError, match="one.safetensors: expected a whole safetensors file"):
        open_checkpoint(folder).layer()


def test_two_sets_of_weights(tmp_path: Path) -> None:
    t, config = small("minimax-tiny")
    folder = write_shards(tmp_path / "a", {"one.safetensors": t}, config)
    write(folder, t, config)
    with pytest.raises(MxdebugError, match="expected one set of weights.*got both"):
        open_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "two.safetensors")
    assert open_checkpoint(folder).experts == 2  # the index decides
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(MxdebugError, match="expected in one file, got in one.safetensors and two.safetensors"):
        open_checkpoint(folder)
