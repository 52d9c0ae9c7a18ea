"""`cluster=` reaches this room from the public `fit` and from the command line."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.cli import main
from headrace.cluster.connect import connected
from headrace.cluster.options import ClusterOptions
from headrace.errors import DeviceError, OptionError


def test_fit_hands_a_cluster_over() -> None:
    with pytest.raises(OptionError, match="cluster='cloud': give a number of workers"):
        hr.fit("mlp", (torch.randn(8, 2), torch.arange(8) % 2), cluster="cloud", epochs=1)


def test_more_workers_than_rows_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="9 workers cannot share 8 rows"):
        hr.fit("mlp", (torch.randn(8, 2), torch.arange(8) % 2), cluster=9, epochs=100, progress=False)


@pytest.mark.parametrize(
    ("asked", "says"),
    [("cloud", "give a number of workers"), ("workers=2,acept=2", "did you mean 'accept'")],
)
def test_the_command_line_hands_a_cluster_over(
    asked: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 2), np.float32), y=np.arange(8) % 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["headrace", "train", "data.npz", "--cluster", asked, "--epochs", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_port_that_answers_without_a_node_here_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray")
    services = pytest.importorskip("ray._private.services")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests may have a cluster here
    monkeypatch.setattr(services, "find_node_ids", set)
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = ClusterOptions(address=f"127.0.0.1:{server.getsockname()[1]}", connect_s=1.0)
        refused = pytest.raises(DeviceError, match="answers, but no Ray node runs on this machine")
        with refused as raised, connected(options):
            pass
    assert "does not answer" not in str(raised.value)
