"""What makes the host wait for a device, counted on a CPU: values that Python reads, and shapes that depend on values."""

from __future__ import annotations

import collections

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: How Python reads a tensor's values.
_READS = ("__bool__", "__float__", "__int__", "__index__", "item", "numpy", "tolist")
#: Their results are as long as something is often true.
_COUNTED = ("aten.masked_select", "aten.nonzero", "aten.unique")


class Waits(TorchDispatchMode):
    """A context in which ``found`` counts what waits, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()
        self._originals = {}

    def __enter__(self):
        for name in _READS:
            self._originals[name] = original = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._counting(name, original))
        return super().__enter__()

    def __exit__(self, *error):
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, original)
        return super().__exit__(*error)

    def _counting(self, name, original):
        def read(tensor, *args, **kwargs):
            self.found[name] += 1
            return original(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        if name.startswith(_COUNTED) or any(one is not None and one.dtype == torch.bool for one in indices):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))
