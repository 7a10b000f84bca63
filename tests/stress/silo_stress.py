"""A silo killed at each line of its code; and silos behind Flower's own server.

Its server and its simulation need flwr 1.42 (CONTRIBUTING.md); each message has a
process of its own.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np

from tests.flower import flower_messages as fm
from tests.silo import hospital
from tests.stress import killed_silo, simulated_silos
from tfdp_fl.keras import checkpoint

# Of about 300 lines, each so many-th.
_STEP = int(os.environ.get("TFDP_FL_SILO_STEP", "7"))
_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run(folder, number):
    command = [sys.executable, "-m", "tests.stress.killed_silo", folder, str(number)]
    said = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert said.returncode in (0, -9), said.stderr
    return said.stdout if said.returncode == 0 else ""


def test_killed_at_each_line_it_answers_in_the_end_and_pays_for_all(tmp_path):
    number, kills = 1, 0
    while True:
        folder = tmp_path / str(number)
        first = _run(folder, number)
        charged = hospital.charged(folder)
        if first:
            assert charged == killed_silo.ROUNDS
            break
        kills += 1
        # A second kill at the same line, which a restart may pass or not.
        second = _run(folder, number)
        last = _run(folder, 0)
        assert not second or json.loads(second) == json.loads(last)
        weights, rounds, epsilon = json.loads(last)
        assert rounds == killed_silo.ROUNDS
        sent = killed_silo.weights()
        assert all(np.shape(a) == b.shape for a, b in zip(weights, sent, strict=True))
        # Each of the kills can have cost one round.
        assert 0 <= hospital.charged(folder) - killed_silo.ROUNDS <= 2
        assert epsilon == hospital.silo(folder).epsilon(hospital.DELTA)
        number += _STEP
    assert kills * _STEP > 100


def test_a_message_that_several_processes_get_at_once_is_paid_once(tmp_path):
    command = [sys.executable, "-m", "tests.stress.killed_silo", tmp_path / "silo", "0"]
    pipe = subprocess.PIPE
    how = {"cwd": _ROOT, "stdout": pipe, "stderr": pipe, "text": True}
    processes = [subprocess.Popen(command, **how) for _ in range(4)]
    said = [process.communicate() for process in processes]
    assert len({answer for answer, _ in said if answer}) == 1
    assert all(answer or "SiloInUseError" in error for answer, error in said)
    assert hospital.charged(tmp_path / "silo") == killed_silo.ROUNDS


_APP = """
import pathlib

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp, strategy

import tfdp_fl
from tests.silo import hospital

FOLDER = pathlib.Path({folder!r})
server = ServerApp()


def make(context):
    name = str(context.node_config["hospital"])
    with open(FOLDER / f"processes-{{name}}", "a") as file:
        file.write("one\\n")
    return hospital.silo(FOLDER / name)


client = tfdp_fl.flower.silo_app(make)


@server.main()
def main(grid, context):
    usual = {{"min_available_nodes": 2, "min_train_nodes": 2, "fraction_evaluate": 0.0}}
    start = ArrayRecord(hospital.build().get_weights())
    averaged = strategy.FedAvg(**usual)
    result = averaged.start(grid=grid, initial_arrays=start, num_rounds={rounds})
    (FOLDER / "result").write_text(repr(len(result.train_metrics_clientapp)))
"""
_PROJECT = """
[project]
name = "hospitals"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "tfdp-fl"
[tool.flwr.app.components]
serverapp = "hospitals_app:server"
clientapp = "hospitals_app:client"
[tool.flwr.app.config]
"""


def _port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@fm.NEEDS_FLOWER
def test_flowers_own_server_and_nodes_on_loopback(tmp_path):
    rounds, port, state = 3, _port(), tmp_path / "state"
    for folder in state, tmp_path / "app", tmp_path / "home":
        folder.mkdir()
    app = _APP.format(folder=str(state), rounds=rounds)
    (tmp_path / "app/hospitals_app.py").write_text(app)
    (tmp_path / "app/pyproject.toml").write_text(_PROJECT)
    (tmp_path / "home/config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    bin_folder = pathlib.Path(sys.executable).parent
    environment = {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(_ROOT),
    }
    link = f"127.0.0.1:{port}"
    node = ["flower-supernode", "--insecure", "--superlink", link]
    commands = [["flower-superlink", "--insecure", "--port", str(port)]]
    for number in range(2):
        own = ["--port", str(_port()), "--node-config", f"hospital={number}"]
        commands.append([*node, *own])
    run = [bin_folder / "flwr", "run", tmp_path / "app", "here"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(tmp_path / "log", "wb"))
        how = {"env": environment, "stdout": log, "stderr": log}
        for name, *rest in commands:
            process = subprocess.Popen([bin_folder / name, *rest], **how)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        deadline = time.monotonic() + 300
        while subprocess.run(run, check=False, **how).returncode:
            assert time.monotonic() < deadline, "no SuperLink"
            time.sleep(2)
        deadline = time.monotonic() + 900
        while not (state / "result").exists():
            assert time.monotonic() < deadline, "no result"
            time.sleep(1)
    assert (state / "result").read_text() == str(rounds)
    for name in "01":
        assert hospital.charged(state / name) == rounds
        # A process for each message.
        assert len((state / f"processes-{name}").read_text().split()) == rounds


@fm.NEEDS_FLOWER
def test_flowers_simulation_with_processes_that_end_and_begin_anew(tmp_path):
    before, messages = [None] * 4, 3
    for number in range(1, messages + 1):
        command = [sys.executable, "-m", "tests.stress.simulated_silos", tmp_path]
        said = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        for place in range(4):
            files = checkpoint.CheckpointDirectory(tmp_path / str(place))
            assert hospital.charged(files.path) == number
            # This message began with what the last process had left.
            began = checkpoint.from_bytes(files.file(number - 1).read_bytes())
            after = files.newest()
            assert after["rounds"] == number
            for name in ("mechanism_state", "server_optimizer", "sampler", "run_id"):
                if before[place]:
                    assert repr(began[name]) == repr(before[place][name]), name
            assert repr(began["server_optimizer"]) != repr(after["server_optimizer"])
            before[place] = after
    for place in range(4):
        several = simulated_silos.silo(tmp_path, place)
        facts = several.privacy_statement(format="dict")
        assert facts["rounds"] == messages
        assert "rounds_charged_twice" not in facts["caveats"]
        one = simulated_silos.silo(tmp_path / "one", place)
        for _ in range(messages):
            update = one.train(one.get_weights())
        assert update.epsilon == several.epsilon(hospital.DELTA)
