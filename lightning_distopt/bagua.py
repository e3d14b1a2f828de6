"""Adapter to the original Bagua: the same option, run by the installed ``bagua`` package on CUDA and Linux.

Written for its last release, 0.9.2 of March 2023, which predates current torch. The calls made here are checked against
that release's signatures, not against its behaviour.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_distopt.collectives import local_world_size

__all__ = ["BAGUA_ALGORITHMS", "BAGUA_SETTINGS", "convert", "require_bagua"]

# Name of the algorithm, and the module and class in bagua.torch_api.algorithms.
BAGUA_ALGORITHMS = {
    "gradient_allreduce": ("gradient_allreduce", "GradientAllReduceAlgorithm"),
    "bytegrad": ("bytegrad", "ByteGradAlgorithm"),
    "qadam": ("q_adam", "QAdamAlgorithm"),
    "decentralized": ("decentralized", "DecentralizedAlgorithm"),
    "low_precision_decentralized": ("decentralized", "LowPrecisionDecentralizedAlgorithm"),
    "async": ("async_model_average", "AsyncModelAverageAlgorithm"),
}

# Name of the setting, the variable that Bagua reads, and PERSIA's default.
BAGUA_SETTINGS: dict[str, tuple[str, Any]] = {
    "enable_bagua_net": ("LD_LIBRARY_PATH", False),
    "default_bucket_size": ("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024**2),
    "autotune_level": ("BAGUA_AUTOTUNE", 0),
    "bagua_service_port": ("BAGUA_SERVICE_PORT", 29501),
    "autotune_max_samples": ("BAGUA_AUTOTUNE_MAX_SAMPLES", 60),
    "autotune_warmup_time": ("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30),
    "is_output_autotune_log": ("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", False),
    "autotune_sampling_confidence_time": ("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0),
}


class BaguaHandle:
    """What ``model.algorithm`` is when Bagua runs it: the methods of an Algorithm that Bagua has."""

    def __init__(self, model: Any) -> None:
        """Keep the model that Bagua has converted."""
        self._model = model

    def abort(self) -> None:
        """Stop Bagua's background averaging, if the algorithm has any."""
        if hasattr(self._model.bagua_algorithm, "abort"):
            self._model.bagua_algorithm.abort(self._model)

    def resume(self) -> None:
        """Start it again."""
        if hasattr(self._model.bagua_algorithm, "resume"):
            self._model.bagua_algorithm.resume(self._model)

    def finish(self) -> None:
        """Stop what runs in the background. Bagua itself never averages replicas at the end."""
        self.abort()


def require_bagua() -> Any:
    """Return ``bagua.torch_api``.

    Raises:
        RuntimeError: this is not Linux, there is no CUDA device, or the package is missing; says which.
    """
    remedy = "use engine='torch', which needs neither Bagua nor CUDA"
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"engine='bagua' runs on Linux only, and this is {sys.platform}: {remedy}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"engine='bagua' needs a CUDA device, and torch finds none: {remedy}")
    try:
        return importlib.import_module("bagua.torch_api")
    except ImportError as error:
        raise RuntimeError(
            f"engine='bagua' needs the package bagua, which cannot be imported ({error}): "
            f"pip install 'lightning-distopt[bagua]' (Linux on x86-64, Python up to 3.10), or {remedy}"
        ) from error


def convert(
    api: Any,
    name: str,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    algorithm_options: Mapping[str, Any],
    optimizer_options: Mapping[str, Any],
    settings: Mapping[str, Any],
    master_addr: str,
    master_port: int,
    device_id: int,
) -> tuple[Any, torch.optim.Optimizer]:
    """Let Bagua convert a model. The default process group exists; Bagua makes its own beside it, once per process.

    Args:
        api: what :func:`require_bagua` returned.
        name: of the algorithm.
        model: on its GPU; changed in place.
        optimizer: may be None for qadam, which makes its own and does not use this one.
        algorithm_options: arguments of the algorithm.
        optimizer_options: arguments of Bagua's QAdamOptimizer.
        settings: PERSIA's settings, by their names in ``BAGUA_SETTINGS``.
        master_addr: for Bagua's service.
        master_port: for Bagua's service.
        device_id: the GPU of this process.

    Returns:
        The model and the optimizer to use from now on.
    """
    os.environ.update(_environment(settings, master_addr, master_port, device_id))
    if api.communication._default_pg is None:  # Bagua refuses to be started twice, and has no public name for this
        # With a store of its own it would meet at env:// once more, and wait there for 30 minutes.
        api.init_process_group(store=dist.distributed_c10d._get_default_store())
    # "auto" is ours; Bagua then uses its own default.
    options = {key: value for key, value in algorithm_options.items() if value != "auto"}
    module_name, class_name = BAGUA_ALGORITHMS[name]
    module = importlib.import_module(f"{api.__name__}.algorithms.{module_name}")
    if name == "qadam":
        # PERSIA asserted here on a variable that it had just set to None.
        optimizer = module.QAdamOptimizer(model.parameters(), **optimizer_options)
        algorithm = module.QAdamAlgorithm(optimizer, **options)
    else:
        algorithm = getattr(module, class_name)(**options)
    assert optimizer is not None
    converted = model.with_bagua([optimizer], algorithm)
    converted.algorithm = BaguaHandle(converted)
    return converted, optimizer


def _environment(settings: Mapping[str, Any], master_addr: str, master_port: int, device_id: int) -> dict[str, str]:
    """Return the variables that Bagua reads, as PERSIA set them, and the ranks."""
    values = {name: settings.get(name, default) for name, (_, default) in BAGUA_SETTINGS.items()}
    variables = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "WORLD_SIZE": str(dist.get_world_size()),
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(device_id)),
        "LOCAL_WORLD_SIZE": str(local_world_size(dist.get_world_size())),
    }
    variables.update((BAGUA_SETTINGS[name][0], str(value)) for name, value in values.items())
    # Bagua takes any text for true, "0" and "False" as well.
    variables["BAGUA_IS_OUTPUT_AUTOTUNE_LOG"] = "1" if values["is_output_autotune_log"] else ""
    del variables["LD_LIBRARY_PATH"]
    if values["autotune_level"] > 0:
        variables["AUTO_TUNE_SERVER_ADDR"] = f"{master_addr}:{values['bagua_service_port']}"
    if values["enable_bagua_net"]:
        spec = importlib.util.find_spec("bagua_core")
        if spec is None or spec.origin is None:
            raise RuntimeError("enable_bagua_net=True needs the package bagua_core, which is not installed")
        paths = [str(Path(spec.origin).parent / "data" / "bagua-net"), os.environ.get("LD_LIBRARY_PATH", "")]
        variables["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
    return variables
