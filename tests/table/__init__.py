"""The tables of TorchRL's collectors and trainers in docs/compatibility.md, made from what happens.

`python -m tests.table` observes every row and writes the table. tests/test_table.py observes them again and
compares.
"""
