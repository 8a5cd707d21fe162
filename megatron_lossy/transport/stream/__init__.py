"""``--transport stream``: exchanges over TCP with a deadline. Units that arrive later are lost (docs/transport.md).

``cipher`` and ``frames`` have no input or output; ``host`` has the thread, ``connection`` a socket, ``channel`` the exchanges.
"""
