"""``python -m megatron_lossy.data``: see :mod:`megatron_lossy.lab.data`."""

from megatron_lossy.lab.data.__main__ import main

if __name__ == "__main__":
    main()
