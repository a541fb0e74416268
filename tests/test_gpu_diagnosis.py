"""On any CUDA GPU: a diagnosis there says what it says on the CPU, for every fault of a call of experts, each on two of its paths. `pytest tests -k gpu`."""

from __future__ import annotations

import pytest
import torch

from mxdebug.confusion import PATHS, injected
from mxdebug.diagnosis import Diagnosis, diagnose
from mxdebug.errors import MxdebugError
from mxdebug.evidence import measured
from mxdebug.faults import FAULTS, Fault
from mxdebug.reference import Parallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="not run here: needs CUDA")]


def said(d: Diagnosis) -> object:
    """Everything but the last digits of what a BLAS added."""
    return d.verdict, [(f.id, f.strength, f.where, f.evidence) for f in d.findings], d.operands, d.kernel and d.kernel.bit_identical


def mine(path: str) -> list[Fault]:
    """The faults that are compared on this path: each on two of those that it can strike, in turns."""
    able = {f.id: [p for p in PATHS if f.id in measured()[p]] for f in FAULTS.values()}
    return [f for n, f in enumerate(FAULTS.values()) if path in {able[f.id][(n + i) % len(able[f.id])] for i in (0, 1) if able[f.id]}]


@pytest.mark.parametrize("path", PATHS)
def test_gpu_diagnosis_says_the_same(path: str) -> None:
    assert len(mine(path)) > 15
    for f in mine(path):
        case = injected(f, path)
        assert case is not None, f.id
        s, broken, arguments, _ = case
        call, told = broken.call(), s.recipe.contract.parallel(arguments).tp_size == s.parallel.tp_size
        got, want = [], []
        for out, device in ((got, "cuda"), (want, None)):
            try:
                out.append(said(diagnose(call, s.checkpoint(), tp=None if told else s.parallel, device=device)))
            except MxdebugError as error:
                out.append(str(error))
        assert got == want, f.id
    s = injected(FAULTS["scales-linear"], path)[0]
    assert s.parallel == Parallel() and diagnose(s.call(), s.checkpoint(), device="cuda").verdict == "right"
