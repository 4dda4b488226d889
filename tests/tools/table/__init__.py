"""The tables of TorchRL's collectors and trainers in docs/compatibility.md, made from what happens.

`python -m tests.tools.table` observes every row and writes the table. tests/torchrl_plugin/test_table.py does
it again and compares.
"""
