"""``python -m megatron_lossy.report``: see :mod:`megatron_lossy.lab.report`."""

from megatron_lossy.lab.report.__main__ import main

if __name__ == "__main__":
    main()
