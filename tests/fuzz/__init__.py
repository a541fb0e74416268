"""Hostile and broken input: seeds that are whole, mutators that break them, and a guard that watches what reading them does.

`python -m fuzz --cases 20000 --seed 1` (in tests/) runs the byte-level fuzzer; tests/test_fuzz*.py run a part of it.
"""
