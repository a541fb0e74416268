"""Which of them is it? Evidence from checkpoint, operands and output of one call; findings as records."""

from .diagnose import diagnose
from .finding import CONSISTENT, PROVED, SUSPECTED, Diagnosis, Finding, render
from .recover import Recovered, Source, recover

__all__ = ["CONSISTENT", "PROVED", "SUSPECTED", "Diagnosis", "Finding", "Recovered", "Source", "diagnose", "recover", "render"]
