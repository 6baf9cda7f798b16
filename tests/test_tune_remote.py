"""Tuning through TVM's tracker: real trackers and servers, on loopback."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from types import SimpleNamespace

import psutil
import pytest
from tvm.rpc import connect_tracker
from tvm.rpc.tracker import Tracker

from dwtir import DeviceError, DwtirError, Epilogue, InvalidTargetError, Shape, ToolchainError, cuda
from dwtir.target import resolve
from dwtir.tune import Settings, Task, devices, remote, server
from dwtir.tune.remote import gpus_fleet, parse_address, tracker_fleet
from dwtir.tune.run import tune_all
from kernels import CPU, LAYER
from marks import gpu, parametrize, raises
from watcher import Watcher

OURS = "dwtir.tune.server"
STOCK = "tvm.exec.rpc_server"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def tracker():
    port = free_port()
    running = Tracker("127.0.0.1", port, port + 1, silent=True)
    yield f"127.0.0.1:{running.port}"
    running.terminate()
    running.proc = None


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(devices, "_MAX_DEATHS", 2)


def until(get, otherwise, seconds=40):
    deadline = time.monotonic() + seconds
    while not (found := get()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
    return found


def await_servers(tracker, count):
    with closing(connect_tracker(*parse_address(tracker, False))) as session:
        until(lambda: len(session.summary()["server_info"]) == count, f"there should be {count} servers")


@contextmanager
def serving(tracker, count, *, module=OURS, more=()):
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--key", "cpu", "--tracker", tracker, *more]
    with ExitStack() as stack:
        stack.callback(await_servers, tracker, 0)
        servers = []
        for _ in range(count):
            # TVM's own servers end if two of them choose a port at the same time.
            port = free_port() if module == STOCK else 9090
            own = [*command, "--port", str(port), "--port-end", str(port + 100)]
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            servers.append(subprocess.Popen(own, stderr=log, text=True, start_new_session=True))
            stack.callback(end, servers[-1])
        await_servers(tracker, count)
        yield servers


def end(started):
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def session_of(server):
    """Find the process of a server's session, which is there once somebody is connected."""
    return until(psutil.Process(server.pid).children, "no session", 20)[0]


def assert_refused(error, message, *about, **options):
    with raises(error, match=message):
        tracker_fleet(*about, **options)


def run(device, fleet, trials, folder, display, layer=LAYER):
    task = Task(Shape.parse(layer), Epilogue.of("bias"))
    settings = Settings(search="random", trials=trials)
    about = {"folder": folder, "display": display, "stop": threading.Event()}
    with closing(fleet):
        (outcome,), failed = tune_all([task], device, fleet, settings, **about)
    assert not failed
    return outcome


def assert_completes(device, fleet, trials, *about):
    outcome = run(device, fleet, trials, *about)
    assert len(outcome.trials) == trials
    assert [trial.error for trial in outcome.trials if not trial.times] == []
    assert outcome.written
    assert outcome.path.is_file()


def test_others_take_over_from_failing_servers(tracker, tmp_path, impatient):
    with serving(tracker, 3) as servers:
        faults = {
            5: lambda: os.killpg(servers[1].pid, signal.SIGKILL),
            # By now what the first had is measured: who meets two faults is given up.
            16: lambda: session_of(servers[0]).send_signal(signal.SIGSTOP),
        }
        display = Watcher(faults)
        device, fleet = tracker_fleet(tracker, "cpu", note=display.note, wait=15.0, longest=25.0)
        assert device == resolve()
        assert [one.name for one in fleet.devices] == ["cpu 0", "cpu 1", "cpu 2"]
        assert_completes(device, fleet, 24, tmp_path, display)
    assert any("no free server of key 'cpu' in 15 s" in note for note in display.notes)
    assert any("the server said nothing for 25 s" in note for note in display.notes)


def test_server_outlives_its_sessions(tracker, tmp_path):
    """A crash ends the session alone, and so does a call that takes too long."""
    with serving(tracker, 1) as servers:
        assert_refused(DeviceError, "no server of key 'gpu'; it has cpu", tracker, "gpu")
        display = Watcher({3: lambda: session_of(servers[0]).send_signal(signal.SIGSEGV)})
        device, fleet = tracker_fleet(tracker, "cpu", "cpu", note=display.note)
        assert_completes(device, fleet, 6, tmp_path, display)
        assert len(display.notes) == 1
        assert_refused(DeviceError, None, tracker, "cpu", "cpu", longest=0.001)
        await_servers(tracker, 1)
        tracker_fleet(tracker, "cpu", "cpu")[1].close()
        servers[0].send_signal(signal.SIGTERM)
        assert servers[0].wait(10) == 0


def test_tvms_own_servers(tracker, tmp_path, impatient):
    with serving(tracker, 2, module=STOCK, more=["--silent"]) as servers:
        assert_refused(InvalidTargetError, "cannot say what device it has; give", tracker, "cpu")
        assert_refused(ToolchainError, r"run `python -m dwtir\.tune\.server`", tracker, "cpu", "sm_75")

        def kill_a_session():
            (worker,) = psutil.Process(servers[0].pid).children()
            for session in worker.children():
                session.kill()

        display = Watcher({3: kill_a_session})
        device, fleet = tracker_fleet(tracker, "cpu", "cpu", note=display.note, wait=8.0)
        assert_completes(device, fleet, 8, tmp_path, display, f"{LAYER}_bfloat16")
    assert display.notes


def command_line(process):
    try:
        return process.cmdline()
    except psutil.ZombieProcess:  # ended, and not yet waited for
        return []


def descendants():
    return set(psutil.Process().children(recursive=True))


def test_local_servers_come_and_go(tmp_path):
    display = Watcher()
    before = descendants()
    with gpus_fleet(["a", "b"], note=display.note, kind="cpu") as (device, fleet):
        assert device == CPU
        assert [one.name for one in fleet.devices] == ["a", "b"]
        started = descendants() - before
        assert sum(OURS in command_line(child) for child in started) >= 2
        assert_completes(device, fleet, 6, tmp_path, display)
    assert display.notes == []
    assert psutil.wait_procs(started, 10)[1] == []


def test_local_servers_end_with_us():
    """Even if nothing of ours runs any more that could end them."""
    script = (
        "import time; from dwtir.tune.remote import local_servers\n"
        "with local_servers(['a', 'b'], 'cpu'): print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline() == b"up\n"
            started = psutil.Process(child.pid).children(recursive=True)
        finally:
            child.kill()
    assert len(started) >= 3
    assert psutil.wait_procs(started, 10)[1] == []


def test_failing_server_is_named():
    with raises(DeviceError, match="the server of -x ended with status 2"), gpus_fleet(["-x"]):
        pass
    with raises(InvalidTargetError, match="once each, such as 0,1, got '0,0'"), gpus_fleet(["0", "0"]):
        pass


@parametrize("answer", [[], {}, {"target": 3}, {"target": {"name": "a"}}, {"target": asdict(CPU) | {"name": "/a"}}])
def test_server_that_says_no_device(answer):
    channel = SimpleNamespace(call=lambda message, seconds: answer)
    with raises(DwtirError):
        remote._target_there(channel, None, 1.0)


def test_no_server_and_no_tracker(tracker):
    assert_refused(DeviceError, "no server of key 'gpu'; it has none", tracker, "gpu")
    assert_refused(DeviceError, r"the tracker at 127\.0\.0\.1:1: .*refused", "127.0.0.1:1", "cpu")


@parametrize(
    ("address", "message"),
    [
        ("0.0.0.0:9190", "must be loopback.*--allow-remote.*got '0.0.0.0'.*full remote code"),
        ("tracker.example:9190", "must be loopback.*got 'tracker.example'"),
        ("127.0.0.1", "HOST:PORT with a port from 1 to 65535, got '127.0.0.1'"),
        (":9190", "HOST:PORT with a port"),
    ],
)
def test_addresses_that_are_refused(address, message, capsys):
    assert_refused(InvalidTargetError, message, address, "cpu")
    assert server.main(["--tracker", address, "--key", "cpu"]) == 1
    assert "InvalidTargetError" in capsys.readouterr().err


@parametrize("host", ["0.0.0.0", "::"])
def test_servers_listen_to_this_machine(host, capsys):
    assert server.main(["--tracker", "127.0.0.1:9190", "--key", "cpu", "--host", host]) == 1
    assert "--host must be loopback, such as 127.0.0.1, unless" in capsys.readouterr().err


def test_addresses_that_are_allowed():
    assert parse_address("localhost:9190", False) == ("localhost", 9190)
    assert parse_address("127.0.0.2:1", False) == ("127.0.0.2", 1)
    assert parse_address("[::1]:65535", False) == ("::1", 65535)
    assert parse_address("10.0.0.1:9190", True) == ("10.0.0.1", 9190)


def test_server_elsewhere_is_refused(tracker):
    """Both sides warn of an address of the tracker that counts as remote."""
    address = tracker.replace("127.0.0.1", "0.0.0.0")
    command = [sys.executable, "-m", OURS, "--key", "cpu", "--tracker", address]
    command += ["--custom-addr", "10.0.0.1", "--allow-remote"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert "full remote code execution" in child.stderr.readline()
        await_servers(tracker, 1)
        assert_refused(InvalidTargetError, r"a server's address.*got '10\.0\.0\.1'", tracker, "cpu")
        notes = []
        allowed = {"allow_remote": True, "note": notes.append}
        assert_refused(DeviceError, "no server of key 'other'", address, "other", **allowed)
        assert "full remote code execution" in notes[0]
    finally:
        end(child)
        child.stderr.close()
        await_servers(tracker, 0)


@gpu
def test_server_for_each_gpu(tmp_path):
    gpus = [str(index) for index in range(min(cuda.device_count(), 2))]
    display = Watcher()
    with gpus_fleet(gpus, note=display.note) as (device, fleet):
        assert device == resolve("cuda")
        outcome = run(device, fleet, 24, tmp_path, display, "2x32x28x28_k3_psame_float16_nhwc")
    assert {trial.device for trial in outcome.trials} == {f"gpu {gpu}" for gpu in gpus}
    assert sum(bool(trial.times) for trial in outcome.trials) >= 20
    assert "wrong result" not in outcome.failures
    assert display.notes == []
