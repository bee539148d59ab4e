"""Which rank takes which bag."""

import heapq
from collections.abc import Sequence


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Numbers of bags by rank, so that the sums of their costs are about equal.

    The costliest bag first, each to the rank that has least so far (Graham, "Bounds on multiprocessing timing
    anomalies", 1969: at most 4/3 - 1/(3 parts) of the best maximum). Ties go to the lower number and the lower rank.

    Returns:
        One ascending list for each rank; lists may be empty. O(n log n) for n bags.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, part = loads[0]
        shares[part].append(number)
        heapq.heapreplace(loads, (load + costs[number], part))
    return [sorted(share) for share in shares]
