"""To a running Ray: one started here for the run, one that is there already, or one at an address.

A cluster that is started here is ended with the run; one that was there is left alone. What is started here wants a
token from everyone who connects (Ray's token authentication) and has no dashboard. Ray unpickles what comes over
its connections, so on a cluster of your own the token, or a network that nobody else reaches, is what keeps others
out: set ``RAY_AUTH_MODE=token`` and the same ``RAY_AUTH_TOKEN`` on every node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

from headrace.cluster.options import ClusterOptions
from headrace.errors import DeviceError, missing_extra

DEFAULT_PORTS = {"ray": 10001, "gcs": 6379}
STORE_BYTES = 512 << 20
"""Shared memory for objects of a cluster on this machine; what exceeds it goes to the disk."""

QUIET = {"event_stats": False, "task_events_report_interval_ms": 0, "enable_metrics_collection": False}
"""Ray keeps books for its dashboard in every process, some hundred times a second; there is no dashboard here."""


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "cluster", "training on a cluster") from error
    return ray


@contextlib.contextmanager
def connected(options: ClusterOptions, *, store_bytes: int = STORE_BYTES) -> Iterator[Any]:
    """The ``ray`` module with a cluster behind it."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    if options.address is None:
        assert isinstance(options.workers, int)
        with _token(ray), _own(ray, options.workers * options.cores, store_bytes):
            yield ray
        return
    deadline_s = time.monotonic() + options.connect_s
    reach(options.address, options.connect_s)
    try:
        _join(ray, options.address, deadline_s)
    except DeviceError:  # which says it all
        raise
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _unreachable(options.address, str(error).strip().split("\n")[0]) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _join(ray: Any, address: str, deadline_s: float) -> None:
    """Become a driver of the cluster at ``address``.

    Through ``ray://`` Ray runs the driver's part on the head. Otherwise a driver needs a Ray node on its own machine,
    whose shared memory it uses. Ray finds that node in the table of processes; containers or network namespaces that
    share one table share their nodes in it, and Ray then takes the head's address for the driver's. Workers would ask
    there for the driver's objects and wait for ever, so the address is looked at and given.
    """
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "configure_logging": False}
    if address.startswith("ray://"):
        ray.init(**settings)
        return
    _want_a_node_here(address, deadline_s)
    ray.init(**settings)
    ours = sorted(
        {n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"] and is_ours(n["NodeManagerAddress"])}
    )
    if ours and ray.util.get_node_ip_address() not in ours:
        ray.shutdown()
        ray.init(**settings, _node_ip_address=ours[0])


def _want_a_node_here(address: str, deadline_s: float) -> None:
    """Say that there is no node on this machine, where Ray alone would wait for a minute and not say what for."""
    try:
        from ray._private.services import find_node_ids
    except ImportError:  # an inner function of Ray; without it Ray's own message has to do
        return
    while not find_node_ids():
        if time.monotonic() > deadline_s:
            raise DeviceError(
                f"cluster={address!r} answers, but no Ray node runs on this machine, and a driver needs one beside it. "
                f"Start one here (ray start --address={address}), run the script on a machine of the cluster, or go "
                "through the head with cluster='ray://HEAD:10001', whose port must be open from here"
            )
        time.sleep(0.5)


def is_ours(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound to."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _own(ray: Any, cpus: int, store_bytes: int) -> Iterator[None]:
    """A cluster on this machine alone. CPUs are Ray's tickets: three workers may share two cores."""
    ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=None,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=store_bytes,
        _system_config=QUIET,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _token(ray: Any) -> Iterator[None]:
    """A token for a cluster of our own, unless the user has chosen; everything is given back afterwards."""
    if os.environ.get("RAY_AUTH_MODE"):
        yield
        return
    before = os.environ.get("RAY_AUTH_TOKEN")
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    _read_settings(ray)
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]
        if before is not None:
            os.environ["RAY_AUTH_TOKEN"] = before
        _read_settings(ray)


def _read_settings(ray: Any) -> None:
    """Ray reads its settings when it is imported; this makes it look again."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def reach(address: str, limit_s: float) -> None:
    """Return when something listens at the address; otherwise say within ``limit_s`` what was tried."""
    named = address if address != "auto" else os.environ.get("RAY_ADDRESS", "auto")
    if named == "auto":
        return  # Ray looks for a cluster of this machine and answers at once
    scheme, _, rest = named.rpartition("://")
    host, _, port = rest.partition(":")
    number = int(port) if port.isdigit() else DEFAULT_PORTS["ray" if scheme == "ray" else "gcs"]
    deadline_s = time.monotonic() + limit_s
    tries, last = 0, ""
    while (left_s := deadline_s - time.monotonic()) > 0:
        tries += 1
        try:
            socket.create_connection((host, number), timeout=left_s).close()
            return
        except OSError as error:
            last = error.strerror or str(error)
            time.sleep(min(1.0, max(0.0, deadline_s - time.monotonic())))
    raise _unreachable(
        address, f"{tries} connections to {host} port {number} within {limit_s:g} s: {last or 'no answer'}"
    )


def _unreachable(address: str, tried: str) -> DeviceError:
    return DeviceError(
        f"cluster={address!r} does not answer. Tried: {tried}. Check that the head node runs "
        "(ray status there), that its port is open from here and that RAY_AUTH_TOKEN is the same on both; "
        "cluster=3 starts three workers on this machine instead"
    )


def version_differences(mine: dict[str, str], theirs: dict[str, dict[str, str]]) -> list[str]:
    """A sentence for each node whose Python or headrace differs from the driver's.

    Python may differ in its last number; everything else must be equal, since code and data travel pickled.
    """
    found = []
    for node, versions in theirs.items():
        for name, own in mine.items():
            other = versions.get(name, "none")
            short = 2 if name == "python" else None
            if own.split(".")[:short] != other.split(".")[:short]:
                found.append(f"node {node} has {name} {other}, the driver has {own}")
    return found
