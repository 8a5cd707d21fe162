"""``python -m megatron_lossy.train``: see :mod:`megatron_lossy.lab.train`."""

from megatron_lossy.lab.train.__main__ import main

if __name__ == "__main__":
    main()
