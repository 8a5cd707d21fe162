"""``python -m megatron_lossy.launch``: see :mod:`megatron_lossy.lab.launch`."""

from megatron_lossy.lab.launch.__main__ import main

if __name__ == "__main__":
    main()
