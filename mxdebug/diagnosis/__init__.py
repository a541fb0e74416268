"""Which of them is it? Evidence from checkpoint, operands and output of one call; findings as records."""

from .diagnose import diagnose
from .finding import CONSISTENT, PROVED, SUSPECTED, Diagnosis, Finding, render
from .linear import diagnose_run
from .recover import Recovered, Source, recover

__all__ = ["CONSISTENT", "PROVED", "SUSPECTED", "Diagnosis", "Finding", "Recovered", "Source", "diagnose", "diagnose_run", "recover", "render"]
