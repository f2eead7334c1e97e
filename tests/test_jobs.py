"""Jobs: side by side on this machine, and on a cluster. tests/slurm/up.sh starts a small one."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, front

from recipes import slurm
from recipes.jobs import Job, Needs, run
from recipes.steps.common import read_lines
from recipes.steps.results import read as read_results


def job(folder: Path, name: str, program: str) -> Job:
    """A job that runs a Python program, which finds its name in WHO."""
    return Job(name, [sys.executable, "-c", f"import os; WHO = '{name}'\n{program}"], folder / name)


def statuses(over) -> dict[str, int]:
    return {one.name: status for one, status in over}


def wait_for(happened, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


@contextmanager
def meanwhile(function, jobs):
    """Call a function while the block runs; where it fails, the jobs that are waited for are ended."""

    def call():
        try:
            function()
        except BaseException:
            subprocess.run(["scancel", *json.loads(jobs.read_text()).values()], check=True)
            raise

    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        yield
    called.result()


def test_jobs_here_run_side_by_side_each_on_its_device(tmp_path):
    """Four jobs, two at a time: no device has two at once."""
    program = (
        "import sys, time; device = os.environ['CUDA_VISIBLE_DEVICES']; print('on', device, WHO);"
        f"os.open('{tmp_path}/' + device, os.O_CREAT | os.O_EXCL); time.sleep(0.3); os.remove('{tmp_path}/' + device);"
        "sys.exit(3 if WHO == 'c' else 0)"
    )
    begin = time.monotonic()
    over = list(run([job(tmp_path, name, program) for name in "abcd"], 2, ["5", "7"]))
    assert statuses(over) == {"a": 0, "b": 0, "c": 3, "d": 0}
    assert time.monotonic() - begin > 0.6, "two at a time"
    said = {one.name: one.last_word() for one, _ in over}
    assert {said[name] for name in "ab"} == {"on 5 a", "on 7 b"} and said["d"] in ("on 5 d", "on 7 d")


# -- a cluster's settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitoin: gpu", "partitoin is unknown; expected one of partition, account, qos, constraint, hours, memory"),
        ("hours: 0", "hours=0 cannot be; expected a number above 0."),
        ("- gpu", ".* must be a mapping, not list"),
    ],
)
def test_a_wrong_slurm_yaml_is_one_line(tmp_path, text, message):
    path = tmp_path / "slurm.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}: {message}") as error:
        slurm.read_settings(path)
    assert "\n" not in str(error.value)


def test_what_a_cluster_is_told(tmp_path):
    """A recipe's needs and the user's settings, of which the user's count; without a file, the needs alone."""
    path, needs = tmp_path / "slurm.yaml", Needs(gpus=8, nodes=2, hours=48, memory=200)
    plain = slurm.parameters(needs, 4, slurm.read_settings(path))
    assert plain == {
        **{"name": "recipes", "nodes": 2, "tasks_per_node": 1, "slurm_gpus_per_node": 8},
        **{"timeout_min": 2880, "mem_gb": 200, "slurm_array_parallelism": 4},
        "slurm_additional_parameters": {"requeue": True},
    }
    path.write_text(
        "partition: gpu\nhours: 24\ncpus: 10\nsetup: [module load cuda]\noptions: {exclude: n7, exclusive: true}\n"
    )
    assert slurm.parameters(needs, 4, slurm.read_settings(path)) == {
        **plain,
        **{"slurm_partition": "gpu", "timeout_min": 1440, "cpus_per_task": 80, "slurm_setup": ["module load cuda"]},
        **{
            "slurm_additional_parameters": {"requeue": True, "exclude": "n7", "exclusive": True},
            "slurm_srun_args": ["--cpus-per-task", "80"],
        },
    }


def test_the_plan_of_a_training_over_two_nodes(tmp_path):
    """The text on one node, the training on all GPUs of two, and what is made of it on one GPU."""
    done = front("wmt14-enfr-60l", "-n", "WHERE=slurm", "NODES=2", "GPUS=8", f"RUNS={tmp_path}")
    assert done.stdout.splitlines()[:3] == [
        "job  wmt14-enfr-60l-prepare: nodes x GPUs: 1 x 0, hours: 48",
        "job  wmt14-enfr-60l-train: nodes x GPUs: 2 x 8, hours: 48",
        "job  wmt14-enfr-60l: nodes x GPUs: 1 x 1, hours: 48",
    ]
    assert "train: 50 epochs, each of 2 x 8 x 16 batches of up to 5000 tokens" in done.stdout
    assert not list(tmp_path.iterdir())


# -- a cluster -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path):
    """The settings of jobs for the small cluster; the jobs that a test leaves there are ended."""
    if not shutil.which("sbatch"):
        pytest.skip("needs Slurm: sbatch is not installed (tests/slurm/up.sh)")
    if subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("needs Slurm: sinfo finds no cluster (tests/slurm/up.sh DIR up starts one)")
    yield slurm.Slurm(hours=0.2)
    if (tmp_path / "jobs.json").exists():
        subprocess.run(["scancel", *json.loads((tmp_path / "jobs.json").read_text()).values()], check=True)


NEEDS = Needs(memory=0.5)


@pytest.mark.slurm
def test_an_array_of_jobs_that_a_second_call_finds_again(tmp_path, cluster, caplog):
    """Four jobs, at most two at a time, interrupted: they go on, and a second call waits for those same ones."""
    caplog.set_level("INFO")
    go = tmp_path / "go"
    program = (
        "import pathlib, sys, time; print('in', os.environ['SLURM_ARRAY_JOB_ID'], WHO, flush=True)\n"
        f"while not pathlib.Path('{go}').exists(): time.sleep(0.1)\n"
        "sys.exit(3 if WHO == 'c' else 0)"
    )
    jobs = [job(tmp_path, name, program) for name in "abcd"]
    first = (
        "import logging, pickle, sys; from pathlib import Path; from recipes import slurm;"
        "logging.basicConfig(level='INFO', format='%(message)s');"
        "list(slurm.run(*pickle.load(sys.stdin.buffer), Path(sys.argv[1])))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", first, tmp_path], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdin.write(pickle.dumps((jobs, NEEDS, 2, cluster)))
    process.stdin.close()
    said = process.stderr.readline().decode()
    wait_for(lambda: sum(one.log.exists() for one in jobs) == 2)
    process.send_signal(signal.SIGINT)
    process.wait()
    (number,) = {known.partition("_")[0] for known in json.loads((tmp_path / "jobs.json").read_text()).values()}
    assert f"Jobs on Slurm: 4. Ctrl-C leaves them there; scancel {number} ends them." in said
    assert sum(one.log.exists() for one in jobs) == 2, "two at a time"

    def let_them_go():
        wait_for(lambda: "running" in caplog.text)
        go.touch()

    with meanwhile(let_them_go, tmp_path / "jobs.json"):
        found = statuses(slurm.run(jobs, NEEDS, 2, cluster, tmp_path))
    assert found == {"a": 0, "b": 0, "c": 3, "d": 0}
    assert "Waiting for the jobs of before: 4." in caplog.text and "4 of 4 over" in caplog.text
    assert {one.log.read_text() for one in jobs} == {f"in {number} {name}\n" for name in "abcd"}


def preempt(number):
    """As Slurm does with a time of grace, or before the time is over."""
    for name in ("TERM", "USR2"):
        subprocess.run(["scancel", "--signal", name, number], check=True)
        time.sleep(2)


def put_back(number):
    """As Slurm does where a job of more priority has its nodes, and an administrator."""
    subprocess.run(["scontrol", "requeue", number], check=True)


def suspend(number):
    subprocess.run(["scontrol", "suspend", number], check=True)
    time.sleep(8)
    subprocess.run(["scontrol", "resume", number], check=True)


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("early", "attempts"), [pytest.param(end, 2, id=end.__name__) for end in (preempt, put_back)] + [(suspend, 1)]
)
def test_a_job_that_slurm_stops_goes_on(tmp_path, cluster, early, attempts):
    """Though the command, as a recipe does, ends by itself when it is signalled, with a status of its own."""
    program = (
        "import pathlib, time; from recipes.processes import supervise;"
        "file = pathlib.Path('attempts'); count = len(file.read_text()) + 1 if file.exists() else 1;"
        "print('attempt', count, flush=True); file.write_text('+' * count);"
        f"sys.exit(supervise(lambda: time.sleep(600 if count < {attempts} else 20)))"
    ).replace("'attempts'", f"'{tmp_path}/attempts'")
    one, known, began = job(tmp_path, "one", f"import sys; {program}"), tmp_path / "jobs.json", tmp_path / "attempts"

    def stop():
        wait_for(lambda: known.exists() and began.exists() and began.read_text() == "+")
        time.sleep(1)
        early(json.loads(known.read_text())["one"])

    with meanwhile(stop, known):
        assert statuses(slurm.run([one], NEEDS, 1, cluster, tmp_path)) == {"one": 0}
    said = one.log.read_text().splitlines()
    assert [line for line in said if "attempt" in line] == [f"attempt {number + 1}" for number in range(attempts)]
    assert len(json.loads(known.read_text())) == 1


def in_a_job(folder, program):
    """What a program prints that runs where Slurm has started it."""
    names = {"SUBMITIT_FOLDER": folder, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    return subprocess.check_output(
        [sys.executable, "-c", f"import os, signal, subprocess, sys; from recipes import slurm; {program}"],
        cwd=ROOT, env={**os.environ, **{name: str(value) for name, value in names.items()}}, text=True,
    )  # fmt: skip


def test_putting_a_job_back_outlives_the_signals_that_end_it(tmp_path):
    """Slurm ends a job's processes as soon as it is asked to put it back: scontrol, which asks, is one of them."""
    program = (
        "[signal.signal(number, lambda *_: None) for number in slurm.EARLY]; slurm.Attempt().checkpoint(None);"
        "subprocess.run(['sh', '-c', 'kill -TERM $$; kill -USR2 $$; echo asked'], check=True)"
    )
    assert in_a_job(tmp_path, program) == "asked\n"


def test_a_command_that_is_over_when_its_job_is_put_back(tmp_path):
    """The signal reaches the command too: it can be over, and its status taken, when submitit ends the job's process.
    What an attempt before has left is no result."""
    (tmp_path / "7_0_result.pkl").touch()
    program = (
        "Over = type('Over', (subprocess.Popen,), {'wait': lambda self: (os.waitpid(self.pid, 0), sys.exit(0))});"
        "slurm.start = lambda *_, **__: Over(['true'], process_group=0); slurm.Attempt()(None)"
    )
    assert in_a_job(tmp_path, program) == ""
    assert not (tmp_path / "7_0_result.pkl").exists()


def test_a_job_that_never_began_has_a_last_word(tmp_path):
    assert job(tmp_path, "one", "").last_word() == "it said nothing."


@pytest.mark.slurm
def test_a_job_that_the_cluster_ends_has_a_status(tmp_path, cluster, caplog):
    caplog.set_level("INFO")
    program = "import subprocess, time; subprocess.run(['scancel', os.environ['SLURM_JOB_ID']]); time.sleep(600)"
    assert statuses(slurm.run([job(tmp_path, "one", program)], NEEDS, 1, cluster, tmp_path)) == {"one": 1}
    assert "one (job " in caplog.text and "CANCELLED" in caplog.text


@pytest.mark.slurm
def test_a_recipe_trains_over_two_nodes(tmp_path, cluster):
    """Text, training and score are three jobs; the ranks of the second meet by gloo. A second call has no job left."""
    small = ["PAIRS=1500", "LAYERS=1", "UPDATES=6", "SAVE_EVERY=3", "LOG_EVERY=1", "AVERAGE=2", "ANALYSES="]
    (tmp_path / "slurm.yaml").write_text("memory: 1.5\n")
    make = partial(
        front, "demo", *small, f"RUNS={tmp_path}/runs", "WHERE=slurm", "NODES=2", f"SLURM={tmp_path}/slurm.yaml"
    )
    done = make()
    run = tmp_path / "runs/demo/admin-cpu-s1"
    assert done.returncode == 0 and done.stdout.endswith(f"Report: {run}/report.html\n"), done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line[:1] == "#"] == [
        *("demo-prepare:", "demo-train:", "demo:")
    ]
    log = (run / "train.log").read_text()
    assert "'distributed_world_size': 2" in log and log.count("Admin: profiled") == 1
    assert (run / "train-node1.log").exists() and [
        row["updates"] for row in read_results(tmp_path / "runs/results.csv")
    ] == ["6"]
    again = make()
    assert again.returncode == 0 and "#" not in again.stdout and read_lines(run / "summary.txt")[0] in again.stdout
    other = make("WIDTH=32")
    assert other.returncode == 2 and "made with other settings (--decoder-embed-dim 64 -> 32" in other.stderr
    assert len(json.loads((run / "slurm/jobs.json").read_text())) == 3
