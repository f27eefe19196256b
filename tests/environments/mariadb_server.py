"""A private MariaDB server for a test, on a socket in a temporary folder."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest


class MariaDbServer:
    """``mariadbd`` with its data in a folder. It can be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("pymysql", reason="pip install PyMySQL")
        path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
        self._binary, install = (shutil.which(name, path=path) for name in ("mariadbd", "mariadb-install-db"))
        if not (self._binary and install):
            pytest.skip("MariaDB is not installed (.ci/system-packages mariadb-server)")
        self._folder, self._socket = folder, folder / "db.sock"
        self._user = ["--user=root"] if os.getuid() == 0 else [f"--user={pwd.getpwuid(os.getuid()).pw_name}"]
        self.url = f"mysql://root@localhost/?unix_socket={self._socket}"
        self._process: subprocess.Popen[bytes] | None = None
        options = ["--no-defaults", f"--datadir={folder}/data", "--auth-root-authentication-method=normal"]
        subprocess.run([install, *options, *self._user, "--skip-test-db"], check=True, capture_output=True)

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        options = ["--no-defaults", f"--datadir={self._folder}/data", f"--socket={self._socket}"]
        options += [
            "--skip-networking",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-buffer-pool-size=32M",
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._binary, *options, *self._user], stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not self._listens():
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "mariadbd is not listening"
            time.sleep(0.05)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self._socket)) == 0

    def end(self, number: int = signal.SIGTERM) -> None:
        """Stop the server, by default cleanly."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def sql(self, statement: str) -> list[tuple]:
        """Run a statement as root and return its rows."""
        import pymysql

        with pymysql.connect(unix_socket=str(self._socket), user="root") as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())

    def leftovers(self) -> list[str]:
        """Return the remaining databases and users of episodes."""
        databases = [name for (name,) in self.sql("SHOW DATABASES") if name.startswith("agentrl_")]
        users = [name for (name,) in self.sql("SELECT user FROM mysql.user") if name.startswith("agentrl_")]
        return sorted([*databases, *users])
