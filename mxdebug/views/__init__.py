"""What does it look like? Every view is a function that returns data and a function that draws it."""

from . import html  # registers how a Diagnosis looks in a notebook

__all__ = ["html"]
