"""How likely chance alone makes the means of two groups differ so much: an exact permutation test, two-sided.

    python benchmarks/permutation.py "2005 1890 2410" "2166 2991 1187 2300"

Each group is the numbers of its runs. Pages of results say "better" and "behind" by it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """The share of all divisions into two such groups whose means differ at least as much as these."""
    numbers, size = [*one, *other], len(one)
    total, rest = sum(numbers), len(other)
    least = abs(fmean(one) - fmean(other)) * (1 - 1e-9)  # sums are rounded
    differences = [
        abs(part / size - (total - part) / rest) for part in map(sum, combinations(numbers, size))
    ]
    return sum(difference >= least for difference in differences) / len(differences)


def main() -> int:
    one, other = (list(map(float, words.split())) for words in sys.argv[1:])
    print(
        f"means {fmean(one):g} of {len(one)}, {fmean(other):g} of {len(other)}: p = {p_value(one, other):.3g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
