"""Communication-efficient distributed training for PyTorch Lightning.

Importing this package registers its strategies: ``Trainer(strategy="distopt_bagua_bytegrad")``.
"""

from lightning_distopt.algorithms import QAdamOptimizer
from lightning_distopt.callbacks import CommMonitor, InitTorch, MasterOnlyCallback, PeriodicModelSync
from lightning_distopt.distributed import (
    DistributedRuntimeException,
    get_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    init_torch,
    is_dist,
    is_local_master,
    is_master,
    master_only,
    sync_model,
)
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
    "DistributedRuntimeException",
    "InitTorch",
    "MasterOnlyCallback",
    "PeriodicModelSync",
    "QAdamOptimizer",
    "get_default_distributed_option",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "init_torch",
    "is_dist",
    "is_local_master",
    "is_master",
    "master_only",
    "sync_model",
]
__version__ = "0.1.0"

register_strategies()
