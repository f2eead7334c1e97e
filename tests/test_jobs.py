"""Jobs: several at a time on this machine, and on a cluster. tests/slurm/up.sh starts a small cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import front
from test_guard import python

from recipes import slurm
from recipes.processes import INTERRUPTED, SCRIPT, Job, Needs, run_jobs
from recipes.recipe import read
from recipes.settings import Settings
from recipes.steps.results import read as read_results
from recipes.training import Run


def job(folder: Path, name: str, program: str) -> Job:
    """A job that runs a Python program. WHO is the job's name."""
    return Job(name, [sys.executable, "-c", f"import os; WHO = '{name}'\n{program}"], folder / name)


def wait_for(happened, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def test_jobs_here_run_side_by_side_each_on_its_device(tmp_path):
    """Four jobs run two at a time, and no device has two at once."""
    program = (
        "import sys, time; device = os.environ['CUDA_VISIBLE_DEVICES']; print('on', device, WHO);"
        f"os.open('{tmp_path}/' + device, os.O_CREAT | os.O_EXCL); time.sleep(0.3); os.remove('{tmp_path}/' + device);"
        "sys.exit(3 if WHO == 'c' else 0)"
    )
    over = run_jobs([job(tmp_path, name, program) for name in "abcd"], 2, ["5", "7"])
    ended = {one.name: (status, one.last_line()) for one, status in over}
    assert {name: status for name, (status, _) in ended.items()} == {"a": 0, "b": 0, "c": 3, "d": 0}
    assert {ended["a"][1], ended["b"][1]} == {"on 5 a", "on 7 b"}


GRID = """
import sys
from pathlib import Path
from recipes.processes import Job, run_jobs, supervise
from recipes.steps.common import run
folder = Path(sys.argv[1])
save = "trap 'sleep 1; touch saved; exit 130' USR2; touch began; while true; do sleep 0.1; done"
runs = [Job(name, ["bash", "-c", f"cd {folder / name}; {save}"], folder / name) for name in "abc"]
sys.exit(supervise(lambda: run(lambda: list(run_jobs(runs, 2, [])))))
"""


def test_an_interrupted_grid_lets_its_runs_save_and_begins_no_other(tmp_path):
    process = python(GRID, tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*/began"))) == 2, 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == INTERRUPTED
    finally:
        process.kill()  # and all its child processes
    assert sorted(path.parent.name for path in tmp_path.glob("*/saved")) == ["a", "b"]
    assert not (tmp_path / "c/job.log").exists()


# -- a cluster's settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitoin: gpu", "partitoin is unknown; expected one of partition, account, qos, constraint, hours, memory"),
        ("hours: 0", "hours=0 is invalid: input should be greater than 0"),
        ("- gpu", ".* must be a mapping, not list"),
    ],
)
def test_a_wrong_slurm_yaml_is_one_line(tmp_path, text, message):
    path = tmp_path / "slurm.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}: {message}") as error:
        slurm.read_settings(path)
    assert "\n" not in str(error.value)


def test_sbatch_options_of_a_job(tmp_path):
    """sbatch gets the user's settings, then the recipe's needs, with cores for every rank and its two loaders."""
    path, needs = tmp_path / "slurm.yaml", Needs(gpus=8, nodes=2, hours=48, memory=200)
    with pytest.raises(FileNotFoundError):
        slurm.read_settings(path)
    plain = slurm.sbatch_options(needs, slurm.Slurm())
    assert plain == {
        **{"nodes": 2, "ntasks-per-node": 1, "gpus-per-node": 8, "cpus-per-task": 24, "mem": "204800M", "time": 2880},
        **{"signal": "USR2@300", "requeue": True, "open-mode": "append"},
    }
    assert slurm.sbatch_options(Needs(cpus=16, hours=0.1), slurm.Slurm())["cpus-per-task"] == 16
    assert slurm.sbatch_options(Needs(hours=0.1), slurm.Slurm())["signal"] == "USR2@90", "not as soon as it begins"
    path.write_text(
        "partition: gpu\nhours: 24\ncpus: 10\nsetup: [module load cuda]\noptions: {exclude: n7, exclusive: true}\n"
    )
    assert slurm.sbatch_options(needs, slurm.read_settings(path)) == {
        **plain, "partition": "gpu", "time": 1440, "cpus-per-task": 80, "exclude": "n7", "exclusive": True,
    }  # fmt: skip


def test_the_plan_of_a_training_over_two_nodes(tmp_path):
    """The text is prepared on one node, training uses all GPUs of two nodes, and later steps use one GPU."""
    done = front("wmt14-enfr-60l", "-n", "WHERE=slurm", "NODES=2", "GPUS=8", f"RUNS={tmp_path}")
    assert done.stdout.splitlines()[:3] == [
        "# job wmt14-enfr-60l-prepare: nodes x GPUs: 1 x 0, hours: 48",
        "# job wmt14-enfr-60l-train: nodes x GPUs: 2 x 8, hours: 48",
        "# job wmt14-enfr-60l: nodes x GPUs: 1 x 1, hours: 48",
    ]
    words = " ".join(done.stdout.replace("\\\n", " ").split())
    assert "--max-tokens 5000 --update-freq 16 " in words and "--distributed-world-size 16 " in words
    assert not list(tmp_path.iterdir())


def test_jobs_have_the_cores_and_the_preset_of_the_command_that_submitted_them(tmp_path, nvidia_smi):
    """Only the text has workers. A preset by default is that of the machine that submits, not of a node."""
    paper = Run(read("wmt14-ende-18l", {"RUNS": str(tmp_path), "WHERE": "slurm", "GPUS": "8"}))
    cores = [slurm.sbatch_options(job.needs, slurm.Slurm())["cpus-per-task"] for job in paper.jobs("all")]
    assert cores == [16, 24, 3]
    nvidia_smi(16384)
    (text, *_) = Run(read("multi30k", {"WHERE": "slurm", "RUNS": str(tmp_path)})).jobs("all")
    assert "PRESET=gpu" in text.command


# -- submitting, with fake Slurm commands ----------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Fake Slurm commands that log their arguments. squeue prints the file `queue`, with --states=all the file `all`;
    sbatch prints ids from 1."""
    folder = tmp_path / "commands"
    folder.mkdir()
    (folder / "queue").touch()
    (folder / "all").touch()
    count = f"$(wc -l < {folder}/sbatch.log)"
    squeue = f'[[ "$@" == *--states=all* ]] && cat {folder}/all || cat {folder}/queue'
    programs = {"squeue": squeue, "sbatch": f"echo {count}", "scontrol": "echo n1", "srun": '"${@:2}"'}
    for name, program in programs.items():
        (folder / name).write_text(f'#!/bin/bash\necho "$@" >> {folder}/{name}.log\n{program}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def calls(commands: Path, name: str) -> list[str]:
    log = commands / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("status", "requeues", "state", "goes_on"),
    [
        (INTERRUPTED, 0, "RUNNING", True),
        (INTERRUPTED, 999, "RUNNING", True),
        (INTERRUPTED, 1000, "RUNNING", False),
        (INTERRUPTED, 0, "COMPLETING", False),  # as scancel does
        (1, 0, "RUNNING", False),
        (0, 0, "RUNNING", False),
    ],
)
def test_a_job_that_is_asked_to_stop_goes_on_a_thousand_times(
    tmp_path, commands, monkeypatch, status, requeues, state, goes_on
):
    one = job(tmp_path / "it's", "one", f"import sys; print(os.environ['MASTER']); sys.exit({status})")
    path = tmp_path / "one.sh"
    slurm.write_script(path, [one], 0, Needs(), slurm.Slurm())
    (commands / "queue").write_text(state)
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "CPUS_PER_TASK": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeues))
    assert subprocess.run(["bash", path]).returncode == status
    assert one.log.read_text().splitlines()[0] == "n1:20007"
    assert ("requeue 7" in calls(commands, "scontrol")) == goes_on


def test_each_job_begins_after_the_one_before_and_only_those_that_are_over_are_submitted_again(
    tmp_path, commands, capsys, monkeypatch
):
    jobs = [job(tmp_path, name, "") for name in ("text", "training")]
    text, training = (one.script for one in jobs)
    monkeypatch.chdir(tmp_path)  # which has no slurm.yaml
    work = SimpleNamespace(settings=Settings(WHERE="slurm"), on_cpu=True, jobs=lambda goal: jobs)
    with pytest.raises(SystemExit):
        slurm.make(work, "all")
    first, after = f"--parsable {text}", f"--parsable --dependency=afterok:1 --kill-on-invalid-dep=yes {training}"
    assert calls(commands, "sbatch") == [first, after]
    shown = capsys.readouterr().out
    assert jobs[0].last_line() == "no output.", "it has not begun"
    assert "job 2: training" in shown and "after 1" in shown and "scancel 1 2 ends them" in shown
    (commands / "queue").write_text(f"1|RUNNING|None|(null)|{text}\n")
    with pytest.raises(SystemExit):
        slurm.make(work, "all")
    assert calls(commands, "sbatch") == [first, after, after], "the training is over, the text is not"
    assert "job 1: text, in the queue already, running" in capsys.readouterr().out


def test_how_a_job_ended_is_said_when_it_is_submitted_again(tmp_path, commands, capsys, monkeypatch):
    """Slurm's own lines follow the program's. A job that never began has no line of its own, but that of its log."""
    jobs = [job(tmp_path, name, "") for name in ("training", "rest")]
    for one in jobs:
        one.folder.mkdir()
        one.log.write_text("Its own line.\nsrun: error: n1: task 0: Exited with exit code 2\nsrun: launch/slurm: x\n")
    rows = ["2|FAILED|NonZeroExitCode|(null)", "3|CANCELLED|DependencyNeverSatisfied|afterok:2(failed)"]
    (commands / "all").write_text("".join(f"{row}|{one.script}\n" for row, one in zip(rows, jobs)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        slurm.make(SimpleNamespace(settings=Settings(WHERE="slurm"), on_cpu=True, jobs=lambda goal: jobs), "all")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training: job 2 failed (NonZeroExitCode): Its own line."
    assert lines[2] == "rest: cancelled, since job 2 failed" and lines[3].startswith("job 2: rest, ")
    out_of_memory = slurm.Entry("2", "OUT_OF_MEMORY", "OutOfMemory", "(null)").end(jobs[0])
    assert out_of_memory == "job 2 out of memory (OutOfMemory): Its own line."


def test_a_job_that_slurm_never_begins_is_said_with_what_to_change(tmp_path, commands):
    (commands / "queue").write_text(f"7|PENDING|PartitionTimeLimit|(null)|{tmp_path}/a.sh\n8|PENDING|x|-|other.sh\n")
    text = slurm.states([tmp_path / "a.sh"])
    assert text.startswith("1 pending (PartitionTimeLimit). Slurm never begins job 7, since its partition or account")
    assert "give other hours:, partition: or account: in slurm.yaml" in text and "scancel 7" in text
    assert slurm.states([Path("other.sh")]) == "1 pending (x)" and not slurm.states([Path("third.sh")])


def test_runs_of_a_grid_are_an_array_and_the_grids_job_comes_again_after_them(tmp_path, commands, monkeypatch):
    monkeypatch.setenv(SCRIPT, f"{tmp_path}/grid.sh")
    with pytest.raises(SystemExit) as end:
        slurm.run([job(tmp_path, name, "") for name in "abcd"], Needs(), 2, slurm.Slurm(), tmp_path)
    assert not end.value.code
    runs = tmp_path / "runs.sh"
    assert calls(commands, "sbatch") == [
        *(f"--parsable {runs}", f"--parsable --dependency=afterok:1 --kill-on-invalid-dep=yes {tmp_path}/grid.sh")
    ]
    assert "#SBATCH --array=0-3%2" in runs.read_text()
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert subprocess.run(["bash", runs], env={**os.environ, "SLURM_JOB_ID": "9"}).returncode == 0
    assert [name for name in "abcd" if (tmp_path / name / "job.log").exists()] == ["c"]
    (commands / "queue").write_text(f"1|RUNNING|None|(null)|{runs}\n")
    with pytest.raises(ValueError, match="is in the queue already"):
        slurm.run([], Needs(), 2, slurm.Slurm(), tmp_path)


def test_jobs_with_gpus_are_refused_without_a_torch_for_them(tmp_path, commands):
    """If torch cannot use GPUs, jobs with GPUs are refused before hours of work on a text. Here, torch is for CPUs."""
    done = front("wmt14-ende-18l", "WHERE=slurm", "GPUS=8", f"RUNS={tmp_path}/runs")
    assert done.returncode == 2 and not calls(commands, "sbatch")
    assert "a build without CUDA, and the jobs need GPUs. Take another build: make setup TORCH=cuda" in done.stderr


# -- a cluster -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path):
    """Settings for the small cluster. A test's remaining jobs are cancelled."""
    if not shutil.which("sbatch"):
        pytest.skip("needs Slurm: sbatch is not installed (tests/slurm/up.sh)")
    if subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("needs Slurm: sinfo finds no cluster (tests/slurm/up.sh DIR up starts one)")
    path = tmp_path / "slurm.yaml"
    path.write_text("memory: 1.5\nhours: 0.2\ncpus: 1\n")
    yield [f"WHERE={path}", f"RUNS={tmp_path}/runs"]
    left = [number for script, rows in slurm.queued().items() if tmp_path in script.parents for number, *_ in rows]
    subprocess.run(["scancel", *left]) if left else None


def last_of(folder: Path) -> str:
    logs = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime)
    return "\n".join(path.read_text(errors="replace")[-1500:] for path in logs[-2:])


@pytest.mark.slurm
@pytest.mark.nightly
def test_a_recipe_trains_over_two_nodes_and_is_preempted(tmp_path, cluster):
    """Text, training and score are three jobs, without a waiting shell, and a preempted training resumes.

    When asked to stop, it writes a checkpoint on its first node, is requeued, and resumes from it.
    """
    words = ["demo", "PREPARE_ARGS=--pairs 1500", "LAYERS=1", "UPDATES=600", "AVERAGE_ARGS=--last 2"]
    words += ["ARGS=--save-interval-updates 200 --log-interval 1", "INIT=reference"]  # profiled once
    assert front(*words, "NODES=2", *cluster).stdout.count("job ") == 3
    given = dict(word.split("=", 1) for word in [*words[1:], cluster[-1]])
    run = read("demo", given).run
    script = run / "slurm/demo-train.sh"
    log = run / "train.log"
    wait_for(lambda: log.exists() and '"num_updates": "22"' in log.read_text(), 300)
    subprocess.run(["scancel", "--signal", "TERM", slurm.queued()[script][0].number], check=True)
    wait_for(lambda: list(run.glob("checkpoints/checkpoint_stopped_*")), 60)
    wait_for(lambda: not any(tmp_path in path.parents for path in slurm.queued()), 600)
    text = log.read_text()
    assert list(run.glob("at-*/report.html")), last_of(tmp_path)
    assert text.count("Admin: profiled") == 1 and "Loaded checkpoint" in text and "checkpoint_stopped_" in text
    assert "'distributed_world_size': 2" in text and (run / "train-node1.log").exists()
    assert not list(run.glob("checkpoints/checkpoint_stopped_*"))
    assert [row["updates"] for row in read_results(tmp_path / "runs/results.csv")] == ["600"]
    assert "job " not in front(*words, "NODES=2", *cluster).stdout, "all is done"


@pytest.mark.slurm
@pytest.mark.nightly
def test_a_job_that_fails_and_a_job_that_never_begins_say_why(tmp_path, cluster):
    words = ["demo", "PREPARE_ARGS=--pairs 500 --merges 200", "LAYERS=1", "UPDATES=20", *cluster]
    assert front("demo-prepare", *words[1:-2], words[-1]).returncode == 0
    front(*words, "ARGS=--max-source-positions 1")
    wait_for(lambda: not any(tmp_path in path.parents for path in slurm.queued()), 600)
    train, _, rest, *_ = front(*words, "ARGS=--max-source-positions 1").stdout.splitlines()
    assert "failed (NonZeroExitCode): recipes.steps.train ended with status" in train
    assert "The dataset is empty" in train and rest.startswith("demo: cancelled, since job ")
    limit = ["scontrol", "update", "PartitionName=all"]
    subprocess.run([*limit, "MaxTime=5"], check=True)
    try:
        assert "Slurm never begins job" in front(*words, "METHOD=post-ln").stdout
    finally:
        subprocess.run([*limit, "MaxTime=INFINITE"], check=True)


@pytest.mark.slurm
@pytest.mark.nightly
def test_a_grid_goes_on_by_itself(tmp_path, cluster):
    """A grid of four runs, two at a time, continues after the command that submitted it has ended."""
    words = ["sensitivity", "SCHEMES=admin post-ln", "LRS=0.001 0.002", "BETA2S=0.98", "UPDATES=20"]
    assert front(*words, "JOBS=2", "PAIRS=1500", "LAYERS=1", *cluster).stdout.count("job ") == 1
    wait_for(lambda: not any(tmp_path in path.parents for path in slurm.queued()), 900)
    assert len(list((tmp_path / "runs").rglob("result.csv"))) == 4, last_of(tmp_path)
    assert list((tmp_path / "runs").rglob("*.png")), last_of(tmp_path)
