"""Hypothesis strategies: metadata, config and index files with the right keys and wrong values."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(
    [
        "../x.safetensors",
        "/etc/passwd",
        "/proc/self/environ",
        "..",
        ".",
        "",
        "a\0b.safetensors",
        "n" * 300 + ".safetensors",
        "a/../../b.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        "model.safetensors\n",
        "MODEL.SAFETENSORS",
        "link.safetensors",
        "folder.safetensors",
        "fifo.safetensors",
        "<script>alert(1)</script>.safetensors",
        '"><b>.safetensors',
        "\x1b[2J\x1b]0;x\x07.safetensors",
        "\u202egnp.safetensors",
        "\ud800.safetensors",
        "\u00e9.safetensors",
        unicodedata.normalize("NFD", "\u00e9.safetensors"),
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-00003-of-00002.safetensors",
        "config.json",
        "file:///etc/passwd.safetensors",
    ]
)
_NUMBERS = st.one_of(
    st.sampled_from(
        [0, 1, -1, 2, 3, 31, 2**31, 2**62, 2**63, 2**64, 10**400, 0.5, -0.0, float("nan"), float("inf"), -float("inf"), 1e-320, 3.5e38]
    ),
    st.integers(-8, 300),
)
_WORDS = st.one_of(
    NAMES,
    st.text(max_size=6),
    st.sampled_from(
        [
            "torch.uint8",
            "torch.float8_e8m0fnu",
            "torch.load",
            "os.system",
            "U8",
            "NVFP4",
            "mxfp4",
            "silu",
            "swigluoai",
            "relu2",
            "gpt_oss",
            "completed",
            "inputs_saved",
            "graph_capture_pending_flush",
            "\u00b2",
            "9" * 5000,
            "(x)",
            "(a, /, *b, **c)",
            "(x=__import__('os').system('x'))",
            "(((",
            "<unavailable>",
            "(x: T = <a, b=')'>)",
            "(" + "x, " * 5000 + ")",
            "cutlass_fused_moe",
            "mm_bf16_fp4",
            "trtllm_fp4_block_scale_moe",
            "cute_dsl_fused_moe_nvfp4",
        ]
    ),
)
_LEAVES = st.one_of(st.none(), st.booleans(), _NUMBERS, _WORDS)


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


_ENTRIES = st.fixed_dictionaries(
    {"type": st.sampled_from(["list", "tuple", "dict", "enum", "torch.dtype", "torch.Tensor", "Thing"])},
    optional={
        "value": st.one_of(
            _LEAVES, st.builds(_deep, st.sampled_from([5, 300, 600])), st.sampled_from(["[1]", "{[]: 1}", "(" * 200, "1" * 900, "{1: {}}"])
        ),
        "name": st.sampled_from(["A.b", "ActivationType.Swiglu", "ActivationType.Geglu", "nothing", "\x1b.\x1b"]),
        "length": st.integers(0, 3),
        "items": st.lists(st.one_of(_LEAVES, st.fixed_dictionaries({"key": _LEAVES, "value": _LEAVES})), max_size=3),
        "tensor_key": st.sampled_from(["kwarg_output", "kwarg_input", "nothing", 1]),
        "truncated": st.booleans(),
        "repr": _WORDS,
    },
)
VALUES = st.one_of(
    _LEAVES,
    _ENTRIES,
    st.lists(_LEAVES, max_size=4),
    st.dictionaries(st.text(max_size=5), _LEAVES, max_size=3),
    st.builds(_deep, st.sampled_from([3, 300, 600])),
)
"""Values that JSON can hold, of every type; some as FlashInfer describes arguments."""


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))  # in C: deep values are beyond copy.deepcopy


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where anything stands in a JSON value, down to ten levels."""
    inside = () if len(at) == 10 else value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, item in inside for place in _places(item, (*at, key)))]


@st.composite
def edited(draw: Callable[..., Any], whole: Any, most: int = 3) -> Any:
    """A JSON value with up to `most` of its places replaced, removed, doubled or exchanged for another's value.

    Short paths are as likely as long ones."""
    made = _copy(whole)
    for _ in range(draw(st.integers(1, most))):
        places = _places(made)
        if not places:
            break
        depth = draw(st.sampled_from(sorted({len(p) for p in places})))
        *above, last = draw(st.sampled_from([p for p in places if len(p) == depth]))
        holder = made
        for key in above:
            holder = holder[key]
        how = draw(st.sampled_from(["value", "value", "value", "remove", "other", "rename", "add"]))
        if how == "remove":
            del holder[last]
        elif how == "other":
            source = made
            for key in draw(st.sampled_from(places)):
                source = source[key]
            holder[last] = _copy(source)
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(_WORDS)] = holder.pop(last)
        elif how == "add" and isinstance(holder, dict):
            holder[
                draw(
                    st.one_of(
                        _WORDS,
                        st.sampled_from(
                            [
                                "arg_0",
                                "arg_1",
                                "kwarg_",
                                "kwarg_tp_size",
                                "kwarg_ep_size",
                                "text_config",
                                "swiglu_limit",
                                "num_local_experts",
                                "swiglu_alphas",
                                "quantization",
                            ]
                        ),
                    )
                )
            ] = draw(VALUES)
        else:
            holder[last] = draw(VALUES)
    return made


def weight_maps(whole: dict[str, str]) -> st.SearchStrategy[dict[str, Any]]:
    """An index's weight_map that names other files, other tensors, or tensors twice under names that look alike."""
    pairs = st.tuples(
        st.one_of(
            st.sampled_from(sorted(whole)),
            _WORDS,
            st.sampled_from(sorted(whole)).map(str.upper),
            st.sampled_from(
                [
                    "model.layers.\u00b2.x.weight_packed",
                    f"model.layers.{'9' * 5000}.x.weight_scale_2",
                    "model.layers.0.experts.999999.w1.weight_packed",
                    "model.layers.7.mlp.experts.0.w1.weight_packed",
                    ".weight_packed",
                    "weight_packed",
                    "...experts...",
                ]
            ),
        ),
        st.one_of(NAMES, NAMES, VALUES),
    )
    return st.lists(pairs, min_size=1, max_size=4).map(lambda added: {**whole, **dict(added)})
