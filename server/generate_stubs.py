"""Regenerate the gRPC stubs in jhybrid_server/v1 from proto/. `make proto` calls it.

The compiler is pinned, and lives in an environment of its own: generated code must not be newer than the oldest
grpcio and protobuf that pyproject.toml allows, which is what this version's code asks for.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

COMPILER = "grpcio-tools==1.76.0"
SERVER = Path(__file__).resolve().parent


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = Path(directory) / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", COMPILER], check=True)
        # The virtual path makes the stubs import each other as jhybrid_server.v1, not as jhybrid.v1.
        command = [
            python,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path=jhybrid_server/v1={SERVER / 'proto/jhybrid/v1'}",
            f"--python_out={SERVER}",
            f"--pyi_out={SERVER}",
            f"--grpc_python_out={SERVER}",
            "jhybrid_server/v1/inference.proto",
        ]
        subprocess.run(command, check=True)
    (SERVER / "jhybrid_server" / "v1" / "__init__.py").touch()


if __name__ == "__main__":
    main()
