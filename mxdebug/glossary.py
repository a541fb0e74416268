"""Words of the field and of this project, each in a few plain sentences. notebooks/glossary.md is made from them (`page`)."""

from __future__ import annotations

import difflib
import re
import textwrap
from dataclasses import dataclass

from .errors import MxdebugError

# Where a standard or a vendor's documentation says it.
MX = ("OCP Microscaling Formats (MX) v1.0", "https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf")
FP8 = ("OCP 8-bit Floating Point (OFP8) v1.0",
       "https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1")
NVIDIA_NVFP4 = ("NVIDIA on NVFP4",
                "https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/")
CUBLAS = ("cuBLAS, 1D block scaling factors layout", "https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout")
PTX = ("PTX ISA, block scaling for tcgen05.mma", "https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-block-scaling")
CUDA = ("NVIDIA, compute capability of each GPU", "https://developer.nvidia.com/cuda-gpus")
SHAZEER = ("Shazeer, GLU Variants Improve Transformer", "https://arxiv.org/abs/2002.05202")
FLASHINFER = ("FlashInfer", "https://docs.flashinfer.ai/")


@dataclass(frozen=True)
class Entry:
    """One word.

    also     other names for it, and words that it explains along the way; parts of the word itself ("gate, up, down") need not be here
    says     one to three sentences
    source   (title, address) of a standard or of a vendor's documentation; None where the word is the project's own or everybody's
    """

    word: str
    says: str
    also: tuple[str, ...] = ()
    source: tuple[str, str] | None = None

    def __str__(self) -> str:
        head = self.word + (f" (also: {', '.join(self.also)})" if self.also else "")
        lines = [head, *textwrap.wrap(self.says, 86, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)]
        return "\n".join([*lines, *([f"  {self.source[0]}: {self.source[1]}"] if self.source else [])])


NUMBERS = (
    Entry("code",
          "The bits of one stored number, read as a whole number: 4 bits make the codes 0 to 15. The value that a format "
          "gives a code is the element: code 4 of E2M1 is the element 2.0. A weight is its element times its block scale.",
          ("element",)),
    Entry("block",
          "Neighbouring numbers of one row that share one block scale: 32 of them in MXFP4 and MXFP8, 16 in NVFP4.",
          ("group", "scale vector"), MX),
    Entry("block scale",
          "The number that multiplies all elements of one block. It is stored as one byte, an E8M0 in MX formats and an "
          "E4M3 in NVFP4.",
          ("scale factor", "SF", "SFA, SFB", "shared scale", "weight_scale"), MX),
    Entry("global scale",
          "One float32 number for a whole tensor or expert that multiplies everything in it. NVFP4 has one, because E4M3 "
          "block scales alone do not reach far enough. ModelOpt stores the number to multiply with, compressed-tensors the "
          "one to divide by.",
          ("per-tensor scale", "weight_scale_2", "weight_global_scale"), NVIDIA_NVFP4),
    Entry("payload",
          "The codes of a tensor, packed: two 4-bit codes to a byte, the one with the even index in the low half (the low "
          "nibble; a nibble is 4 bits, one hexadecimal digit).",
          ("packed weight", "weight_packed", "nibble")),
    Entry("E2M1",
          "A 4-bit float of one sign bit, two exponent bits and one mantissa bit. Its 16 codes stand for 0, 0.5, 1, 1.5, 2, "
          "3, 4, 6 and the same negated; it has neither NaN nor inf.",
          ("FP4",), MX),
    Entry("E4M3",
          "An 8-bit float of one sign bit, four exponent bits and three mantissa bits: at most 448, with NaN and without "
          "inf. MXFP8 keeps its elements in it, NVFP4 its block scales. E5M2 has five and two: up to 57344, with inf.",
          ("FP8", "E5M2"), FP8),
    Entry("E8M0",
          "A byte that holds an exponent and nothing else: byte b means 2^(b - 127), and 0xFF is NaN. It has no sign, no "
          "fraction and no zero. SM90's MXFP4 kernel departs from that: to it 0x00 is 0.0 and 0xFF is inf.",
          ("UE8M0",), MX),
    Entry("S0E5M3",
          "NVFP4's block scales written in another way for kernels that compute in float16: the byte is eight of the 16 "
          "bits of the same value, without the sign. CuTe-DSL's SM12x kernel and Marlin read it."),
    Entry("MXFP4",
          "A block format: E2M1 elements, and an E8M0 block scale for each 32 of them, so 4.25 bits a number. gpt-oss "
          "models are published in it.",
          (), MX),
    Entry("MXFP8",
          "A block format: 8-bit elements (E4M3 if nothing else is said), and an E8M0 block scale for each 32 of them. Here "
          "mostly met as the format of activations.",
          (), MX),
    Entry("NVFP4",
          "NVIDIA's block format: E2M1 elements, an E4M3 block scale for each 16 of them, and one float32 global scale for "
          "the tensor.",
          (), NVIDIA_NVFP4),
    Entry("quantise",
          "To replace numbers by the nearest that a smaller format can hold. Dequantise is the way back: element times "
          "scale; what was rounded away stays lost.",
          ("dequantise", "quantize")),
    Entry("exponent rule",
          "How a quantiser chooses a block's E8M0 scale from its largest number: round the exponent down (floor), up "
          "(ceil), or by the rounded number (even). Quantisers differ, so mxdebug asks for the rule and has no default."),
    Entry("outlier",
          "A number much larger than its neighbours. It sets the scale of its whole block, so the steps become coarse and "
          "small neighbours become 0."),
    Entry("saturate",
          "To put the largest number of a format in place of one that is too large for it.",
          ("clip",)),
    Entry("binade",
          "All numbers between two neighbouring powers of two, such as 4 to 8. An E8M0 scale that is off by one moves its "
          "block by one binade: a factor of two."),
    Entry("bfloat16",
          "A 16-bit float with the exponent of float32 and 7 mantissa bits, so steps of about one part in 256. Most "
          "activations and outputs here are in it; float16 has finer steps and ends at 65504.",
          ("bf16",)),
)

MEMORY = (
    Entry("logical and physical",
          "Logical order is row and column, as mathematics counts them. Physical order is the order of the bytes in memory, "
          "as a layout has put them."),
    Entry("layout",
          "The rule that says at which byte of memory a (row, column) lies. mxdebug writes it as a pattern, such as (mt m4 "
          "m32) (kt k4) -> mt kt m32 m4 k4: left, how row and column are split up; right, how memory counts the parts, the "
          "last one fastest."),
    Entry("linear",
          "The layout without any rearrangement: row after row, each from left to right. Checkpoints store it.",
          ("row-major",)),
    Entry("swizzle",
          "A rearrangement of bytes, without changing any, so that what a kernel needs at one time lies in one piece. "
          "Scales in such an order are swizzled. Each kernel family has a swizzle of its own.",
          ("swizzled", "interleaved scales"), CUBLAS),
    Entry("tile",
          "The part of a matrix that a kernel handles in one go, such as 128 rows by 4 columns of scales; a layout repeats "
          "tile by tile. Padding is the bytes, mostly zeros, that fill up the last tile: they must be added in the right "
          "place.",
          ("padding",)),
    Entry("128x4",
          "The layout in which Blackwell's tensor cores take block scales: tiles of 128 rows by 4 columns, 512 bytes each, "
          "with rows 32 apart next to each other. TRT-LLM's kernels also know 8x4, for few tokens.",
          ("blockscaled swizzle", "SWIZZLE_32_4_4", "8x4"), CUBLAS),
    Entry("SM90 scale fold",
          "The layout in which the H100's and H200's MXFP4 kernel reads block scales: in tiles of 64 rows by 4 columns, "
          "rows 16 apart lie next to each other.",
          ("fold",)),
    Entry("SM90 weight interleave",
          "The layout in which the H100's and H200's MXFP4 kernel reads the payload: rows r and r + 8 woven together, and "
          "the bits of each 32-bit word moved, so that two instructions turn four codes into bfloat16."),
    Entry("row order",
          "Which row of a joined weight stands where: [w1; w3] is all of gate and then all of up, [w3; w1] the other way "
          "round, g0,u0,g1,u1 takes turns.",
          ("[w1; w3]", "[w3; w1]")),
    Entry("row shuffle",
          "A change of places among each 16 or 32 rows, on top of a row order. TRT-LLM's kernels read rows shuffled.",
          ("shuffle",)),
    Entry("view",
          "A tensor that shows the same memory in another order, by strides: the step in memory from one index to the next. "
          "Two tensors can be equal index by index while their bytes lie in another order, and a kernel reads bytes.",
          ("stride", "contiguous")),
)

LAYER = (
    Entry("weight",
          "A fixed number of a model, or a whole matrix of them: what was learnt in training, and is the same for every token. "
          "A layer multiplies its activations by its weights."),
    Entry("activations",
          "The numbers that go into a layer, in contrast to its weights: one row for each token, which is a piece of text. "
          "Not to be confused with the activation.",
          ("token",)),
    Entry("linear layer",
          "Activations times a weight, plus a bias. The linear order of bytes is another matter.",
          ("projection",)),
    Entry("mixture of experts",
          "A layer of many small networks, the experts, of which each token uses a few; their results are added up. Each "
          "expert has three weights: gate, up and down.",
          ("MoE", "expert")),
    Entry("router",
          "What chooses the experts of each token and says how much each counts. Top-4 means four experts a token.",
          ("top-k", "routing")),
    Entry("gate, up, down",
          "The three weights of an expert. Gate and up both multiply the token; gate's result switches up's on and off, "
          "up's is the signal; down brings the product back to the hidden size.",
          ("w1", "w3", "w2", "gate_proj", "up_proj", "down_proj")),
    Entry("w13",
          "Gate and up in one tensor, as kernels take them. Which of the two stands first, or whether they take turns, is "
          "its row order.",
          ("gate_up_proj",)),
    Entry("activation",
          "The function between the weights: it joins the results of gate and up, which before it are the pre-activations. "
          "SwiGLU here, mostly.",
          ("pre-activation",)),
    Entry("SwiGLU",
          "An activation: gate * sigmoid(gate) * up. gpt-oss and others add parameters to it, alpha, beta and limit.",
          (), SHAZEER),
    Entry("alpha, beta, limit",
          "SwiGLU's parameters: gate * sigmoid(alpha * gate) * (up + beta), after gate and up have been clamped at limit. "
          "Unset they are 1, 0 and no limit. A linear kernel's alpha is something else: the one number that multiplies its "
          "result.",
          ("clamp",)),
    Entry("hidden and intermediate size",
          "How many numbers a token has outside of the experts, and how many inside, between w13 and w2.",
          ("hidden", "intermediate")),
    Entry("K and N", "A weight has N rows and K columns: K numbers of a token go in, N come out. Blocks lie along K."),
    Entry("GEMM",
          "A multiplication of two matrices, the work that a kernel does. GEMV is the case of a single token, and can be "
          "another kernel.",
          ("GEMV", "grouped GEMM")),
    Entry("W4A16",
          "4-bit weights, 16-bit activations: only the weight is quantised. W4A8 and W4A4 quantise the activations as well.",
          ("W4A8", "W4A4")),
)

ENGINE = (
    Entry("kernel",
          "A program that runs on the GPU: here the one that computes a quantised layer. It gets addresses and reads bytes, "
          "and cannot know what they were meant to be."),
    Entry("tensor core",
          "The part of an NVIDIA GPU that multiplies small matrices in one instruction. Since Blackwell it applies block "
          "scales itself.",
          (), PTX),
    Entry("SM90, SM100",
          "Generations of NVIDIA GPUs by their compute capability: SM90 is the H100 and H200 (Hopper), SM100 the B200, SM103 "
          "the B300, SM120 the RTX 50 series, SM121 the DGX Spark (all Blackwell).",
          ("SM103", "SM120", "SM121", "SM12x", "Hopper", "Blackwell", "compute capability"), CUDA),
    Entry("FlashInfer",
          "A library of GPU kernels that engines call. It can write down its calls, and those records are what mxdebug "
          "reads.",
          (), FLASHINFER),
    Entry("CUTLASS, TRT-LLM, CuTe-DSL, Marlin",
          "Families of kernels, by the code that they are made with; Triton, Humming and b12x are others. Each reads its "
          "operands in orders of its own.",
          ("TRTLLM", "CUTEDSL")),
    Entry("engine",
          "The software that loads a model and answers requests, such as vLLM. It chooses kernels and brings the weights "
          "into the form that they read."),
    Entry("checkpoint",
          "The files of a model: weights by name in .safetensors files, and config.json. Programs that write them (gpt-oss's "
          "own, ModelOpt, compressed-tensors) differ in names and orders."),
    Entry("operand",
          "A tensor as a kernel gets it."),
    Entry("contract",
          "What a kernel reads and computes, written down: for each operand its dtype, shape, layout, row order and scale "
          "codec; and the roundings. `mxdebug contract PATH` prints one."),
    Entry("recipe",
          "The steps, called stages, by which an engine brings a checkpoint into the form that a kernel reads. A lossless "
          "stage, such as a swizzle, can be taken back; a lossy one, such as padding or rounding, has one right result.",
          ("stage",)),
    Entry("path",
          "A recipe and the kernel that it feeds, by the engine's name for it, such as mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16.",
          ("backend",)),
    Entry("tensor parallel",
          "A way to share a model among GPUs: tensor parallel (TP) cuts every weight, expert parallel (EP) deals out the "
          "experts, data parallel (DP) the requests. A rank is one of the processes; ranks count from 0.",
          ("TP", "EP", "DP", "rank", "expert parallel", "data parallel")),
    Entry("fake implementation",
          "A function that says which shape a kernel's output will have, without running it. torch.compile needs one.",
          ("fake", "meta function")),
)

DIAGNOSIS = (
    Entry("call",
          "One recorded run of a kernel: what was passed, and what came out. FlashInfer writes each into a folder of its "
          "own, a dump; a crash dump has inputs and no output.",
          ("dump", "crash dump")),
    Entry("emulate",
          "To compute in PyTorch what a kernel would write, reading bytes where it reads them and rounding where it rounds. "
          "Wrong operands then give the same garbage as on the GPU. To decode is the first half of it: the weights that the "
          "kernel sees.",
          ("emulation", "decode")),
    Entry("bit-identical",
          "Equal in every bit: not almost, and not within a tolerance. The smallest possible difference is one ulp: a "
          "number's distance to its next neighbour.",
          ("ulp", "unit in the last place")),
    Entry("relative L2",
          "The length of the error as a part of the length of the right output: 0 is equal, 1 is as bad as writing zeros, "
          "and about 1.4 is what two unrelated outputs of one length have."),
    Entry("cosine",
          "Whether two outputs point the same way: 1 the same direction, 0 unrelated. It does not see a wrong factor.",
          ("cosine similarity",)),
    Entry("norm ratio",
          "The length of an output as a part of the length of the right one. It does not see a wrong direction."),
    Entry("SQNR",
          "Signal to quantisation noise ratio, in decibels: another way to write relative L2. 0 dB is a relative L2 of 1, "
          "and each 20 dB are a factor of 10."),
    Entry("floor",
          "How far a right output may be from the truth, from the steps of the formats and the order of additions. It is "
          "derived, and not a tolerance that somebody picked.",
          ("tolerance",)),
    Entry("fault",
          "A known mistake, with a name such as scales-linear: where it strikes, what gives it away, how to put it in, what "
          "to change. `mxdebug faults` lists all.",
          ("inject",)),
    Entry("probe",
          "A small made call on which the faults of a path show, some on a rank of several, or with one expert for a token: "
          "sizes that need padding, scales that all differ, biases, activations that reach a clamp. `mxdebug.probe.probe(PATH)` "
          "makes one; `mxdebug.scan.probe` makes a checkpoint likewise. Probe data is what they are made of.",
          ("probe data",)),
    Entry("finding",
          "A fault with its evidence in one call: proved, where bytes are equal, or the output is reproduced bit for bit and "
          "by nothing else; consistent, where it explains what was seen, and others might; suspected, where only statistics "
          "or configuration speak for it.",
          ("proved", "consistent", "suspected")),
    Entry("verdict",
          "What a diagnosis says of a call: right, wrong, or undecided, where this data could not have shown it.",
          ("undecided", "diagnosis")),
    Entry("audit",
          "To run an engine's own converter and compare what it makes with the contract, before any model is served. "
          "`mxdebug audit` does it."),
)

GROUPS = {"Numbers": NUMBERS, "Memory": MEMORY, "The layer": LAYER, "Kernel and engine": ENGINE, "Diagnosis": DIAGNOSIS}
ENTRIES = tuple(e for entries in GROUPS.values() for e in entries)


def find(word: str) -> tuple[Entry, ...]:
    """The entries of a word or of another name for it; without one, those that have it in their name or text.

    Capitals do not matter. Raises MxdebugError where nothing has it, with the words that are spelled alike.
    """
    if not isinstance(word, str):
        raise MxdebugError("word", "a text", type(word).__name__)
    names = {name.lower(): e for e in reversed(ENTRIES) for name in (*re.split(", | and ", e.word), *e.also, e.word)}
    wanted = word.strip().lower()
    exact = [names[w] for w in (wanted, wanted.removesuffix("s")) if w in names]
    if exact:
        return tuple(exact[:1])
    some = tuple(e for e in ENTRIES if wanted and any(wanted in name.lower() for name in (e.word, *e.also)))
    some = some or tuple(e for e in ENTRIES if re.search(rf"\b{re.escape(wanted)}", e.says.lower()) and wanted)
    if not some:
        alike = difflib.get_close_matches(wanted, names, 3, 0.6)
        raise MxdebugError("word", f"one like {', '.join(alike)}" if alike else "one of `mxdebug glossary`", repr(word))
    return some


def explain(word: str) -> str:
    """The entries of a word, as text for a terminal or a cell."""
    return "\n\n".join(map(str, find(word)))


def words() -> str:
    """All words, by group."""
    width = max(map(len, GROUPS)) + 2
    lines = [textwrap.fill(f"{title:<{width}}" + "; ".join(e.word for e in entries), 100, subsequent_indent=" " * width,
                           break_on_hyphens=False) for title, entries in GROUPS.items()]
    return "\n".join([*lines, "", "mxdebug glossary WORD explains one."])


def anchor(word: str) -> str:
    """The anchor that Markdown viewers give a heading."""
    return re.sub(r"[^\w\- ]", "", word.lower()).replace(" ", "-")


def page() -> str:
    """notebooks/glossary.md."""
    index = "\n".join(f"[{e.word}](#{anchor(e.word)}) ·" for e in sorted(ENTRIES, key=lambda e: e.word.lower()))
    lines = ["# Glossary", "",
             "The words of the field and of this project, in plain sentences. In a shell `mxdebug glossary WORD` prints one,",
             "in a notebook `print(explain(\"WORD\"))`, after `from mxdebug.glossary import explain`.",
             "\"Also\" lists other names for it, and words that it explains along the way.", "", index.removesuffix(" ·")]
    for title, entries in GROUPS.items():
        lines += ["", f"## {title}"]
        for e in entries:
            also = [f"Also: {', '.join(e.also)}."] if e.also else []
            source = [f"[{e.source[0]}]({e.source[1]})"] if e.source else []
            lines += ["", f"### {e.word}", "", *textwrap.wrap(e.says, 140, break_on_hyphens=False)]
            lines += ["", " ".join([*also, *source])] if also or source else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
