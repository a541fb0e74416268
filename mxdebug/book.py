"""The catalogue of faults as a book: one page for people, made from the records and from what `mxdebug confusion` measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from .confusion_files import measured_files, strikes, table_files
from .evidence import CONSISTENT, KINDS, OF_RUNS, OUTCOMES, PROVED, best, measured, table
from .faults import FAULTS, LINEAR_FAULTS, fault
from .faults.families import FAMILIES
from .scan.catalogue import RULES

# What `mxdebug scan` finds in the files of a checkpoint in which a fault is, or on which some backend will have it: fault id -> the scan's rule.
FILES = {
    "global-shared-by-halves": "w13-differ",
    "global-shared-by-parts": "joined-differ",
    "group-32-as-16": "group-size",
    "global-folded-into-blocks": "fold-e4m3",
    "scales-small-flushed": "e8m0-fp16",
    "scales-flushed": "marlin-flush",
    "global-not-loaded": "global-bad",
    "scales-cast-by-value": "scale-cast",
    "scales-nan": "scale-nan",
    "operand-not-loaded": "payload-zero",
    "padding-at-end": "path-pads",
    "padding-not-zero": "path-pads",
    "experts-stride": "path-pads",
}


# Where a report's number is looked up; a repository that is not here stays text.
REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "sglang": "sgl-project/sglang",
    "flashinfer": "flashinfer-ai/flashinfer",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "Model-Optimizer": "NVIDIA/Model-Optimizer",
    "cutlass": "NVIDIA/cutlass",
    "torchao": "pytorch/ao",
    "triton": "triton-lang/triton",
    "transformers": "huggingface/transformers",
    "aiter": "ROCm/aiter",
    "compressed-tensors": "vllm-project/compressed-tensors",
    "llm-compressor": "vllm-project/llm-compressor",
}
SHARED = 3  # so many records of a chapter with one line: it stands once, before them

WORDS = """\
- *strikes* names the operands that a fault can be in: `w13` gate and up in one tensor, `w2` down, each with `_scale` (block scales) and `_bias`.
- `w13_alpha`, `w2_alpha`: one number an expert, the weight's global scale times that of its activations. `a2_gscale`: what the kernel multiplies the
  inner activation with before it quantises it to NVFP4. `g1_scale_c`: TRT-LLM's one number for both, alpha times `a2_gscale` (without gate `a2_gscale` alone).
- *Not 16 scale columns for 128x4*: with exactly 16 columns of scales the swizzle in tiles of 128 x 4 is its own inverse, so doing it and
  undoing it give the same bytes.
- A *slot* of a token is one of its top-k places for an expert.
- *Evidence* is what proves or shows a fault at best, on any path: *converted weights*, *a call alone*, *call and checkpoint*, *two calls*, *the files alone*.
- All other words: [glossary](../notebooks/glossary.md)."""


def linked(report: str) -> str:
    """A report such as "vllm#51038" as Markdown; GitHub leads from issues/N to the pull request of that number."""
    name, _, number = report.partition("#")
    return f"[{report}](https://github.com/{REPOSITORIES[name]}/issues/{number})" if name in REPOSITORIES else report


def evidence(id: str) -> list[tuple[str, str]]:
    """(kind of evidence, how far it gets at best), for every kind that is about this fault."""
    out = [("the files alone", f"scan finds {FILES[id]} ({RULES[FILES[id]].severity})")] if id in FILES else []
    out += [(KINDS[kind], outcome.does) for kind, outcome in best(id, linear=False).items()]
    if FAULTS[id].strikes == ("calls",):
        out.append(("two calls", OUTCOMES[PROVED].does))
    linear = {**KINDS, "together": "run and checkpoint"} if id in OF_RUNS else KINDS
    out += [(f"a linear layer's {linear[kind].removeprefix('a ')}", outcome.does) for kind, outcome in best(id, linear=True).items()]
    return out


def record(id: str) -> Iterator[tuple[str, str]]:
    """(label, text) of one record."""
    f = fault(id)
    linear = LINEAR_FAULTS.get(f.id)
    strikes = [", ".join(f.strikes)] if f.strikes not in (("linear",), ("calls",)) else []
    if f.strikes == ("calls",):
        strikes.append("two calls of one kernel")
    if linear is not None or f.strikes == ("linear",) or best(f.id, linear=True):
        strikes.append("linear layers: " + (", ".join(linear.strikes) if linear is not None else "the layer's call"))
    yield "fault", f"{f.id}: {f.title}"
    yield "strikes", "; ".join(strikes)
    yield "proved by", f.gives_away
    yield "shows on", f.needs
    yield "evidence", "; ".join(f"{kind}: {how}" for kind, how in evidence(f.id)) or "none by itself"
    yield "fix", f.fix
    yield "reports", ", ".join(f.reports) or "none"


def markdown() -> str:
    """The whole book."""
    lines = [
        "# What goes wrong: the catalogue of faults",
        "",
        "Made from the records by `mxdebug faults --book`. Each fault can be put into a made call (`inject`) and is recognised by the evidence named; "
        "`mxdebug confusion` prints which evidence names which fault on which path, and the table stands at the end.",
        "",
        WORDS,
        "",
    ]
    for chapter in FAMILIES:
        lines += [f"## {chapter.title}", "", chapter.about, ""]
        records = {id: dict(record(id)) for id in chapter.ids}
        shared = _shared(records.values())
        if shared:
            lines += ["Where an entry does not say otherwise:", "", *(f"- **{label}** {text}" for label, text in shared.items()), ""]
        for id, parts in records.items():
            parts["reports"] = ", ".join(map(linked, FAULTS[id].reports)) or "none"
            lines += [f"### {id}", "", f"{_sentence(FAULTS[id].title)}", ""]
            lines += [
                f"- **{label}** {parts[label]}"
                for label in ("strikes", "proved by", "shows on", "evidence", "fix", "reports")
                if parts[label] not in ("none", shared.get(label))
            ] + [""]
    lines += [
        "## The files themselves",
        "",
        "What `mxdebug scan CHECKPOINT` finds. *Broken*: engines load garbage, or refuse the file. *Suspicious*: some engine will compute "
        "other numbers than the file means. *Note*: no fault of the file, but what only some backends or tensor-parallel degrees do to it. "
        "Each can be put into a small checkpoint (`mxdebug.scan.injections`) of the kinds that it strikes; `mxdebug confusion --files` does so, "
        "and the table after the list is what it printed.",
        "",
    ]
    for r in RULES.values():
        lines += [
            f"- **{r.id}** ({r.severity}) {_sentence(r.title)} {_sentence(r.means)} Strikes: {strikes(r.id)}. Fix: {r.fix}."
            + (f" Reports: {', '.join(map(linked, r.reports))}." if r.reports else "")
        ]
    lines += ["", "```text", table_files(measured_files()), "```"]
    lines += ["", "## Which evidence names which fault", "", "```text", table(measured()), "```"]
    return "\n".join(lines)


def _shared(records: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """label -> the text that most of these records have under it, where at least `SHARED` do."""
    records, out = list(records), {}
    for label in ("proved by", "shows on", "fix"):
        text, count = Counter(r[label] for r in records).most_common(1)[0]
        if count >= SHARED:
            out[label] = text
    return out


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def contents() -> str:
    """The chapters: how many faults, how many of them each kind of evidence names (proved or consistent) on some path. At most 88 columns."""
    lines = [f"{'':<29}faults  files  weights  call  both  two calls"]
    for chapter in FAMILIES:
        named = [sum(best(id).get(kind) in (OUTCOMES[PROVED], OUTCOMES[CONSISTENT]) for id in chapter.ids) for kind in KINDS]
        two = sum(FAULTS[id].strikes == ("calls",) for id in chapter.ids)
        numbers = (sum(id in FILES for id in chapter.ids), *named, two)
        cells = "".join(f"{n or '.':>{w}}" for n, w in zip(numbers, (7, 9, 6, 6, 11)))
        lines.append(f"{chapter.title:<29}{len(chapter.ids):>6}{cells}")
    return "\n".join(lines)
