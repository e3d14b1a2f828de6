"""What holds for every test: one thread per rank, the loopback network, and nothing left behind."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

# Gloo would otherwise pick the interface of the host's name, which need not be reachable.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
torch.set_num_threads(1)

# Set by pytest itself, or once for all by the first use of a library.
_MAY_CHANGE = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves an environment variable, a default group or a thread behind."""
    environ = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    leaks = []
    changed = {name for name in {*environ, *os.environ} - _MAY_CHANGE if environ.get(name) != os.environ.get(name)}
    if changed:
        leaks.append(f"environment variables {sorted(changed)}")
        os.environ.clear()
        os.environ.update(environ)
    if dist.is_initialized():
        leaks.append("the default process group")
        dist.destroy_process_group()
    deadline = time.monotonic() + 2
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        leaks.append(f"threads {sorted(thread.name for thread in left)}")
    if leaks:
        pytest.fail(f"the test left behind: {'; '.join(leaks)}", pytrace=False)
