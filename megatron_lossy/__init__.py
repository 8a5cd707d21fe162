"""megatron-lossy: data-parallel training with Megatron over networks that lose data."""

import os

__version__ = "0.1.0"

#: The commands of the lab keep short names: ``python -m megatron_lossy.train``. Nothing else of the package needs the lab.
__path__.append(os.path.join(__path__[0], "lab", "commands"))
