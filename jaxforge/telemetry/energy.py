"""Energy of NVIDIA GPUs, read from their driver by NVML (`metrics.log_energy`).

The counters of the driver run from its start, so differences of two readings are the energy of an
interval (Megatron's `EnergyMonitor`).
"""

import importlib
import logging
import os

import jax

from jaxforge.errors import UserError

log = logging.getLogger(__name__)


class EnergyMeter:
    """Energy counter of the GPUs of this process.

    Raises:
        UserError: NVML or GPUs are missing, or a GPU has no counter.
    """

    def __init__(self) -> None:
        platform = jax.local_devices()[0].platform
        if platform != "gpu":
            raise UserError(
                f"metrics.log_energy = true needs NVIDIA GPUs, but the devices are {platform}s. "
                "Set metrics.log_energy = false"
            )
        try:
            self._nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            raise UserError(
                "metrics.log_energy = true needs pynvml: pip install nvidia-ml-py, or set "
                "metrics.log_energy = false"
            ) from None
        self._last = 0.0
        try:
            self._nvml.nvmlInit()
            self._handles = [self._handle(device) for device in jax.local_devices()]
            self._read()
        except self._nvml.NVMLError as error:
            raise UserError(
                f"metrics.log_energy = true, but the energy of the GPUs cannot be read: {error}. "
                "Set metrics.log_energy = false"
            ) from None

    def joules(self) -> float:
        """Return the joules of a GPU so far, as the mean over the GPUs of this process.

        A failed reading is logged, and later energy is 0.
        """
        if self._handles:
            try:
                self._last = self._read()
            except self._nvml.NVMLError as error:
                log.warning("the energy of the GPUs can no longer be read: %s", error)
                self._handles = []
        return self._last

    def _read(self) -> float:
        readings = map(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handles)
        return sum(readings) / 1000 / len(self._handles)  # from millijoules

    def _handle(self, device: jax.Device) -> object:
        """Return the handle of a device. CUDA counts visible GPUs, NVML counts all."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = device.local_hardware_id
        name = visible.split(",")[index].strip() if visible else str(index)
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)
