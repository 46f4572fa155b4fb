"""Stand-ins for object stores, on the loopback address only: moto for s3://, gcp-storage-emulator for gs://.

One of each per process, since the packages that read from them keep the address that they found first.
"""

import functools
import os
import socket
import threading
from collections.abc import Callable

BUCKET = "bucket"


def _in_background(start: Callable[[], None]) -> None:
    """Starts a server whose thread, as a child of this one, does not keep the process from ending."""
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join()


@functools.cache
def gs() -> dict[str, str]:
    """Starts a gs:// with one empty bucket; gives the environment variables that lead to it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    from gcp_storage_emulator.server import create_server

    _in_background(lambda: create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET).start())
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
