"""A kernel that stands in for a model: the driver compiles it for whatever GPU there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bertserve.serving.engine.gpu.cuda import Device


ADD_ONE = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry add_one(.param .u64 values)
{
    .reg .b64 %address, %offset;
    .reg .b32 %lane;
    .reg .f32 %value;
    ld.param.u64 %address, [values];
    mov.u32 %lane, %tid.x;
    mul.wide.u32 %offset, %lane, 4;
    add.u64 %address, %address, %offset;
    ld.global.f32 %value, [%address];
    add.f32 %value, %value, 0f3F800000;
    st.global.f32 [%address], %value;
    ret;
}
\0"""
"""A kernel that stands in for a model: the driver compiles it for whatever GPU there is."""


def kernel(device: Device) -> Any:
    """What queues the kernel over 32 numbers at an address."""
    from cuda.bindings import driver  # noqa: PLC0415  only where there is a GPU

    _, module = driver.cuModuleLoadData(ADD_ONE)
    status, function = driver.cuModuleGetFunction(module, b"add_one")
    assert int(status) == 0

    def queue(address: int) -> None:
        values = np.array([address], np.uint64)
        pointers = np.array([values.ctypes.data], np.uint64)
        (status,) = driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, device.stream, pointers.ctypes.data, 0)
        assert int(status) == 0

    return queue
