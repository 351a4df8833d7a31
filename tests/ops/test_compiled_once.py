"""For what Triton compiles a kernel anew."""

import os
import subprocess
import sys

# In a process of its own: in this one, kernels are interpreted and have no such properties.
PROGRAM = """
import importlib
from triton.runtime.jit import JITFunction
from interlayer.ops._triton.map_shape import SIZES

for name in ("light_layer_forward", "light_layer_gradients", "base_layer_values", "base_layer_gradients"):
    module = importlib.import_module(f"interlayer.ops._triton.{name}")
    functions = [each for each in vars(module).values() if isinstance(each, JITFunction)]
    for kernel in (each for each in functions if each.fn.__name__.endswith("_kernel")):
        for parameter in kernel.params:
            if parameter.name in SIZES:
                print(kernel.fn.__name__, parameter.name, parameter.do_not_specialize_on_alignment)
"""


def test_kernels_are_not_compiled_anew_for_every_size_of_images():
    """A detector trains on images of a dozen sizes, and every variant of a kernel takes about a second to compile."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True
    )
    found = [line.split() for line in result.stdout.splitlines()]
    assert {"attention_kernel", "gradient_kernel", "finish_kernel", "values_kernel"} <= {kernel for kernel, *_ in found}
    assert [(kernel, size) for kernel, size, ignored in found if ignored != "True"] == []
