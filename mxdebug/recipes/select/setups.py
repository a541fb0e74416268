"""The question: a layer and its deployment, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import MxdebugError

SMS = (90, 100, 103, 110, 120, 121)
# vLLM's MoEActivation. RELU2 (gated) is one that no experts class of 0.33 takes.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "situ", "swigluoai_uninterleave", "swiglustep",
               "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
# vLLM's names of activation quantisation (config/quantization.py, QUANT_KEY_NAMES); "nvfp4" is kNvfp4Dynamic, which has none there.
ACTIVATION_KEYS = (None, "mxfp8", "mxfp4", "fp8_per_tensor_static", "fp8_per_token", "fp8_per_block_dynamic", "nvfp4", "nvfp4_per_token")
# RoutingMethodType (fused_moe/config.py).
ROUTINGS = ("Default", "Renormalize", "DeepSeekV3", "Llama4", "RenormalizeNaive", "TopK", "SigmoidRenorm", "MiniMax2", "Sigmoid",
            "Unspecified", "DeepseekV4", "Custom", "Simulated")
ALL2ALL = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "flashinfer_all2allv",
           "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided", "nixl_ep", "moonep", "passthrough")
# What comes with vLLM: requirements/cuda.txt (FlashInfer, Humming) and vllm/third_party (the other two). b12x and quark do not.
INSTALLED = frozenset({"flashinfer", "humming", "triton_kernels", "deep_gemm"})


@dataclass(frozen=True)
class Setup:
    """A layer and its deployment, as far as vLLM's selection reads them.

    sm              compute capability as one number, one of SMS
    quantisation    of the weights: "mxfp4" or "nvfp4"
    checkpoint      "gpt-oss", "mxfp4" (any other model with quant_method mxfp4, DeepSeek-V4's FP4 experts), "compressed-tensors", "quark";
                    for nvfp4 "modelopt", "compressed-tensors", "quark". It decides which oracle is asked
    activation      vLLM's MoEActivation value, one of ACTIVATIONS; the ones ending in _no_mul have no gate
    activation_key  quantisation of the activations that the checkpoint declares, or that quantization_config.moe.activation asks for;
                    one of ACTIVATION_KEYS. For nvfp4 None is W4A16
    moe_backend     --moe-backend
    routing         one of ROUTINGS. It only decides between the monolithic and the modular experts of a path; None: both are named
    tp, dp          --tensor-parallel-size, --data-parallel-size; expert_parallel: --enable-expert-parallel; eplb: --enable-eplb
    all2all         --all2all-backend, read with expert_parallel and dp > 1
    lora            LoRA is enabled; batch_invariant: VLLM_BATCH_INVARIANT=1
    bias            the experts have biases (gpt-oss always has)
    swiglu_*        the model's SwiGLU parameters; None where it has none. situ_*: the model's SiTU parameters
    hash_routing, routes_adjusted   FusedMoEConfig.has_hash_routing, require_decomposed_backend
    dtype           of the hidden states and the router logits: "bfloat16" or "float16"
    hidden, intermediate   of one expert before sharding; only B12X reads them. experts: None is fewer than 993, which only emulation reads
    installed       optional packages that can be imported and used. "flashinfer" stands for one with all that vLLM looks for in it
    """

    sm: int
    quantisation: str
    checkpoint: str
    activation: str
    activation_key: str | None
    moe_backend: str = "auto"
    routing: str | None = None
    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    eplb: bool = False
    all2all: str = "allgather_reducescatter"
    lora: bool = False
    batch_invariant: bool = False
    bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    situ_beta: float | None = None
    situ_linear_beta: float | None = None
    hash_routing: bool = False
    routes_adjusted: bool = False
    dtype: str = "bfloat16"
    hidden: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    installed: frozenset[str] = INSTALLED

    def __post_init__(self) -> None:
        """Raises MxdebugError on a name that vLLM does not have."""
        for name, known in (("sm", SMS), ("quantisation", ("mxfp4", "nvfp4")), ("activation", ACTIVATIONS),
                            ("activation_key", ACTIVATION_KEYS), ("routing", (None, *ROUTINGS)), ("all2all", ALL2ALL),
                            ("dtype", ("bfloat16", "float16"))):
            if (got := getattr(self, name)) not in known:
                raise MxdebugError(f"Setup.{name}", f"one of {', '.join(map(str, known))}", str(got), "no rules are written for it")
        if self.tp < 1 or self.dp < 1:
            raise MxdebugError("Setup.tp, dp", "at least 1", f"{self.tp}, {self.dp}")
        if unknown := self.installed - INSTALLED - {"b12x", "quark"}:
            raise MxdebugError("Setup.installed", f"some of {', '.join(sorted(INSTALLED | {'b12x', 'quark'}))}", ", ".join(sorted(unknown)))

    # fused_moe/config.py, FusedMoEParallelConfig.make and its properties.
    @property
    def use_ep(self) -> bool:
        return self.expert_parallel and self.tp * self.dp > 1

    @property
    def use_all2all(self) -> bool:
        return self.use_ep and self.dp > 1

    @property
    def batched(self) -> bool:
        """Activations come per expert, padded to the same number of tokens (`use_batched_activation_format`)."""
        return self.use_all2all and self.all2all in ("deepep_low_latency", "nixl_ep")

    @property
    def intermediate_per_rank(self) -> int | None:
        return None if self.intermediate is None else self.intermediate // (1 if self.use_ep else self.tp * self.dp)
