"""Nodes that go and come, and a driver that dies: each in a process tree of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
HERE = Path(__file__).parent

NODES = """
    import warnings
    import ray
    import headrace as hr
    from ray.cluster_utils import Cluster
    from test_ray import loss_of, network, problem
    from headrace.cluster.driver import Observer, run_cluster
    from headrace.cluster.options import ClusterOptions
    from headrace.cluster.sending import sendable
    from headrace.cluster.training import Job
    from headrace.engine.options import FitOptions
    from headrace.engine.setup import open_data

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)  # on the only node, which stays
    second = cluster.add_node(num_cpus=1)

    class Trouble(Observer):
        done = False

        def progress(self, status, vector):
            if not self.done and status["steps"] >= 200:
                self.done = True
                cluster.remove_node(second, allow_graceful=False)
                cluster.add_node(num_cpus=1)
            return False

    data, module, fit = problem(), network(), FitOptions(epochs=60, batch_size=10, lr=0.2)
    job = Job(module=module, data=sendable(data, open_data(data, fit)[0]), options=fit, world_size=2, passes=60,
              total_steps=3600)
    result = run_cluster(job, ClusterOptions(workers=2, local_steps=4), Trouble())
    undisturbed = network()
    hr.fit(undisturbed, data, epochs=60, batch_size=10, lr=0.2, progress=False, workers="single")
    losses = loss_of(module, data), loss_of(undisturbed, data)
    print("rows", result.rows, "lives", sorted(member[3] for member in result.workers.values()))
    print("losses", *losses, "as good:", losses[0] < 1.5 * losses[1])
    ray.shutdown()
    cluster.shutdown()
"""

DRIVER = """
    import headrace as hr
    from test_ray import network, problem

    hr.fit(network(), problem(), cluster=2, epochs=100000, batch_size=10, progress=False)
"""


def start(script: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def descendants(root: int) -> dict[int, str]:
    """Process → when it was started, of everything below ``root``."""
    parents, started = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)], started[int(folder.name)] = int(fields[1]), fields[19]
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: started[pid] for pid in found - {root} if pid in started}


def is_there(pid: int, started: str) -> bool:
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == started and fields[0] != "Z"


def wait_for(processes: dict[int, str], limit_s: float) -> list[int]:
    """Those that are still there after so long."""
    deadline_s = time.monotonic() + limit_s
    left = list(processes)
    while left and time.monotonic() < deadline_s:
        left = [pid for pid in left if is_there(pid, processes[pid])]
        time.sleep(0.2)
    return left


@pytest.mark.slow
def test_a_lost_nodes_worker_moves_to_a_node_that_joins_late() -> None:
    process = start(NODES)
    try:
        out, _ = process.communicate(timeout=280)
    finally:
        below = descendants(process.pid)
        process.kill()
        process.communicate()
        for pid, started in below.items():
            if is_there(pid, started):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0 and f"rows {60 * 600} lives [1, 2]" in out, out[-3000:]
    assert "as good: True" in out, out[-3000:]


@pytest.mark.slow
def test_workers_end_when_their_driver_is_killed() -> None:
    process = start(DRIVER)
    try:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            below = descendants(process.pid)
            names = {
                pid: (Path("/proc") / str(pid) / "cmdline").read_text()
                for pid in below
                if is_there(pid, below[pid])
            }
            if sum(name.startswith("ray::WorkerActor") for name in names.values()) == 2:
                break
            time.sleep(0.5)
        else:
            pytest.fail("the workers never started")
        process.send_signal(signal.SIGKILL)
        actors = {pid: below[pid] for pid, name in names.items() if "Actor" in name}
        assert len(actors) == 3
        assert not wait_for(actors, 30), "training outlived its driver by half a minute"
        # Measured: two helpers of Ray that do not train take a little over a minute.
        assert not wait_for(below, 180), "a process of the cluster outlived the driver"
    finally:
        process.kill()
        process.communicate()
