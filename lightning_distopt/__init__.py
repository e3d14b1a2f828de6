"""Communication-efficient distributed training for PyTorch Lightning.

Importing this package registers its strategies: ``Trainer(strategy="distopt_bagua_bytegrad")``.
"""

from lightning_distopt.algorithms import QAdamOptimizer
from lightning_distopt.callbacks import CommMonitor, InitTorch, MasterOnlyCallback, PeriodicModelSync
from lightning_distopt.options import (
    BaguaDistributedOption,
    DDPOption,
    DistributedBaseOption,
    get_default_distributed_option,
)
from lightning_distopt.strategies import (
    DistOptBaguaStrategy,
    DistOptDDPStrategy,
    DistOptStrategy,
    register_strategies,
)

__all__ = [
    "BaguaDistributedOption",
    "CommMonitor",
    "DDPOption",
    "DistOptBaguaStrategy",
    "DistOptDDPStrategy",
    "DistOptStrategy",
    "DistributedBaseOption",
    "InitTorch",
    "MasterOnlyCallback",
    "PeriodicModelSync",
    "QAdamOptimizer",
    "get_default_distributed_option",
]
__version__ = "0.1.0"

register_strategies()
