"""``--transport stream``: exchanges over TCP with a deadline. What has not come by then is lost (docs/transport.md).

``cipher``, ``frames`` and ``session`` have no input or output; ``poller`` is the thread, ``connection`` a socket, ``channel`` the exchanges.
"""
