"""Every rule of a scan. Reports are public issues and pull requests; facts about engines are vLLM 0.33's where no other is named."""

from __future__ import annotations

from .finding import BROKEN, NOTE, SUSPICIOUS, Rule

_DOWNLOAD = "download the file again, and compare its size and hash with the publisher's"
_EXPORT = "export the checkpoint again; what the original weights were cannot be known from this file"
_CALIBRATE = "calibrate again with data that reaches every expert, or set the number from the experts that have one"

RULES: dict[str, Rule] = {
    r.id: r
    for r in (
        # -- files ------------------------------------------------------------------------------------------------------------------
        Rule("shard-damaged", BROKEN, "a file cannot be read whole", "engines refuse it, or stop while they load", _DOWNLOAD),
        Rule(
            "file-refused",
            BROKEN,
            "the index names a file outside the folder",
            "a damaged or malicious index; the file was not opened",
            "take the index from the publisher",
        ),
        Rule(
            "index-disagrees", BROKEN, "index and files disagree", "engines load other tensors than the index promises, or stop", _DOWNLOAD
        ),
        Rule(
            "files-beside",
            NOTE,
            "files beside those that the index names",
            "engines that go by the index do not load them, and nor did this scan: another naming of the same model (Mistral's consolidated), "
            "a draft model, or a rest of an earlier download",
            "none needed where you know what they are",
        ),
        Rule(
            "file-alone",
            NOTE,
            "one file of a model was scanned alone",
            "what is not in it may stand in another file: nothing was said to be missing",
            "scan the folder",
        ),
        Rule(
            "tensor-twice",
            BROKEN,
            "a tensor stands in two files",
            "engines differ in which one they take",
            "remove the file that does not belong here",
        ),
        # -- configuration ----------------------------------------------------------------------------------------------------------
        Rule(
            "config-unreadable",
            BROKEN,
            "config.json or hf_quant_config.json cannot be read",
            "engines stop, or take the weights for something else",
            _DOWNLOAD,
        ),
        Rule(
            "config-silent",
            SUSPICIOUS,
            "no configuration states the quantisation",
            "engines load the model unquantised, which fails or computes garbage; this scan took the kind from the names",
            "put config.json with its quantization_config beside the weights",
        ),
        Rule(
            "config-not-checked",
            NOTE,
            "the quantisation that is stated is not one that scan knows",
            "the weights were checked, the configuration was not",
            "none needed",
        ),
        Rule(
            "kind-contradiction",
            BROKEN,
            "weights are of another kind than the configuration states",
            "the engine makes room for other tensors than there are",
            "put weights and config.json of one export together",
        ),
        Rule(
            "group-size",
            BROKEN,
            "the block is another one than the format's or the configuration's",
            "a kernel that reads blocks of the other size gives every second block another's scale: cosine 0.97 to 0.79",
            "export with the block of the format: 16 for NVFP4, 32 for MXFP4 and MXFP8",
            ("TensorRT-LLM#19091",),
        ),
        Rule(
            "ignored-but-quantised",
            BROKEN,
            "quantised, though the configuration says that they are not",
            "the engine makes room for bf16 weights and gets packed bytes",
            "take the modules off the configuration's ignore list",
            ("sglang#39317", "TensorRT-LLM#17551"),
        ),
        Rule(
            "expected-but-unquantised",
            BROKEN,
            "not quantised, though the configuration does not except them",
            "the engine makes room for packed bytes and gets bf16 weights",
            "put the modules on the configuration's ignore list",
            ("vllm#23031", "sglang#39317"),
        ),
        Rule(
            "experts-count",
            BROKEN,
            "another number of experts than config.json states",
            "an incomplete download, one rank's share, or the config.json of another model",
            _DOWNLOAD,
        ),
        Rule(
            "layers-missing",
            BROKEN,
            "layers that config.json states have no tensors",
            "an incomplete download, or the config.json of another model",
            _DOWNLOAD,
        ),
        Rule("not-read", NOTE, "modules are quantised in a way that scan does not read", "they were not checked", "none needed"),
        Rule(
            "sizes-and-config",
            NOTE,
            "sizes differ from config.json",
            "a padded or cut export, or the config.json of another model",
            "compare with the original model's config.json",
        ),
        Rule(
            "pattern-unreadable",
            NOTE,
            "a pattern of the ignore list was not used",
            "it is too long, no regular expression, or takes too long to match",
            "simplify the pattern",
        ),
        # -- tensors ----------------------------------------------------------------------------------------------------------------
        Rule(
            "tensors-missing",
            BROKEN,
            "tensors are missing",
            "engines stop, or compute with what they find in memory",
            "download or export the checkpoint again",
            ("vllm#45212",),
        ),
        Rule(
            "tensors-unknown",
            SUSPICIOUS,
            "tensors that no known kind has",
            "zero points, another format or a newer exporter: engines ignore them, and what they mean is lost",
            "ask the exporter what they are",
            ("vllm#46641", "transformers#48372"),
        ),
        Rule(
            "payload-dtype", BROKEN, "payload in another dtype than the kind has", "not packed, or another format under this name", _EXPORT
        ),
        Rule(
            "payload-shape",
            BROKEN,
            "payload transposed or of an impossible shape",
            "rows and columns are exchanged; engines stop at best",
            "transpose the packed codes when exporting (not the bytes: two codes share one)",
            ("vllm#50610",),
        ),
        Rule(
            "scale-dtype",
            BROKEN,
            "block scales in the wrong dtype",
            "cast by value into the engine's bytes they become 0, 1, 2, 4 ...",
            "store the scales' bytes in the kind's dtype",
            ("vllm#51419",),
        ),
        Rule(
            "scale-shape",
            BROKEN,
            "block scales in the wrong shape",
            "transposed, with axes swapped, or already in a kernel's layout",
            _EXPORT,
            ("sglang#35032", "vllm#47115"),
        ),
        Rule(
            "shapes-disagree",
            BROKEN,
            "sizes of one layer's weights do not fit together",
            "parts of two layers, or a padded next to an unpadded one",
            _EXPORT,
        ),
        # -- block scales -----------------------------------------------------------------------------------------------------------
        Rule("scale-nan", BROKEN, "block scales that are NaN", "the output channel of such a row is NaN for every token", _EXPORT),
        Rule(
            "scale-negative",
            BROKEN,
            "negative block scales",
            "scales are magnitudes; kernels with unsigned scales read another number, others flip the sign",
            "these are other bytes under the scales' name: " + _EXPORT,
        ),
        Rule(
            "scale-cast",
            BROKEN,
            "block scales were cast by value",
            "only 0 and powers of two occur as bytes, as where E8M0 numbers were converted to uint8",
            "store the scales' bytes, not their values",
            ("vllm#51419",),
        ),
        Rule(
            "scale-constant",
            SUSPICIOUS,
            "all block scales of a tensor are the same",
            "never calibrated, or never written; real weights have several",
            "look at the exporter's log for these modules",
        ),
        Rule(
            "scale-saturated",
            SUSPICIOUS,
            "many block scales at E4M3's largest number, 448",
            "the global scale is too small: the largest weights were clipped",
            "export with weight_scale_2 = amax / 2688",
        ),
        Rule(
            "zero-scale-under-payload",
            BROKEN,
            "block scale zero where the payload is not zero",
            "weights that were there are lost",
            _EXPORT,
        ),
        Rule("payload-nan", BROKEN, "payload has NaN", "every output that reads the element is NaN", _EXPORT),
        Rule(
            "payload-zero",
            SUSPICIOUS,
            "weights that are zero throughout",
            "an expert or module that does nothing: never loaded or never written",
            "look at the exporter's log for these modules",
        ),
        Rule(
            "payload-rows-zero",
            NOTE,
            "rows of zeros",
            "pruned channels, or padding that was exported with the weights",
            "none needed where the model was pruned",
        ),
        # -- global and input scales ------------------------------------------------------------------------------------------------
        Rule(
            "global-bad",
            BROKEN,
            "global scales that are not a usable number",
            "engines use the number and its reciprocal: tokens that meet the weight become NaN, inf or 0",
            _CALIBRATE,
            ("compressed-tensors#595", "TensorRT-LLM#16447", "flashinfer#2595"),
        ),
        Rule(
            "input-bad",
            BROKEN,
            "input scales that are not a usable number",
            "engines invert the number unseen: tokens routed there become NaN, inf or 0; and a maximum "
            "over experts takes it to the whole layer",
            _CALIBRATE,
            ("compressed-tensors#595", "vllm#45212", "TensorRT-LLM#16447"),
        ),
        Rule(
            "input-missing",
            BROKEN,
            "only some experts or modules have an input scale",
            "the others keep what was in memory: NaN or nothing, depending on the prompt",
            _CALIBRATE,
            ("vllm#45212", "sglang#13162"),
        ),
        Rule(
            "w13-differ",
            SUSPICIOUS,
            "gate (w1) and up (w3) of an expert have different global scales",
            "kernels take one number for both, and engines w1's: the up half is wrong by a constant for each expert",
            "export with one amax for gate and up",
            ("TensorRT-LLM#12214", "Model-Optimizer#1411"),
        ),
        Rule(
            "joined-differ",
            SUSPICIOUS,
            "projections that engines join have different global scales",
            "one number serves all (vLLM takes the largest): the others are wrong by a constant",
            "export with one amax for the joined projections",
            ("vllm#47515", "llm-compressor#1869"),
        ),
        Rule(
            "inputs-differ",
            NOTE,
            "joined projections have different input scales, though they have one input",
            "engines take the largest; older ones the last that they load",
            "export with one amax for the input",
            ("NeMo-RL#2983",),
        ),
        Rule(
            "experts-outlier",
            SUSPICIOUS,
            "one layer's experts have global scales more than 2^15 apart",
            "backends that share one number among experts (vLLM: the largest input scale) flush the quiet experts to zero",
            _CALIBRATE,
            ("sglang#24321", "flashinfer#2732", "flashinfer#2595"),
        ),
        # -- what only some backends do -----------------------------------------------------------------------------------------------
        Rule(
            "fold-e4m3",
            NOTE,
            "b12x (SM12x) and MLX fold the global scale into the E4M3 block scales",
            "products below 2^-6 are subnormal and lose bits, below 2^-10 they are 0",
            "on SM12x take another backend than b12x",
            ("vllm#48536", "mlx-node#120"),
        ),
        Rule(
            "marlin-flush",
            NOTE,
            "Marlin's S0E5M3 makes small block scales 0",
            "blocks with scales below 2^-6, after vLLM's normalisation of the layer in bf16, are lost",
            "take another backend than Marlin, or export with weight_scale_2 = amax / 2688",
        ),
        Rule(
            "e8m0-fp16",
            NOTE,
            "E8M0 bytes 103 to 112 are 0 on paths that decode scales to FP16",
            "those blocks are lost on Marlin-like kernels of SM70 and SM75",
            "run in bf16",
            ("1Cat-vLLM#222",),
        ),
        Rule(
            "e8m0-zero",
            NOTE,
            "E8M0 byte 0 is 2^-127, which SM90's MXFP4 kernel reads as 0.0",
            "no difference but to numbers below 2^-124",
            "none needed",
        ),
        Rule(
            "tp-cuts-block",
            NOTE,
            "a tensor-parallel degree cuts inside a block",
            "engines refuse it, pad unevenly or give ranks their neighbour's scales",
            "choose another degree",
            ("sglang#9473", "aiter#5233"),
        ),
        Rule(
            "path-pads",
            NOTE,
            "paths pad these sizes",
            "more memory and time; faults of padding strike only here",
            "none needed; suspect padding first if such a path writes garbage",
            ("vllm#46879", "flashinfer#2907", "sglang#9346"),
        ),
        Rule(
            "path-refuses",
            NOTE,
            "paths that refuse these sizes",
            "the model does not start on them",
            "choose another path or degree",
            ("vllm#57351", "sglang#30887"),
        ),
    )
}
