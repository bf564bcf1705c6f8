"""A SuperLink and SuperNodes on this machine, for tests; ends only what it has started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def environment(home: Path) -> dict[str, str]:
    """Offline, quiet, and with a Flower home of its own."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """Poll until the condition is true, and give its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Process:
    """A process with its children in a session of its own, and its log in a file."""

    def __init__(self, name: str, command: list[str], *, folder: Path, env: dict[str, str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End it and its children at once, as a power cut would."""
        if self.popen.poll() is None or _group_lives(self.popen.pid):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(timeout=10)

    def stop(self) -> None:
        """Ask it to end, then make it."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=5)
        if _group_lives(self.popen.pid):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(timeout=10)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Deployment:
    """A SuperLink, its SuperNodes and the command line, in one folder."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self.folder, self.tls, self.port = folder, tls, free_port()
        self.env = environment(folder / "flwr-home")
        self.processes: list[Process] = []
        (folder / "flwr-home").mkdir(parents=True)
        if tls:
            self._certificates()
        security = f'root-certificates = "{folder / "ca.crt"}"' if tls else "insecure = true"
        (folder / "flwr-home" / "config.toml").write_text(
            '[superlink]\ndefault = "test"\n\n[superlink.test]\n'
            f'address = "127.0.0.1:{self.port}"\n{security}\n'
        )

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> Process:
        program, *arguments = command
        process = Process(
            name, [str(BIN / program), *arguments], folder=self.folder, env=self.env | (env or {})
        )
        self.processes.append(process)
        return process

    def run(self, *command: str, timeout: float = 60.0, check: bool = True) -> str:
        program, *arguments = command
        done = subprocess.run(
            [str(BIN / program), *arguments], cwd=self.folder, env=self.env, timeout=timeout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def start_superlink(self, *more: str) -> Process:
        security = ["--insecure"]
        if self.tls:
            security = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt",
                        "--ssl-keyfile", "server.key", "--enable-supernode-auth"]  # fmt: skip
        link = self.start(
            "superlink", "flower-superlink", *security, "--port", str(self.port),
            "--disable-runtime-dependency-installation", *more,
        )  # fmt: skip
        wait_until(lambda: self._listens(), seconds=40, what=f"SuperLink up\n{link.text()}")
        return link

    def start_supernode(self, name: str, node_config: str) -> Process:
        security = ["--insecure"]
        if self.tls:
            security = ["--root-certificates", "ca.crt", "--auth-supernode-private-key", f"{name}.key"]
        return self.start(
            name, "flower-supernode", *security, "--superlink", f"127.0.0.1:{self.port}",
            "--port", str(free_port()), "--node-config", node_config,
            env={"FLWR_HOME": str(self.folder / f"home-{name}")},
        )  # fmt: skip

    def make_key(self, name: str, *, register: bool = True) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key"],
            cwd=self.folder, check=True, capture_output=True, timeout=30,
        )  # fmt: skip
        if register:
            self.run("flwr", "supernode", "register", f"{name}.key.pub", "test")

    def online(self) -> int:
        answer = json.loads(self.run("flwr", "supernode", "list", "test", "--format", "json"))
        return sum(node["status"] == "online" for node in answer["nodes"])

    def submit(self, config: str, *, app: Path = ROOT) -> str:
        """Start a run and return its id."""
        answer = json.loads(self.run("flwr", "run", str(app), "test", "-c", config, "--format", "json"))
        return str(answer["run-id"])

    def status(self, run_id: str) -> tuple[str, str]:
        answer = json.loads(self.run("flwr", "list", "test", "--run-id", run_id, "--format", "json"))
        return answer["runs"][0]["status"], answer["runs"][0]["status-details"]

    def wait_for(self, run_id: str, *, seconds: float) -> tuple[str, str]:
        def finished() -> tuple[str, str] | None:
            status = self.status(run_id)
            return status if status[0].startswith("finished") else None

        return wait_until(finished, seconds=seconds, what=f"run {run_id} finished\n{self.logs()}")  # type: ignore[no-any-return]

    def logs(self) -> str:
        return "\n".join(f"=== {process.name}\n{process.text()[-4000:]}" for process in self.processes)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _certificates(self) -> None:
        def openssl(*arguments: str) -> None:
            subprocess.run(
                ["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=30
            )

        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test CA",
                "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
                "-keyout", "server.key", "-out", "server.csr")  # fmt: skip
        (self.folder / "san.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "san.ext", "-out", "server.crt")  # fmt: skip


@contextmanager
def deployment(folder: Path, *, tls: bool) -> Iterator[Deployment]:
    """A deployment that is gone when the block ends, whatever happens in it."""
    made = Deployment(folder, tls=tls)
    try:
        yield made
    finally:
        for process in reversed(made.processes):
            process.stop()
