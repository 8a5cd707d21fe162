"""A store with compare-and-swap: four calls, and one client for both backends.

Our coordinator (``tcp://``) answers the three requests of etcd's JSON gateway that these calls need, over mutual TLS. etcd
(``etcd://``) is asked as it is. Values are text; keys begin with the name of the run, which callers do not see.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import datetime
import hashlib
import http.client
import json
import re
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ....base.errors import cannot, check_package, first_line, refuse

PORT = 29510
_FLAG = "--rendezvous"
#: Seconds after which a call has ended, connecting included.
TIMEOUT = 2.0
_URL = re.compile(r"(?P<kind>tcp|etcd)://(?P<hosts>[^/?]+)/(?P<run>[A-Za-z0-9._-]{1,64})(\?access=(?P<access>.+))?")
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:,/\s]+)(:(?P<port>\d{1,5}))?")
#: Errors of a call without a usable answer.
_FAILURES = (OSError, http.client.HTTPException, ValueError, AttributeError, concurrent.futures.TimeoutError)
_T = TypeVar("_T")


class Unreachable(ConnectionError):
    """No usable answer within the timeout. A write may have been made all the same."""


class Store:
    """A store of texts by key, behind etcd's JSON gateway at one of ``hosts``, (name, port); one that does not answer is asked last.

    ``tls``: how to connect; plainly without. ``name``: in the server's certificate, if it is not the host's. ``user``: and password. A
    call without an answer within :data:`TIMEOUT` raises :class:`Unreachable`. Use an object on one thread only.
    """

    def __init__(
        self,
        hosts: list[tuple[str, int]],
        run: str,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        user: tuple[str, str] | None = None,
    ) -> None:
        self._hosts, self._prefix, self._tls, self._name, self._user = list(hosts), f"{run}/", tls, name, user
        self._connection: http.client.HTTPConnection | None = None
        self._token: str | None = None

    def get(self, key: str) -> str | None:
        """Return the value; ``None`` if there is none."""
        found = self._repeat(lambda end: self._range({"key": self._key(key)}, end))
        return next(iter(found.values()), None)

    def list(self, prefix: str) -> dict[str, str]:
        """Return all values whose key begins with ``prefix``, as of one moment, by whole key."""
        first = self._prefix + prefix
        end_key = _code(first[:-1] + chr(ord(first[-1]) + 1))
        return self._repeat(lambda end: self._range({"key": _code(first), "range_end": end_key}, end))

    def put(self, key: str, value: str) -> None:
        """Write the value."""
        self._repeat(lambda end: self._post("kv/put", {"key": self._key(key), "value": _code(value)}, end))

    def put_if(self, key: str, old: str | None, new: str) -> bool:
        """Write ``new`` if the value is ``old`` (``None``: there is none), at once. Return whether that was done.

        ``new`` must differ from the writes of all others, so that a write without an answer can be distinguished from another's.
        """
        there = (
            {"target": "VALUE", "value": _code(old)}
            if old is not None
            else {"target": "CREATE", "create_revision": "0"}
        )
        compare = {"key": self._key(key), "result": "EQUAL", **there}
        body = {"compare": [compare], "success": [{"request_put": {"key": self._key(key), "value": _code(new)}}]}
        unanswered = False

        def attempt(end: float) -> bool:
            nonlocal unanswered
            asked, unanswered = unanswered, True
            if asked and new in (found := self._range({"key": self._key(key)}, end)).values():
                return True
            if asked and next(iter(found.values()), None) != old:
                return False
            written = bool(self._post("kv/txn", body, end).get("succeeded", False))
            # The attempt without an answer may have come through between the look and this one.
            return written or (asked and new in self._range({"key": self._key(key)}, end).values())

        return self._repeat(attempt)

    def _key(self, key: str) -> str:
        return _code(self._prefix + key)

    def _range(self, body: Mapping[str, str], end: float) -> dict[str, str]:
        found = self._post("kv/range", body, end).get("kvs", [])
        return {_text(item["key"])[len(self._prefix) :]: _text(item.get("value", "")) for item in found}

    def _repeat(self, attempt: Callable[[float], _T]) -> _T:
        """Attempt it at each host, and once more where a kept connection may have ended, as long as there is time."""
        end = time.monotonic() + TIMEOUT
        for left in reversed(range(len(self._hosts) + 1)):
            try:
                return attempt(end)
            except Unreachable:
                if not left or time.monotonic() >= end:
                    raise
        raise AssertionError("a loop of one turn at least")

    def _post(self, path: str, body: Mapping[str, Any], end: float) -> dict[str, Any]:
        """Return the first host's answer, asked on a thread of its own, since look-ups of names have no timeout."""
        answer: concurrent.futures.Future[tuple[int, dict[str, Any]]] = concurrent.futures.Future()
        asked = threading.Thread(target=_settle, args=[answer, lambda: self._ask(path, body, end)], daemon=True)
        host, port = self._hosts[0]
        try:
            asked.start()
            status, found = answer.result(max(0.0, end - time.monotonic()))
            if status == 401:
                self._token = None  # of a server that has restarted, or too old
            if status != 200:
                raise OSError(f"status {status}, {found.get('error', 'without a reason')}")
            return found
        except _FAILURES as error:
            self.close()
            self._hosts.append(self._hosts.pop(0))
            why = first_line(error)
            if isinstance(error, ssl.SSLError):
                why = f"it has another key file or certificate ({why})"
            elif isinstance(error, (TimeoutError, concurrent.futures.TimeoutError)):
                why = f"no answer within {TIMEOUT:g} s"
            raise Unreachable(f"{host}:{port}: {why}") from None

    def _ask(self, path: str, body: Mapping[str, Any], end: float) -> tuple[int, dict[str, Any]]:
        """Return status and answer; on the thread."""
        connection = self._connection = self._connection or self._connect(end)
        headers = {}
        if self._user is not None and path != "auth/authenticate":
            if self._token is None:
                name, password = self._user
                status, found = self._ask("auth/authenticate", {"name": name, "password": password}, end)
                if status != 200:
                    return 400, found
                self._token = found["token"]
            headers["Authorization"] = self._token
        if time.monotonic() >= end:  # it is not waited for any more, and must not be done later
            raise TimeoutError
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def _connect(self, end: float) -> http.client.HTTPConnection:
        host, port = self._hosts[0]
        sock = socket.create_connection((host, port), max(1e-3, end - time.monotonic()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(TIMEOUT)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_hostname=self._name or host)
        if time.monotonic() >= end:  # it is not waited for any more
            sock.close()
            raise TimeoutError
        connection = http.client.HTTPConnection(host, port)
        connection.sock, connection.auto_open = sock, 0
        return connection

    def close(self) -> None:
        """End the connection. A later call makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # what is under way on a thread ends with it
            connection.close()


def _settle(answer: concurrent.futures.Future[Any], work: Callable[[], Any]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:
        answer.set_exception(error)


def _code(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogateescape")).decode()


def _text(code: str) -> str:
    return base64.b64decode(code).decode("utf-8", "surrogateescape")


def split_address(text: str, flag: str, default: int = PORT) -> tuple[str, int]:
    """Return host and port of ``text``, HOST or HOST:PORT. Raise :class:`UsageError` about ``flag``."""
    found = _HOST.fullmatch(text)
    port = int(found["port"] or default) if found else 0
    if not found or not 0 <= port < 65536:
        raise refuse(flag, text, "must be HOST:PORT; IPv6 as [::1]:29510")
    return found["host"].strip("[]"), port


def check_url(url: str) -> tuple[list[tuple[str, int]], str, str | None, bool]:
    """Return the hosts of ``url``, the run, the file with the access, and whether they are a coordinator. Raise :class:`UsageError`."""
    found = _URL.fullmatch(url)
    if not found or (found["kind"] == "tcp" and (found["access"] or "," in found["hosts"])):
        raise refuse(_FLAG, url, "must be tcp://HOST:PORT/RUN, or etcd://HOST:PORT,HOST:PORT/RUN")
    ours = found["kind"] == "tcp"
    hosts = [split_address(host, _FLAG, PORT if ours else 2379) for host in found["hosts"].split(",")]
    return hosts, found["run"], found["access"], ours


def open_store(url: str, key: bytes | None) -> Store:
    """Return the store of ``url``: ``tcp://HOST:PORT/RUN`` or ``etcd://HOST:PORT,…/RUN``. Nothing is connected yet.

    ``key``: of the key file, for ``tcp``. ``?access=FILE`` after the name of an etcd: a YAML file with any of user and password, and
    ca, cert and key, which are paths. Raise :class:`UsageError`.
    """
    hosts, run, file, ours = check_url(url)
    if ours:
        if key is None:
            raise refuse(_FLAG, url, "needs the key file that the coordinator has")
        return Store(hosts, run, tls_of(key), NAME)
    access = _access(file) if file else {}
    tls = None
    if "ca" in access:
        try:
            tls = ssl.create_default_context(cafile=access["ca"])
            if "cert" in access:
                tls.load_cert_chain(access["cert"], access.get("key"))
        except OSError as error:  # SSLError is one
            raise refuse(_FLAG, url, f"ca, cert and key of {file}: {first_line(error)}") from None
    user = (access["user"], access.get("password", "")) if "user" in access else None
    return Store(hosts, run, tls, user=user)


def _access(path: str) -> dict[str, str]:
    try:
        found = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise cannot(_FLAG, path, "read", error) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        found = None
    fields = "user", "password", "ca", "cert", "key"
    fits = isinstance(found, dict) and all(name in fields and isinstance(text, str) for name, text in found.items())
    if not fits:
        raise refuse(_FLAG, path, f"must be YAML with any of {', '.join(fields)}, each with text")
    return found


#: The name in the certificate, instead of a host's.
NAME = "megatron-lossy"


def tls_of(key: bytes, server: bool = False) -> ssl.SSLContext:
    """Return the context of a client, or of a server. ``key``: the bytes of the key file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    private, certificate = _certificate(key)
    context.load_verify_locations(cadata=certificate)
    with tempfile.NamedTemporaryFile() as file:  # the library reads files only; this one is its owner's alone, mode 600
        file.write((private + certificate).encode())
        file.flush()
        context.load_cert_chain(file.name)
    return context


@cache
def _certificate(key: bytes) -> tuple[str, str]:
    """Return the private key and its certificate, as PEM: the same bytes wherever the key file is the same."""
    check_package("cryptography", "--key-file", "FILE", "'megatron-lossy[elastic]'")
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"megatron-lossy tls 1" + key).digest())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1))  # a clock that is wrong must not end a run
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, None)
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return private.private_bytes(pem, *form).decode(), certificate.public_bytes(pem).decode()
