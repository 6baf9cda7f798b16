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

import psutil
import pytest
from tvm.rpc import connect_tracker
from tvm.rpc.tracker import Tracker

import dwtir
from dwtir import Shape, cuda
from dwtir.epilogue import Epilogue
from dwtir.target import resolve
from dwtir.tune import Settings, Task, devices, server
from dwtir.tune.remote import gpus_fleet, parse_address, tracker_fleet
from dwtir.tune.run import tune_all
from watcher import Watcher

LAYER = "1x8x15x17_k3_psame"
OURS = "dwtir.tune.server"
STOCK = "tvm.exec.rpc_server"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def tracker():
    port = free_port()
    running = Tracker("127.0.0.1", port, port + 1, silent=True)
    try:
        yield f"127.0.0.1:{running.port}"
    finally:
        running.terminate()
        running.proc = None


@pytest.fixture
def impatient(monkeypatch):
    """Give a server up after the second session in a row that fails."""
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
    """Start servers of key ``cpu`` and wait until the tracker has them."""
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
    """Find the process of a server's session: there is one as soon as somebody is connected."""
    return until(psutil.Process(server.pid).children, "no session", 20)[0]


def run(device, fleet, trials, folder, display, layer=LAYER):
    task = Task(Shape.parse(layer), Epilogue.of("bias"))
    settings = Settings(search="random", trials=trials)
    about = {"folder": folder, "display": display, "stop": threading.Event()}
    with closing(fleet):
        (outcome,), failed = tune_all([task], device, fleet, settings, **about)
    assert not failed
    return outcome


def assert_complete(outcome, trials):
    assert len(outcome.trials) == trials
    assert [trial.error for trial in outcome.trials if not trial.times] == []
    assert outcome.written
    assert outcome.path.is_file()


def test_others_take_over_from_servers_that_die_or_hang(tracker, tmp_path, impatient):
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
        outcome = run(device, fleet, 24, tmp_path, display)
    assert_complete(outcome, 24)
    assert any("no free server of key 'cpu' in 15 s" in note for note in display.notes)
    assert any("the server said nothing for 25 s" in note for note in display.notes)


def test_a_server_outlives_its_sessions(tracker, tmp_path):
    """A crash ends the session alone, and so does a call that takes too long."""
    with serving(tracker, 1) as servers:
        with pytest.raises(dwtir.DeviceError, match="no server of key 'gpu'; it has cpu"):
            tracker_fleet(tracker, "gpu")
        display = Watcher({3: lambda: session_of(servers[0]).send_signal(signal.SIGSEGV)})
        device, fleet = tracker_fleet(tracker, "cpu", "cpu", note=display.note)
        assert_complete(run(device, fleet, 6, tmp_path, display), 6)
        assert len(display.notes) == 1
        with pytest.raises(dwtir.DeviceError):
            tracker_fleet(tracker, "cpu", "cpu", longest=0.001)
        await_servers(tracker, 1)
        tracker_fleet(tracker, "cpu", "cpu")[1].close()
        servers[0].send_signal(signal.SIGTERM)
        assert servers[0].wait(10) == 0


def test_tvms_own_servers(tracker, tmp_path, impatient):
    with serving(tracker, 2, module=STOCK, more=["--silent"]) as servers:
        with pytest.raises(dwtir.InvalidTargetError, match="cannot say what device it has; give"):
            tracker_fleet(tracker, "cpu")
        with pytest.raises(dwtir.ToolchainError, match=r"run `python -m dwtir\.tune\.server`"):
            tracker_fleet(tracker, "cpu", "sm_75")

        def kill_a_session():
            (worker,) = psutil.Process(servers[0].pid).children()
            for session in worker.children():
                session.kill()

        display = Watcher({3: kill_a_session})
        device, fleet = tracker_fleet(tracker, "cpu", "cpu", note=display.note, wait=8.0)
        outcome = run(device, fleet, 8, tmp_path, display, f"{LAYER}_bfloat16")
    assert_complete(outcome, 8)
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
        assert device == resolve("cpu")
        assert [one.name for one in fleet.devices] == ["a", "b"]
        started = descendants() - before
        assert sum(OURS in command_line(child) for child in started) >= 2
        outcome = run(device, fleet, 6, tmp_path, display)
    assert_complete(outcome, 6)
    assert display.notes == []
    assert psutil.wait_procs(started, 10)[1] == []


def test_local_servers_end_with_us():
    """Even if nothing of ours runs any more that could end them."""
    script = (
        "import time; from dwtir.tune.local_servers import local_servers\n"
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


def test_a_failing_server_is_named():
    with pytest.raises(dwtir.DeviceError, match="the server of -x ended with status 2"), gpus_fleet(["-x"]):
        pass
    with pytest.raises(dwtir.InvalidTargetError, match="once each, such as 0,1, got '0,0'"), gpus_fleet(["0", "0"]):
        pass


def test_no_server_and_no_tracker(tracker):
    with pytest.raises(dwtir.DeviceError, match="no server of key 'gpu'; it has none"):
        tracker_fleet(tracker, "gpu")
    with pytest.raises(dwtir.DeviceError, match=r"the tracker at 127\.0\.0\.1:1: .*refused"):
        tracker_fleet("127.0.0.1:1", "cpu")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("0.0.0.0:9190", "must be loopback.*--allow-remote.*got '0.0.0.0'.*full remote code"),
        ("tracker.example:9190", "must be loopback.*got 'tracker.example'"),
        ("127.0.0.1", "HOST:PORT with a port from 1 to 65535, got '127.0.0.1'"),
        (":9190", "HOST:PORT with a port"),
    ],
)
def test_addresses_that_are_refused(address, message, capsys):
    with pytest.raises(dwtir.InvalidTargetError, match=message):
        tracker_fleet(address, "cpu")
    assert server.main(["--tracker", address, "--key", "cpu"]) == 1
    assert "InvalidTargetError" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_servers_listen_to_this_machine(host, capsys):
    assert server.main(["--tracker", "127.0.0.1:9190", "--key", "cpu", "--host", host]) == 1
    assert "--host must be loopback, such as 127.0.0.1, unless" in capsys.readouterr().err


def test_addresses_that_are_allowed():
    assert parse_address("localhost:9190", False) == ("localhost", 9190)
    assert parse_address("127.0.0.2:1", False) == ("127.0.0.2", 1)
    assert parse_address("[::1]:65535", False) == ("::1", 65535)
    assert parse_address("10.0.0.1:9190", True) == ("10.0.0.1", 9190)


def test_a_server_elsewhere_is_refused(tracker):
    """The tracker is asked by an address that counts as remote; both sides warn of it."""
    port = tracker.rpartition(":")[2]
    command = [sys.executable, "-m", OURS, "--key", "cpu", "--tracker", f"0.0.0.0:{port}"]
    command += ["--custom-addr", "10.0.0.1", "--allow-remote"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert "full remote code execution" in child.stderr.readline()
        await_servers(tracker, 1)
        with pytest.raises(dwtir.InvalidTargetError, match=r"a server's address.*got '10\.0\.0\.1'"):
            tracker_fleet(tracker, "cpu")
        notes: list[str] = []
        with pytest.raises(dwtir.DeviceError, match="no server of key 'other'"):
            tracker_fleet(f"0.0.0.0:{port}", "other", allow_remote=True, note=notes.append)
        assert "full remote code execution" in notes[0]
    finally:
        end(child)
        child.stderr.close()
        await_servers(tracker, 0)


@pytest.mark.gpu
def test_a_server_for_each_gpu(tmp_path):
    gpus = [str(index) for index in range(min(cuda.device_count(), 2))]
    display = Watcher()
    with gpus_fleet(gpus, note=display.note) as (device, fleet):
        assert device == resolve("cuda")
        outcome = run(device, fleet, 24, tmp_path, display, "2x32x28x28_k3_psame_float16_nhwc")
    assert {trial.device for trial in outcome.trials} == {f"gpu {gpu}" for gpu in gpus}
    assert sum(bool(trial.times) for trial in outcome.trials) >= 20
    assert "wrong result" not in outcome.failures
    assert display.notes == []
