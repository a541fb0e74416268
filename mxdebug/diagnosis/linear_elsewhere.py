"""What a diagnosis of a linear layer leaves open, looked up in the rest of the checkpoint: another rank's slice, another layer's operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..checkpoints import Checkpoint
from ..contracts import LinearContract
from ..errors import MxdebugError
from ..faults import FAULTS
from ..recipes.w4a16.recipe import linear_recipe
from .finding import CRASHED, PROVED, RIGHT, UNDECIDED, UNEXPLAINED, WRONG, Diagnosis, Finding
from .linear_locate import Located, same_part
from .linear_operands import KEYS, RELATIVE, converted, memory

MOST = 400  # layers of that size that are looked through


def besides(
    d: Diagnosis,
    located: Located,
    tp: tuple[int, int] | None,
    contract: LinearContract,
    arguments: Mapping[str, object],
    checkpoint: Checkpoint,
) -> Diagnosis:
    """The diagnosis, with what the place of the weight says, and with operands of other layers named."""
    findings, open_ = list(d.findings), [*([located.note] if located.note else []), *d.open]
    if located.other_rank and tp is not None:
        findings.append(
            Finding(
                FAULTS["wrong-tp-slice"],
                PROVED,
                contract.operand("weight").title,
                f"the rows are those of {located.chosen.name}; stated is rank {tp[1]} of {tp[0]}",
                advice="cut payload, block scales and bias of each part with the rank of the process that runs it",
            )
        )
    lost = d.verdict == UNEXPLAINED and "follow" not in d.summary
    if lost or any(f.id == "global-other" for f in findings):
        found = _elsewhere(located, contract, arguments, checkpoint)
        if found:
            findings = [f for f in findings if f.id != "global-other" or "alpha" not in found]
            by_layer: dict[str, list[str]] = {}
            for key, name in found.items():
                by_layer.setdefault(name, []).append(contract.operand(key).title)
            findings += [
                Finding(FAULTS["operand-of-another-layer"], PROVED, ", ".join(titles), f"equal {name}'s")
                for name, titles in by_layer.items()
            ]
            open_ = [t for t in open_ if not any(t.startswith(contract.operand(key).title + ":") for key in found)]
    if findings == list(d.findings) and open_ == list(d.open):
        return d
    verdict, summary = d.verdict, d.summary
    if findings != list(d.findings) and verdict in (RIGHT, UNDECIDED, UNEXPLAINED, WRONG):
        left = [t for t in open_ if "no known change of the checkpoint gives the bytes" in t]
        verdict = UNEXPLAINED if left or (d.verdict == UNEXPLAINED and not lost) else WRONG
        summary = "; ".join(f.title for f in findings) + (
            "; besides, what the recipe does not make of this checkpoint and no known fault explains" if verdict == UNEXPLAINED else ""
        )
    elif verdict == CRASHED and findings != list(d.findings):
        summary = "inputs without outputs: the call did not return. " + "; ".join(f.title for f in findings)
    return replace(d, verdict=verdict, summary=summary, findings=tuple(findings), open=tuple(open_))


def _elsewhere(located: Located, contract: LinearContract, arguments: Mapping[str, object], checkpoint: Checkpoint) -> dict[str, str]:
    """Operand key -> the other layer (or rank) whose operand it is, for operands that are not the located layer's own."""
    chosen = located.chosen
    right = linear_recipe(contract.path, chosen.kind).plan(chosen.layer)
    got = {key: memory(t) for key in KEYS if (t := contract.get(key, arguments)) is not None and contract.operand(key).takes(t.dtype)}
    wanted = {key for key, t in got.items() if not _same(t, memory(converted(right, key, chosen.layer)))}
    alpha, out = contract.get("alpha", arguments), {}
    number = torch.ones(1) if alpha is None else alpha.float().reshape(-1)[:1].cpu()
    if not torch.allclose(number, right.global_scale(chosen.layer), rtol=RELATIVE, atol=0.0):
        wanted.add("alpha")
    names = [name for name in checkpoint.linear_names if name.rpartition(".")[2] == chosen.name.partition(" ")[0].rpartition(".")[2]][:MOST]
    for name in names:
        for part in same_part(checkpoint.linear(name), chosen):
            if part.name == chosen.name or not wanted - out.keys():
                continue
            try:
                plan = linear_recipe(contract.path, part.kind).plan(part.layer)
                for key in sorted(wanted - out.keys()):
                    if (
                        torch.allclose(number, plan.global_scale(part.layer), rtol=RELATIVE, atol=0.0)
                        if key == "alpha"
                        else _same(got[key], memory(converted(plan, key, part.layer)))
                    ):
                        out[key] = part.name
            except MxdebugError:
                continue
    return out


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
