"""A kernel that marks the pixels of a gradient that a ReLU stopped, and finds them again."""

import triton
import triton.language as tl

from interlayer.ops._triton.light_layer_gradients import is_dead, with_dead_pixels
from interlayer.ops._triton.runtime import TYPES, run_kernel


@triton.jit
def _kernel(grads_ptr, alive_ptr, stored_ptr, dead_ptr, ACC: tl.constexpr):  # noqa: N803
    places = tl.arange(0, 8)
    dead = tl.zeros([8], ACC) * -1.0
    alive = tl.load(alive_ptr + places) == 1
    dtype: tl.constexpr = stored_ptr.dtype.element_ty
    stored = with_dead_pixels(tl.load(grads_ptr + places), alive, dead, dtype, ACC).to(dtype)
    tl.store(stored_ptr + places, stored)
    tl.store(dead_ptr + places, is_dead(stored, ACC).to(tl.int32))


def run(grads, alive, stored, dead):
    run_kernel(_kernel, (1,), grads, alive, stored, dead, ACC=TYPES[grads.dtype])
