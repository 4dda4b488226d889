"""From the words of a command line to a checked config: composition, refusals, trust."""
