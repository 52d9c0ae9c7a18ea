"""Two hosts: network namespaces joined by one cable, a Ray node in each, and a run over both."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_ray import problem

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
]
HERE = Path(__file__).parent
HEAD, OTHER = "10.213.77.1", "10.213.77.2"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]

TRAIN = """
    import headrace as hr
    from test_ray import loss_of, network, problem

    module = network()
    run = hr.fit(module, problem(), cluster={{"address": "{address}", "workers": 2, "local_steps": 4}},
                 epochs=20, batch_size=10, lr=0.2, progress=False)
    print("rows", run.last["examples"], "learned", loss_of(module, problem()) < 0.4)
"""
WHERE = """
    import ray

    ray.init(address="{address}", log_to_driver=False)
    print("nodes", sorted(n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Two namespaces and what runs in them."""

    def __init__(self) -> None:
        self.names = [f"hr{os.getpid()}{side}" for side in "ab"]
        self.folder = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))  # sockets want short paths
        self.disks = [self.folder / "a", self.folder / "b"]
        for disk in self.disks:
            disk.mkdir()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self.nodes: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = [f"{name}v" for name in self.names]
        ip("link", "add", ends[0], "netns", self.names[0], "type", "veth",
           "peer", "name", ends[1], "netns", self.names[1])  # fmt: skip
        for name, end, address in zip(self.names, ends, (HEAD, OTHER), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            # Ray asks for the way to the world to learn its own address; the cable is the only one.
            ip("-n", name, "route", "add", "default", "via", OTHER if address == HEAD else HEAD)

    def start(self, host: int, command: list[str], **more: str) -> subprocess.Popen[str]:
        # A disk of its own: Ray finds its node by files, and data may lie on one host only.
        own = ["sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh", str(self.disks[host])]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *own, str(self.folder), *command],
            env={**self.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def start_nodes(self) -> None:
        common = ["--num-cpus", "1", "--object-store-memory", str(128 << 20), "--block"]
        head = ["--head", "--port", "6379", "--node-ip-address", HEAD, "--include-dashboard", "false"]
        self.nodes.append(self.start(0, [*RAY, "start", *head, "--temp-dir", str(self.folder), *common]))
        self.wait_for_nodes([HEAD])
        other = ["--address", f"{HEAD}:6379", "--node-ip-address", OTHER]
        self.nodes.append(self.start(1, [*RAY, "start", *other, *common]))
        self.wait_for_nodes([HEAD, OTHER])

    def wait_for_nodes(self, addresses: list[str]) -> None:
        deadline_s, out = time.monotonic() + 120, ""
        while time.monotonic() < deadline_s:
            _, out = self.run(0, WHERE)
            if f"nodes {addresses}" in out:
                return
        pytest.fail(f"the nodes {addresses} never came:\n{out[-2000:]}")

    def run(self, host: int, script: str, alone: bool = False, **more: str) -> tuple[int, str]:
        """Run a script on a host; ``alone`` is in a container of its own there, which sees no other process."""
        text = textwrap.dedent(script.format(address=f"{HEAD}:6379"))
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if alone else []
        process = self.start(host, [*own, sys.executable, "-W", "ignore", "-c", text], **more)
        try:
            out, _ = process.communicate(timeout=150)
        finally:
            end(process)
        return process.returncode, out

    def clear_away(self) -> None:
        for process in self.nodes:
            end(process)
        for name in self.names:
            # Whatever a node left behind runs in its namespace, and nothing else does.
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    found = Hosts()
    try:
        found.build()
        found.start_nodes()
        yield found
    finally:
        found.clear_away()


def test_two_hosts_train_together(hosts: Hosts) -> None:
    """Each host has one CPU, so each has one of the two workers."""
    status, out = hosts.run(0, TRAIN)
    assert status == 0 and "rows 12000 learned True" in out, out[-3000:]


@pytest.mark.parametrize("address", [f"{HEAD}:6379", "auto", f"ray://{HEAD}:10001"])
def test_a_driver_beside_another_node_trains_on_both(hosts: Hosts, address: str) -> None:
    """The two hosts share a table of processes, where Ray finds both nodes and would take the head's."""
    status, out = hosts.run(1, TRAIN.replace("{address}", address))
    assert status == 0 and "rows 12000 learned True" in out, out[-3000:]


def test_a_driver_without_a_node_is_told_so(hosts: Hosts) -> None:
    """A table of processes of its own, without a node in it."""
    script = TRAIN.replace('"workers"', '"connect_s": 3, "workers"')
    status, out = hosts.run(1, script, alone=True)
    assert status != 0 and "no Ray node runs on this machine" in out and "ray start --address=" in out, out[
        -3000:
    ]
    status, out = hosts.run(1, TRAIN.replace("{address}", f"ray://{HEAD}:10001"), alone=True)
    assert status == 0 and "rows 12000 learned True" in out, out[-3000:]


def test_another_token_is_refused(hosts: Hosts) -> None:
    status, out = hosts.run(0, TRAIN, RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert status != 0 and "does not answer" in out and "RAY_AUTH_TOKEN is the same" in out, out[-3000:]


def test_a_host_that_nobody_has_is_named_with_what_was_tried(hosts: Hosts) -> None:
    status, out = hosts.run(
        0,
        TRAIN.replace("{address}", "ray://10.213.77.9:10001").replace(
            '"workers"', '"connect_s": 3, "workers"'
        ),
    )
    assert status != 0 and "10.213.77.9 port 10001 within 3 s" in out, out[-3000:]


def test_a_host_whose_disk_lacks_the_data_is_named(hosts: Hosts) -> None:
    x, y = problem()
    np.savez(hosts.disks[0] / "data.npz", x=x.numpy(), y=y.numpy())
    status, out = hosts.run(0, TRAIN.replace("problem(), cluster", f'"{hosts.folder}/data.npz", cluster'))
    assert status != 0 and "worker-" in out and f"{hosts.folder}/data.npz" in out, out[-3000:]
    np.savez(hosts.disks[1] / "data.npz", x=x.numpy(), y=y.numpy())
    status, out = hosts.run(0, TRAIN.replace("problem(), cluster", f'"{hosts.folder}/data.npz", cluster'))
    assert status == 0 and "rows 12000 learned True" in out, out[-3000:]


def test_another_version_on_one_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """A third node, whose headrace is another one."""
    import headrace

    shutil.copytree(Path(headrace.__file__).parent, tmp_path / "headrace")
    (tmp_path / "headrace" / "__init__.py").write_text(
        (Path(headrace.__file__)).read_text(encoding="utf-8") + '\n__version__ = "99.0"\n', encoding="utf-8"
    )
    path = os.pathsep.join([str(tmp_path), hosts.environment["PYTHONPATH"]])
    node = hosts.start(
        1, [*RAY, "start", "--address", f"{HEAD}:6379", "--node-ip-address", OTHER, "--num-cpus", "1", "--block"],
        PYTHONPATH=path,
    )  # fmt: skip
    try:
        hosts.wait_for_nodes([HEAD, OTHER, OTHER])
        status, out = hosts.run(0, TRAIN)
        assert status != 0 and "has headrace 99.0" in out, out[-3000:]
    finally:
        end(node)
