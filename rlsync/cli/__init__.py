"""Floor 7, one verb a file: imports hydra, rich, matplotlib and every floor below.

A ``ConfigError`` of a verb is a wrong command line or config, told in three lines, with exit status 2.
"""
