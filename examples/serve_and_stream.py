"""Start a server on the embedded model, stream an answer from it over gRPC, and stop it again.

Run it as `python examples/serve_and_stream.py [prompt]`. Any program in any language can take the client's place:
the service is described in server/proto and by the server's own reflection.
"""

import subprocess
import sys

from jhybrid import Request, SamplingParams
from jhybrid_server.client import Client


def main(prompt: str) -> None:
    command = [sys.executable, "-m", "jhybrid.cli", "serve", "--model", "demo", "--port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()  # one line with the address, when ready
        if not line:
            sys.exit(server.wait())
        print(line, end="")
        try:
            with Client(line.split("grpc://")[1].strip()) as client:
                sampling = SamplingParams(max_tokens=160, temperature=0.7, top_p=0.9, seed=7)
                print(prompt, end="", flush=True)
                for delta in client.stream(Request(prompt=prompt, sampling=sampling)):
                    print(delta.text, end="", flush=True)
                print()
        finally:
            server.terminate()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "What light through yonder window")
