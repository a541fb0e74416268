"""vLLM's oracles: which backends are asked, in which order, and which is taken."""

from __future__ import annotations

from dataclasses import replace

from ...errors import MxdebugError
from .refusals import judge
from .rules import CT_MXFP4, GPT_OSS_ORACLE, KEY_OF, MOE_EP, NVFP4_ORACLE, OTHER_ORACLE, Rules
from .selection import Considered, Selection
from .setups import Setup
from .versions import rules_of

_Try = tuple[str, tuple[str, ...], str | None]  # a backend, its experts classes, the activation key they are asked with


def _walk(tries: list[_Try], s: Setup, rules: Rules) -> tuple[str | None, tuple[str, ...], list[Considered]]:
    """The first backend that supports the setup, its experts, and a row for each."""
    taken: str | None = None
    experts: tuple[str, ...] = ()
    rows = []
    for backend, classes, key in tries:
        runs, words, source = judge(classes, s, key, rules)
        if taken is not None:
            rows.append(Considered(backend, False, f"comes after {taken}; {'it too ' if runs else ''}{words}", source))
            continue
        if runs:
            taken, experts = backend, runs
        rows.append(Considered(backend, bool(runs), words, source))
    return taken, experts, rows


def _moved(order: tuple[str, ...], backend: str, before: str) -> tuple[str, ...]:
    rest = [b for b in order if b != backend]
    rest.insert(rest.index(before), backend)
    return tuple(rest)


def _order(oracle: str, s: Setup, rules: Rules) -> tuple[str, ...]:
    """The backends in priority order on this SM."""
    order = {GPT_OSS_ORACLE: rules.gpt_oss, OTHER_ORACLE: rules.other, NVFP4_ORACLE: rules.nvfp4_order}[oracle]
    if oracle == GPT_OSS_ORACLE and s.sm in rules.triton_after_marlin:
        order = _moved(order, "TRITON", order[order.index("BATCHED_MARLIN") + 1])
    return _moved(order, "HUMMING", "MARLIN") if s.sm in rules.humming_first else order


def _by_key(backends: tuple[str, ...], key: str | None, rules: Rules) -> tuple[str, ...]:
    """_filter_by_activation."""
    if rules.by_key == "no":
        return backends
    bf16 = tuple(b for b in backends if KEY_OF.get(b) is None)
    if key is None:
        return bf16 or backends
    matching = tuple(b for b in backends if KEY_OF.get(b) == key or b == "EMULATION")
    return matching if rules.by_key == "only" else (*matching, *(b for b in bf16 if b not in matching))


def _ask_mxfp4(oracle: str, s: Setup, key: str | None, rules: Rules) -> tuple[list[_Try], list[Considered], str]:
    """What is tried, what is passed over before that, and why nothing is."""
    asked = s.moe_backend != "auto"
    if asked and s.moe_backend not in rules.asked_mxfp4:
        return [], [], f"moe_backend={s.moe_backend} is not supported for MXFP4 MoE; expected one of {', '.join(sorted(rules.asked_mxfp4))}"
    order = rules.asked_mxfp4[s.moe_backend] if asked else _order(oracle, s, rules)
    if oracle == OTHER_ORACLE or (s.moe_backend == "b12x" and key is None):
        kept = order
    else:
        kept = _by_key(order, key, rules)
    over = [Considered(b, False, f"takes {KEY_OF.get(b) or 'BF16'} activations; {key or 'no quantisation of them'} is asked for",
                       "_filter_by_activation, fused_moe/oracle/mxfp4.py") for b in order if b not in kept]
    if not kept:
        return [], over, f"moe_backend={s.moe_backend} does not support {key} activations"
    tries: list[_Try] = []
    for b in kept:
        if asked and s.batched and b == "MARLIN":
            b = "BATCHED_MARLIN"
        own = KEY_OF.get(b)
        its_key = own if oracle == OTHER_ORACLE else (key or own) if rules.by_key == "no" else key if b == "EMULATION" else own
        classes = rules.mxfp4[b]
        if asked and s.lora and rules.late and b == "FLASHINFER_TRTLLM_MXFP4_BF16":
            classes = ("TrtLlmMxfp4LoRAExperts", *classes)
        tries.append((b, classes, its_key))
    return tries, over, ""


def _ask_nvfp4(s: Setup, rules: Rules) -> tuple[list[_Try], list[Considered], str]:
    unclamped = frozenset() if s.swiglu_limit is None or rules.clamped is None else frozenset(rules.nvfp4) - rules.clamped
    if s.moe_backend == "auto":
        order = _order(NVFP4_ORACLE, s, rules)
        over = [Considered(b, False, "does not apply the SwiGLU clamp, and the model sets swiglu_limit",
                           "NVFP4_BACKENDS_WITH_CLAMP, fused_moe/oracle/nvfp4.py") for b in order if b in unclamped]
        return [(b, rules.nvfp4[b], s.activation_key) for b in order if b not in unclamped], over, ""
    if s.moe_backend not in rules.asked_nvfp4:
        return [], [], f"moe_backend={s.moe_backend} is not supported for NvFP4 MoE; expected one of {', '.join(sorted(rules.asked_nvfp4))}"
    backend = rules.asked_nvfp4[s.moe_backend]
    if s.batched and backend == "FLASHINFER_CUTEDSL":
        backend = "FLASHINFER_CUTEDSL_BATCHED"
    if backend in unclamped:
        return [], [], f"the model sets swiglu_limit, and moe_backend={s.moe_backend} does not apply the SwiGLU clamp"
    return [(backend, rules.nvfp4[backend], s.activation_key)], [], ""


def _compressed_tensors_mxfp4(s: Setup, rules: Rules) -> tuple[str | None, tuple[str, ...], list[Considered], str]:
    """CompressedTensorsW4A4Mxfp4MoEMethod: no oracle, only the device decides; 0.33 checks the choice when the kernel is made."""
    cutlass, source = rules.experts["CutlassExpertsMxfp4"], f"{CT_MXFP4.name}.__init__, {CT_MXFP4.file}"
    native = s.sm in cutlass.sm
    backend, name, key = ("CUTLASS_MXFP4_MXFP4", "CutlassExpertsMxfp4", "mxfp4") if native else ("MARLIN", "MarlinExperts", None)
    reason = f"CutlassExpertsMxfp4 {'runs' if native else 'does not run'} on SM{s.sm}; nothing else is asked"
    rows = [Considered("CUTLASS_MXFP4_MXFP4", native, reason, source),
            Considered("MARLIN", not native, f"comes after {backend}" if native else "the fallback", source)]
    runs, words, _ = judge((name,), s, key, rules) if rules.late else ((name,), "", "")
    if runs:
        return backend, runs, rows, ""
    return None, (), [replace(r, taken=False) for r in rows], f"make_mxfp4_moe_kernel (fused_moe/oracle/mxfp4.py): {name} {words}"


def select(setup: Setup, version: str = "0.33") -> Selection:
    """The path that vLLM takes for a setup, and why not the others.

    A setup that vLLM refuses (an explicit --moe-backend that does not support it, or no backend at all) is an answer too: path is None
    and `refused` holds the reason. Raises MxdebugError for a version whose rules are not known, and for a setup that this version cannot be
    given or that lacks what a rule reads.
    """
    rules, s = rules_of(version), setup
    for name in ("activation", "routing"):
        if getattr(s, name) not in getattr(rules, f"{name}s"):
            raise MxdebugError(f"Setup.{name}", f"one that vLLM {rules.version} has", str(getattr(s, name)), "it came with a later version")
    kinds = [c for q, c in rules.methods if q == s.quantisation and rules.methods[q, c]]
    if s.checkpoint not in kinds:
        raise MxdebugError("Setup.checkpoint", f"for {s.quantisation} one of {', '.join(kinds)}", s.checkpoint, "no method is known for it")
    methods = rules.methods[s.quantisation, s.checkpoint]
    method = next((m for m in methods if s.activation_key in m.keys), None)
    if method is None:
        keys = ", ".join(str(k) for m in methods for k in m.keys)
        raise MxdebugError("Setup.activation_key", f"for {s.checkpoint} in vLLM {rules.version} one of {keys}", str(s.activation_key),
                           f"{methods[0].name} does not ask for it")
    if s.moe_backend not in ("auto", *rules.options):
        raise MxdebugError("Setup.moe_backend", f"auto, {', '.join(sorted(rules.options))}", s.moe_backend,
                           f"not an option of vLLM {rules.version} on NVIDIA GPUs")
    oracle, notes = method.oracle, []
    if not oracle and s.moe_backend in ("b12x", *MOE_EP) and s.moe_backend in rules.asked_mxfp4:
        oracle = GPT_OSS_ORACLE
    file = "nvfp4.py" if oracle == NVFP4_ORACLE else "mxfp4.py"
    if not oracle:
        taken, experts, rows, refused = _compressed_tensors_mxfp4(s, rules)
        if s.moe_backend != "auto":
            notes.append(f"--moe-backend {s.moe_backend} is not read by {method.name}")
    else:
        key = s.activation_key if method.oracle else None
        tries, over, refused = _ask_nvfp4(s, rules) if oracle == NVFP4_ORACLE else _ask_mxfp4(oracle, s, key, rules)
        taken, experts, rows = _walk(tries, s, rules)
        if taken is None and not refused:  # vLLM too reports the last variant of a backend that was asked for
            last = rows[-1]
            refused = "no backend supports the deployment configuration" if s.moe_backend == "auto" else f"{last.backend} {last.reason}"
        rows += over
        if s.moe_backend == "auto":
            rows += _by_name_only(rows, oracle, rules)
    if s.activation_key == "nvfp4_per_token" and taken not in (None, "FLASHINFER_TRTLLM"):
        refused = f"{method.name}: activations per token need FLASHINFER_TRTLLM, {taken} was chosen"
        taken, experts, rows = None, (), [replace(r, taken=False) for r in rows]
    return Selection(s, rules.version, taken and f"{s.quantisation}/{taken}", experts, tuple(rows), f"{method.name} ({method.file})",
                     f"{oracle} (fused_moe/oracle/{file})" if oracle else "no oracle", refused, tuple(notes))


def _by_name_only(rows: list[Considered], oracle: str, rules: Rules) -> list[Considered]:
    """The backends outside the automatic order."""
    asked = {o: (b,) for o, b in rules.asked_nvfp4.items()} if oracle == NVFP4_ORACLE else rules.asked_mxfp4
    seen = {r.backend for r in rows}
    source = "map_nvfp4_backend, fused_moe/oracle/nvfp4.py" if oracle == NVFP4_ORACLE else "map_mxfp4_backend, fused_moe/oracle/mxfp4.py"
    return [Considered(b, False, f"not in the automatic order; --moe-backend {option} asks for it", source)
            for option, backends in asked.items() for b in backends if b not in seen]
