"""A process that has imported what a build imports, and runs each `compile` command in a fork of itself.

Run by `tests.serving.run_compile`. A command has a process, arguments, environment, working folder and output of its
own, as from a shell; what it does not do again are the three seconds of imports. The parent never computes anything,
so that no thread of a library is lost in a fork.

One command is one line of JSON on stdin; its exit code is one line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

import numpy
import onnx
import onnx_ir
import onnxscript.optimizer
import onnxscript.rewriter
import torch
import torch._dynamo
import torch.export
import torch.onnx

from tests.exporter_library import read_once

# Imported for what comes with them; the project's own modules are imported by each command. ONNX Runtime and OpenVINO
# start threads when they are imported, which a fork would lose.
HEAVY = (numpy, onnx, onnx_ir, onnxscript, torch)


def main() -> None:
    with read_once(20):  # the opset that specs have unless they say another
        for line in sys.stdin:
            command = json.loads(line)
            child = os.fork()
            if child == 0:
                run(command)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)


def run(command: dict[str, Any]) -> NoReturn:
    """Becomes the command; never returns."""
    signal.alarm(command["timeout_s"])
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["environment"])
    stdin = os.open(os.devnull, os.O_RDONLY)
    outputs = [os.open(command[name], os.O_WRONLY) for name in ("stdout", "stderr")]
    for number, file in enumerate((stdin, *outputs)):
        os.dup2(file, number)
    # As `python -m` has it: the working folder, then PYTHONPATH, then the rest.
    sys.path[:] = [command["cwd"], *os.environ["PYTHONPATH"].split(os.pathsep), *sys.path[1:]]
    sys.argv = ["compile", *command["arguments"]]
    code = 1
    try:
        from compiler.cli import main as compile_main

        compile_main(prog_name="compile")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
