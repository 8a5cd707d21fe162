"""AES-128-GCM of libcrypto, for frames of hundreds of kilobytes.

The calls keep Python's lock: a frame takes less time than it takes to get the lock back.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
from functools import cache

from ...base.errors import refuse
from ..udp.session import NO_CIPHER, TAG_BYTES

#: Frames that are sealed with one key; the next key is derived from it. RFC 8446, section 5.5, allows 2^24.5 records of 2^14 bytes.
_FRAMES_OF_KEY = 2**20
_SET_TAG, _GET_TAG = 0x11, 0x10


@cache
def _library() -> ctypes.PyDLL:
    """Return the library. Raise :class:`UsageError` without one."""
    for name in ("libcrypto.so.3", "libcrypto.so.1.1"):
        try:
            lib = ctypes.PyDLL(name)
        except OSError:
            continue
        pointer, number = ctypes.c_void_p, ctypes.c_int
        for name, result, *arguments in (
            ("EVP_CIPHER_CTX_new", pointer),
            ("EVP_CIPHER_CTX_free", None, pointer),
            ("EVP_aes_128_gcm", pointer),
            ("EVP_CIPHER_CTX_ctrl", number, pointer, number, number, pointer),
            ("EVP_CipherInit_ex", number, pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_char_p, number),
            ("EVP_CipherUpdate", number, pointer, pointer, ctypes.POINTER(number), pointer, number),
            ("EVP_CipherFinal_ex", number, pointer, pointer, ctypes.POINTER(number)),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        return lib
    raise refuse("--transport", "stream", NO_CIPHER)


class Cipher:
    """One direction of a connection. Frames are numbered from 0, which is their nonce. ``sealing``: or opening."""

    tag_bytes = TAG_BYTES

    def __init__(self, key: bytes, sealing: bool) -> None:
        self._lib, self._key, self._sealing = _library(), key, sealing
        self._context = self._lib.EVP_CIPHER_CTX_new()
        if not self._context:
            raise MemoryError("a context of libcrypto")
        self._frames = 0
        self._count = ctypes.c_int()
        self._start(self._lib.EVP_aes_128_gcm(), key)

    def _start(self, cipher: int | None, key: bytes | None, nonce: bytes | None = None) -> None:
        self._done(self._lib.EVP_CipherInit_ex(self._context, cipher, None, key, nonce, int(self._sealing)))

    def _done(self, result: int) -> None:
        if result != 1:
            raise MemoryError("libcrypto failed")

    def _pass(self, header: int, header_bytes: int, source: int, size: int, into: int) -> None:
        if self._frames and self._frames % _FRAMES_OF_KEY == 0:
            self._key = hmac.digest(self._key, b"next", hashlib.sha256)[:16]
            self._start(None, self._key)
        self._start(None, None, self._frames.to_bytes(12, "little"))
        self._frames += 1
        count = ctypes.byref(self._count)
        self._done(self._lib.EVP_CipherUpdate(self._context, None, count, header, header_bytes))
        if size:
            self._done(self._lib.EVP_CipherUpdate(self._context, into, count, source, size))

    def seal(self, header: int, header_bytes: int, source: int, size: int, into: int) -> None:
        """Encrypt ``size`` bytes at ``source`` to ``into``, with the tag behind them. Arguments are addresses."""
        self._pass(header, header_bytes, source, size, into)
        self._done(self._lib.EVP_CipherFinal_ex(self._context, into + size, ctypes.byref(self._count)))
        self._done(self._lib.EVP_CIPHER_CTX_ctrl(self._context, _GET_TAG, TAG_BYTES, into + size))

    def open(self, header: int, header_bytes: int, data: int, size: int) -> bool:
        """Decrypt ``size`` bytes at ``data`` in place; the tag is behind them. Return whether it is authentic."""
        self._pass(header, header_bytes, data, size, data)
        self._done(self._lib.EVP_CIPHER_CTX_ctrl(self._context, _SET_TAG, TAG_BYTES, data + size))
        return bool(self._lib.EVP_CipherFinal_ex(self._context, data + size, ctypes.byref(self._count)) == 1)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._lib.EVP_CIPHER_CTX_free(self._context)


class NoCipher:
    """``--udp-key-file none``: the same without encryption or tag."""

    tag_bytes = 0

    def seal(self, header: int, header_bytes: int, source: int, size: int, into: int) -> None:
        ctypes.memmove(into, source, size)

    def open(self, header: int, header_bytes: int, data: int, size: int) -> bool:
        """Leave the bytes as they are."""
        return True
