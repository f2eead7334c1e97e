"""Do several nodes, each running the same command, train one model?"""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, front, make_environment

from recipes import recipe
from recipes.translation import Pipeline

SMALL = ["PAIRS=1500", "LAYERS=1", "UPDATES=6", "SAVE_EVERY=3", "LOG_EVERY=1", "AVERAGE=2"]


@pytest.mark.slow
def test_two_nodes_meet_and_train_one_model(tmp_path):
    assert front("demo-prepare", *SMALL, f"RUNS={tmp_path}").returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several = [f"RUNS={tmp_path}", "NODES=2", f"MASTER=127.0.0.1:{port}"]
    logs = [tmp_path / f"node{node}.log" for node in (0, 1)]
    # As SLURM tells a node its number.
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "recipes", "demo-train", *SMALL, *several],
            cwd=ROOT,
            env=make_environment(SLURM_NODEID=str(node)),
            stdout=log.open("w"),
            stderr=-2,
        )
        for node, log in enumerate(logs)
    ]
    try:
        ends = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert ends == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    folder = tmp_path / "demo/admin-cpu-s1"
    log = (folder / "train.log").read_text()
    assert "'distributed_world_size': 2" in log and log.count("Admin: profiled") == 1
    assert len(re.findall(r"\| train_inner \|", log)) == 6
    assert (folder / "train-node1.log").exists() and (folder / "trained-6").exists()
    # Both nodes' tokens count: about 1,000 each.
    (words, *_) = re.findall(r'"wpb": "([\d.]+)"', log)
    assert float(words) > 1200


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (["NODES=2"], "NODES=2 needs MASTER=HOST:PORT"),
        (["NODES=2", "MASTER=h"], "where the first node is reached; found MASTER=h"),
        (["NODES=2", "MASTER=h:x"], "where the first node is reached; found MASTER=h:x"),
        (["NODES=2", "MASTER=h:1", "NODE=2"], "NODE=2 is not one of NODES=2; expected a number from 0 to 1"),
        (["NODE=1"], "NODE=1 is not one of NODES=1; expected a number from 0 to 0"),
        (["NODES=2", "MASTER=h:1", "NODE=1"], "NODE=1 of several only trains; run the target that ends in -train"),
        (["PRECISION=fp8"], "PRECISION=fp8 cannot be; expected one of fp16 me-fp16 amp bf16 fp32"),
    ],
)
def test_wrong_machines_are_refused_in_one_line(variables, message):
    done = front("demo", "-n", *SMALL, *variables)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_first_node_does_all():
    done = front("demo", "-n", "RUNS=nowhere", "NODES=2", "MASTER=h:1")
    assert done.returncode == 0 and "report.html" in done.stdout, done.stderr
    run = Pipeline(recipe.read("demo", {"NODES": "2", "MASTER": "[fd00::1]:1"})).run
    meeting = "--distributed-world-size 2 --distributed-init-method tcp://[fd00::1]:1 --distributed-rank 0"
    assert meeting in " ".join(run.command())
