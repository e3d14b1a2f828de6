"""The algorithms. A new one is a file here and a line in ``ALGORITHMS``."""

import difflib
import inspect
from typing import Any

from lightning_distopt.algorithms.allreduce import GradientAllReduce
from lightning_distopt.algorithms.async_average import AsyncModelAverage
from lightning_distopt.algorithms.base import Algorithm, WeightExchange
from lightning_distopt.algorithms.bytegrad import ByteGrad
from lightning_distopt.algorithms.decentralized import Decentralized, LowPrecisionDecentralized
from lightning_distopt.algorithms.local_sgd import DiLoCo, LocalSGD
from lightning_distopt.algorithms.qadam import QAdam, QAdamOptimizer

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AsyncModelAverage",
    "ByteGrad",
    "Decentralized",
    "DiLoCo",
    "GradientAllReduce",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "QAdam",
    "QAdamOptimizer",
    "WeightExchange",
    "did_you_mean",
    "make_algorithm",
]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "gradient_allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "qadam": QAdam,
    "decentralized": Decentralized,
    "low_precision_decentralized": LowPrecisionDecentralized,
    "async": AsyncModelAverage,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
}


def make_algorithm(algorithm: "str | Algorithm", **options: Any) -> Algorithm:
    """Build an algorithm from its name and its options, or pass a ready one through.

    >>> make_algorithm("local_sgd", period=8)
    LocalSGD(period=8, warmup_steps=0)
    >>> make_algorithm("local_sgd", perod=8)
    Traceback (most recent call last):
    ValueError: unknown option 'perod' of local_sgd (did you mean 'period'?); valid are: period, warmup_steps

    Args:
        algorithm: a name in ``ALGORITHMS``, or an instance (then without options).
        **options: arguments of the algorithm's constructor.

    Raises:
        ValueError: unknown name, unknown option, or a value out of range; with the valid ones listed.
        TypeError: a value of the wrong type.
    """
    if isinstance(algorithm, Algorithm):
        if options:
            raise ValueError(
                f"options {sorted(options)} were given beside the instance {algorithm!r}: give them to its constructor"
            )
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be a name or an Algorithm, got {algorithm!r}")
    if algorithm not in ALGORITHMS:
        bare = algorithm.removeprefix("distopt_").removeprefix("bagua_")
        if bare in ALGORITHMS:
            raise ValueError(f"{algorithm!r} is a strategy for the Trainer; the algorithm's name is {bare!r}")
        raise ValueError(f"unknown algorithm {algorithm!r}{did_you_mean(algorithm, ALGORITHMS)}")
    cls = ALGORITHMS[algorithm]
    valid = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in valid:
            raise ValueError(f"unknown option {option!r} of {algorithm}{did_you_mean(option, valid)}")
    return cls(**options)


def did_you_mean(name: str, valid: "dict[str, Any] | list[str]") -> str:
    """Return the rest of a message about a name that is not valid: the closest valid one, and all of them."""
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{hint}; valid are: {', '.join(valid)}" if valid else "; it has none"
