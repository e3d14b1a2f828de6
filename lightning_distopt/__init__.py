"""Communication-efficient distributed training for PyTorch Lightning.

Importing this package registers its strategies: ``Trainer(strategy="distopt_bagua_bytegrad")``.
"""

from lightning_distopt.algorithms import QAdamOptimizer
from lightning_distopt.callbacks import CommMonitor, InitTorch, MasterOnlyCallback, PeriodicModelSync
from lightning_distopt.strategies import (
    DistOptBaguaStrategy,
    DistOptDDPStrategy,
    DistOptStrategy,
    register_strategies,
)

__all__ = [
    "CommMonitor",
    "DistOptBaguaStrategy",
    "DistOptDDPStrategy",
    "DistOptStrategy",
    "InitTorch",
    "MasterOnlyCallback",
    "PeriodicModelSync",
    "QAdamOptimizer",
]
__version__ = "0.1.0"

register_strategies()
