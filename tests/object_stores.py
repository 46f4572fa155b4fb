"""Stand-ins for object stores, on the loopback address only: moto for s3://, gcp-storage-emulator for gs://.

One of each per process, since the packages that read from them keep the address that they found first.
"""

import functools
import os
import socket
import threading
import urllib.parse
from collections.abc import Callable

import pytest

# The files that import this are left out where the extra "test-stores" is not installed.
for package in ("gcsfs", "s3fs", "moto", "gcp_storage_emulator"):
    pytest.importorskip(package, reason="needs the extra lmres[test-stores]")

BUCKET = "bucket"


def _in_background(start: Callable[[], None]) -> None:
    """Starts a server whose thread, as a child of this one, does not keep the process from ending."""
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join()


def _with_generations(handler: type) -> type:
    """The emulator's handler of requests, with what tensorstore relies on and it lacks: the generation of an object is
    told when it is read, and a request for or but for a given generation is answered so."""
    from gcp_storage_emulator.exceptions import NotFound

    class Handler(handler):
        def _serve(self, answer: Callable[[], None]) -> None:
            address = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(address.query))
            bucket, _, name = address.path.partition("/b/")[2].partition("/o")
            name = urllib.parse.unquote(name.removeprefix("/")) or query.get("name", "")
            try:
                self._generation = self.storage.get_file_obj(bucket, name)["generation"] if name else None
            except NotFound:
                self._generation = "0"
            wanted, unwanted = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
            if not name:  # of an upload whose name is in its body; tensorstore makes none of that kind
                wanted = unwanted = None
            if wanted not in (None, self._generation) or (unwanted is not None and unwanted == self._generation):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(412 if wanted is not None else 304)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._told = self.command == "GET" and self._generation not in (None, "0")
                answer()

        def end_headers(self) -> None:
            if getattr(self, "_told", False):
                self.send_header("x-goog-generation", self._generation)
            super().end_headers()

        def do_GET(self) -> None:
            self._serve(super().do_GET)

        def do_POST(self) -> None:
            self._serve(super().do_POST)

        def do_DELETE(self) -> None:
            self._serve(super().do_DELETE)

    return Handler


@functools.cache
def gs() -> dict[str, str]:
    """Starts a gs:// with one empty bucket; gives the environment variables that lead to it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    from gcp_storage_emulator import server

    server.RequestHandler = _with_generations(server.RequestHandler)
    _in_background(lambda: server.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET).start())
    address = f"http://127.0.0.1:{port}"
    return {
        "STORAGE_EMULATOR_HOST": address,  # gcsfs, and Google's own client in orbax
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GOOGLE_CLOUD_PROJECT": "none",
        "FSSPEC_GCS_TOKEN": "anon",
        "NO_GCE_CHECK": "true",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for the kind of bucket by gRPC, which the stand-in lacks
    }


@functools.cache
def s3() -> dict[str, str]:
    """As ``gs``, for s3://."""
    variables = {
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    os.environ.update({k: os.environ.get(k, v) for k, v in variables.items()})
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    _in_background(server.start)
    address = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=address).create_bucket(Bucket=BUCKET)
    return {**variables, "AWS_ENDPOINT_URL": address}


STORES: dict[str, Callable[[], dict[str, str]]] = {"gs": gs, "s3": s3}
