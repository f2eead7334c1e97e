"""Jobs: side by side on this machine, and on a cluster. tests/slurm/up.sh starts a small one."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipes import slurm
from recipes.jobs import Job, Resources, run

ROOT = Path(__file__).resolve().parents[1]


def job(folder: Path, name: str, program: str, **more) -> Job:
    """A job that runs a Python program."""
    return Job(name, [sys.executable, "-c", program], folder / name, **more)


def wait_for(happened, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


@contextmanager
def meanwhile(function):
    """Call a function while the block runs."""
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join()


# -- here ------------------------------------------------------------------------------------------------------------


def test_jobs_here_run_side_by_side_each_on_its_device(tmp_path):
    """Four jobs, two at a time: no device has two at once."""
    program = (
        "import os, sys, time; device = os.environ['CUDA_VISIBLE_DEVICES']; print('on', device, os.environ['WHO']);"
        f"os.open('{tmp_path}/' + device, os.O_CREAT | os.O_EXCL); time.sleep(0.3); os.remove('{tmp_path}/' + device);"
        "sys.exit(3 if os.environ['WHO'] == 'c' else 0)"
    )
    jobs = [job(tmp_path, name, program, env={"WHO": name}) for name in "abcd"]
    begin = time.monotonic()
    assert run(jobs, parallel=2, devices=["5", "7"]) == {"a": 0, "b": 0, "c": 3, "d": 0}
    assert time.monotonic() - begin > 0.6, "two at a time"
    said = {name: (tmp_path / name / "job.log").read_text() for name in "abcd"}
    assert {said[name] for name in "ab"} == {"on 5 a\n", "on 7 b\n"}
    assert all(f" {name}\n" in text for name, text in said.items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_front_ends_its_jobs(tmp_path, number):
    """The job's own processes too, which are not the front's children."""
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("{tmp_path}/part", "w").write(str(child.pid))
import os; os.rename("{tmp_path}/part", "{tmp_path}/child")
time.sleep(600)
"""
    front = (
        "import sys; from pathlib import Path; from recipes.jobs import Job, run;"
        "run([Job('a', [sys.executable, '-c', sys.argv[2]], Path(sys.argv[1]))])"
    )
    process = subprocess.Popen([sys.executable, "-c", front, tmp_path, program], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "child").exists)
    child = Path("/proc") / (tmp_path / "child").read_text()
    process.send_signal(number)
    process.wait(30)
    wait_for(lambda: not child.exists() or ") Z" in (child / "stat").read_text())


# -- a cluster's settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitoin: gpu", "partitoin is unknown; expected one of partition, account, qos, constraint, hours"),
        ("hours: 0", "hours is 0; Input should be greater than 0"),
        ("cpus: many", "cpus is 'many'; Input should be a valid integer"),
        ("- gpu", "cannot be read .*; expected NAME: VALUE"),
        ("partition: [", "cannot be read .*; expected NAME: VALUE"),
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
    path = tmp_path / "slurm.yaml"
    over_two_nodes = job(tmp_path, "a", "", needs=Resources(gpus=8, nodes=2, hours=48, memory=200))
    plain = slurm.parameters(over_two_nodes, 4, slurm.read_settings(path))
    assert plain == {
        **{"name": "recipes", "nodes": 2, "tasks_per_node": 1, "slurm_gpus_per_node": 8},
        **{"timeout_min": 2880, "mem_gb": 200, "slurm_array_parallelism": 4},
    }
    path.write_text("partition: gpu\nhours: 24\ncpus: 10\nsetup: [module load cuda]\noptions: {exclude: n7}\n")
    assert slurm.parameters(over_two_nodes, 4, slurm.read_settings(path)) == {
        **plain,
        **{"slurm_partition": "gpu", "timeout_min": 1440, "cpus_per_task": 80, "slurm_setup": ["module load cuda"]},
        **{"slurm_additional_parameters": {"exclude": "n7"}, "slurm_srun_args": ["--cpus-per-task", "80"]},
    }


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


NEEDS = Resources(memory=0.5)


@pytest.mark.slurm
def test_an_array_of_jobs_that_a_second_call_finds_again(tmp_path, cluster, caplog):
    """Four jobs, at most two at a time, interrupted: they go on, and a second call waits for those same ones."""
    caplog.set_level("INFO")
    go = tmp_path / "go"
    program = (
        "import os, pathlib, sys, time; print('in', os.environ['SLURM_ARRAY_JOB_ID'], os.environ['WHO'], flush=True)\n"
        f"while not pathlib.Path('{go}').exists(): time.sleep(0.1)\n"
        "sys.exit(3 if os.environ['WHO'] == 'c' else 0)"
    )
    jobs = [job(tmp_path, name, program, env={"WHO": name}, needs=NEEDS) for name in "abcd"]
    front = (
        "import logging, pickle, sys; from pathlib import Path; from recipes import slurm;"
        "logging.basicConfig(level='INFO', format='%(message)s');"
        "slurm.run(pickle.load(sys.stdin.buffer), 2, slurm.Slurm(hours=0.2), Path(sys.argv[1]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", front, tmp_path], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdin.write(pickle.dumps(jobs))
    process.stdin.close()
    wait_for(lambda: sum(one.log.exists() for one in jobs) == 2)
    process.send_signal(signal.SIGINT)
    said = process.stderr.read().decode()
    (number,) = {known.partition("_")[0] for known in json.loads((tmp_path / "jobs.json").read_text()).values()}
    assert f"The same command waits for them again; scancel {number} ends them." in said
    assert sum(one.log.exists() for one in jobs) == 2, "two at a time"

    def let_them_go():
        wait_for(lambda: "running" in caplog.text)
        go.touch()

    with meanwhile(let_them_go):
        statuses = slurm.run(jobs, 2, cluster, tmp_path)
    assert statuses == {"a": 0, "b": 0, "c": 3, "d": 0}
    assert "Waiting for 4 jobs of before." in caplog.text and "4 of 4 jobs over" in caplog.text
    assert {one.log.read_text() for one in jobs} == {f"in {number} {name}\n" for name in "abcd"}


@pytest.mark.slurm
def test_one_job_over_two_nodes_meets(tmp_path, cluster):
    """Two ranks add 1 and 2 by gloo; the recipe's MASTER and NODE name the same place."""
    program = (
        "import os, torch, torch.distributed as d; d.init_process_group('gloo'); x = torch.ones(1) + d.get_rank();"
        "d.all_reduce(x); e = os.environ; assert e['MASTER'] == e['MASTER_ADDR'] + ':' + e['MASTER_PORT'];"
        "assert e['NODE'] == e['RANK'] == e['SLURM_NODEID'];"
        "print(f'sum {x.item()} of {d.get_world_size()}\\n', end=''); d.destroy_process_group()"
    )
    two = job(tmp_path, "two", program, needs=Resources(nodes=2, memory=1))
    assert slurm.run([two], 1, cluster, tmp_path) == {"two": 0}
    assert two.log.read_text().splitlines() == ["sum 3.0 of 2"] * 2


@pytest.mark.slurm
def test_a_preempted_job_goes_on(tmp_path, cluster, caplog):
    """The signal that Slurm sends before it preempts, or before the time is over, reaches all processes of a job."""
    caplog.set_level("INFO")
    program = (
        "import pathlib, time; file = pathlib.Path('count'); count = int(file.read_text()) if file.exists() else 0;"
        "print('begins at', count, flush=True); file.write_text('7'); time.sleep(600 * (not count))"
    ).replace("'count'", f"'{tmp_path}/count'")
    one = job(tmp_path, "one", program, needs=NEEDS)

    def preempt():
        wait_for((tmp_path / "count").exists)
        name = json.loads((tmp_path / "jobs.json").read_text())["one"]
        for number in ("TERM", "USR2"):
            subprocess.run(["scancel", "--signal", number, name], check=True)

    with meanwhile(preempt):
        assert slurm.run([one], 1, cluster, tmp_path) == {"one": 0}
    assert one.log.read_text().splitlines() == ["begins at 0", "begins at 7"]
    assert len(json.loads((tmp_path / "jobs.json").read_text())) == 1 and "1 running" in caplog.text


@pytest.mark.slurm
def test_a_job_that_the_cluster_ends_has_a_status(tmp_path, cluster, caplog):
    caplog.set_level("INFO")
    program = "import os, subprocess, time; subprocess.run(['scancel', os.environ['SLURM_JOB_ID']]); time.sleep(600)"
    one = job(tmp_path, "one", program)
    assert slurm.run([one], 1, cluster, tmp_path) == {"one": 1}
    assert "one (job " in caplog.text and "CANCELLED" in caplog.text
