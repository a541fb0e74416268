"""What goes wrong? One record per fault: where it strikes, how to inject it, what gives it away, the public report, the fix."""

from __future__ import annotations

import difflib

from ..errors import MxdebugError
from .activation_faults import X_FAULTS
from .call_faults import CALL_FAULTS, INPUT_FAULTS, KERNEL_FAULTS, OUTPUT_FAULTS, PARAMETER_FAULTS, ROUTING_FAULTS, TWO_CALLS_FAULTS
from .cut_faults import CUT_FAULT, cuts_block, split_evenly
from .fault import OPERANDS, QUANTISED_WITH, SCALARS, Fault, KernelChange, Situation
from .linear_faults import LINEAR_FAULTS, LinearFault, linear_fault
from .linear_records import NEW_FAULTS
from .linear_situation import LinearRun, LinearSituation
from .operand_faults import OPERAND_FAULTS
from .scalar_faults import CHECKPOINT_FAULTS, RANK_FAULTS, SCALAR_FAULTS, ScalarFault
from .value_faults import DAMAGE_FAULTS, LAYER_FAULTS, VALUE_FAULTS

FAULTS: dict[str, Fault] = {f.id: f for f in (*OPERAND_FAULTS, *SCALAR_FAULTS, *CHECKPOINT_FAULTS, *RANK_FAULTS, CUT_FAULT, *PARAMETER_FAULTS, *CALL_FAULTS, *ROUTING_FAULTS, *X_FAULTS, *INPUT_FAULTS, *OUTPUT_FAULTS, *KERNEL_FAULTS, *TWO_CALLS_FAULTS, *NEW_FAULTS)}


def fault(id: str) -> Fault:
    """The fault of that id; MxdebugError names the ids that come near where there is none."""
    if id not in FAULTS:
        near = difflib.get_close_matches(id, FAULTS, n=5) or [i for i in FAULTS if id and id in i][:5]
        expected = f"one of {', '.join(near)}" if near else f"one of the {len(FAULTS)} of the catalogue"
        raise MxdebugError("fault", expected, repr(id), ("these come near; " if near else "") + "`mxdebug faults` lists all")
    return FAULTS[id]


__all__ = ["ROUTING_FAULTS", "VALUE_FAULTS", "TWO_CALLS_FAULTS", "RANK_FAULTS", "DAMAGE_FAULTS", "LAYER_FAULTS", "X_FAULTS", "CALL_FAULTS", "CHECKPOINT_FAULTS", "CUT_FAULT", "cuts_block", "split_evenly", "QUANTISED_WITH", "SCALARS", "SCALAR_FAULTS", "ScalarFault", "FAULTS", "INPUT_FAULTS", "KERNEL_FAULTS", "LINEAR_FAULTS", "LinearFault", "LinearRun", "LinearSituation", "linear_fault", "OPERANDS", "OPERAND_FAULTS", "OUTPUT_FAULTS", "PARAMETER_FAULTS", "Fault", "KernelChange", "Situation", "fault"]
