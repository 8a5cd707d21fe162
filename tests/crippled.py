"""``python -m tests.crippled CRIPPLE MODULE arguments…``: ``python -m MODULE`` on a machine that lacks something.

``bytes=N``: no file may be longer, which fails as a full disk does, but for the word. ``without=PACKAGE``.
"""

import resource
import runpy
import sys

if __name__ == "__main__":
    what, _, value = sys.argv[1].partition("=")
    if what == "bytes":
        sys.dont_write_bytecode = True  # a file of bytecode that ends too early stays
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(value), resource.RLIM_INFINITY))
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == value]:
            del sys.modules[name]
        sys.modules[value] = None
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
