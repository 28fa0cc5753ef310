"""verl's platform ``cpu``: the host's memory and generator behind the interface verl expects of an accelerator."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_NOTHING = (
    "empty_cache",
    "synchronize",
    "set_device",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "ipc_collect",
    "set_per_process_memory_fraction",
    # torch.manual_seed already seeds the only generator there is.
    "manual_seed",
    "manual_seed_all",
)


def _device_module() -> types.ModuleType:
    """``torch.cpu`` plus the memory and random-state functions verl calls on ``torch.<device>``."""
    module = types.ModuleType("verl_bridge_cpu_device")
    module.__getattr__ = lambda name: getattr(torch.cpu, name)
    for name in _ZERO:
        setattr(module, name, lambda *args, **kwargs: 0)
    for name in _NOTHING:
        setattr(module, name, lambda *args, **kwargs: None)
    module.mem_get_info = lambda *args: (0, 0)
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: torch.device("cpu")
    module.get_device_name = lambda *args: "cpu"
    module.get_device_properties = lambda *args: types.SimpleNamespace(name="cpu", total_memory=0)
    module.get_device_capability = lambda *args: (None, None)
    module.get_rng_state = lambda *args: torch.get_rng_state()
    module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    return module


class PlatformCPU(PlatformBase):
    """Chosen only by ``VERL_PLATFORM=cpu``, never by detection."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        # A device, not an index: verl calls tensor.to(get_device_id()), and 0 would mean cuda:0.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # verl counts only "GPU" or "NPU" when it places workers: cpu.yaml starts Ray with one logical GPU per rank.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def cudart(self) -> Any:
        return None
