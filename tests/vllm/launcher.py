"""Runs Python scripts that use vLLM in processes that need not import it.

A launcher is an interpreter that has imported vLLM once and computed nothing. For each script it
forks a child, which has a session, a folder, an environment and a log of its own, runs the script
as `python script arguments...` would, and ends. Nothing that one script does is seen by the next.
The launcher's interpreter and packages are those of the process that starts it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

IMPORTED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.lora.worker_manager",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.anthropic.protocol",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.kv_offload.cpu.spec",
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "vllm.v1.pool.flash_maxsim",
    "kvstore.vllm.identity.identity",
    "kvstore.vllm.manager",
    "kvstore.vllm.spec",
    "kvstore.vllm.weights",
    "kvstore.vllm.worker",
    "kvstore.vllm.metrics_report",
    "kvstore.tiers.disk.io",
)
"""What every engine imports, or most of them."""

READ_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_")
"""Variables whose names begin like this are read when an interpreter or a library starts.

`PYTHONPATH` is an exception: a child looks in those folders that its launcher did not know of.
"""


class Launcher:
    """A process that runs one script after the other, each in a child.

    Attributes:
        environment: the one that it was started in.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a child may have this environment: the launcher was started in another."""
        names = {name for name in environment.keys() | self.environment if _early(name)}
        return all(environment.get(name) == self.environment.get(name) for name in names)

    def run(
        self, arguments: list[str], folder: Path, environment: dict[str, str], log: Path
    ) -> Child:
        """Start a script; `log` gets its standard output and error.

        The child before it must have ended, and the environment must be one that fits.
        RuntimeError: the launcher has ended, such as where vLLM cannot be imported.
        """
        told = {
            "arguments": arguments,
            "folder": str(folder),
            "environment": environment,
            "log": str(log),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
        return Child(int(self.answer(None)), self)

    def end(self) -> None:
        """End it; a child that still runs goes on."""
        self._process.kill()
        self._process.wait()

    def answer(self, seconds: float | None) -> bytes:
        """The next line that the launcher says. TimeoutExpired: not in so many seconds."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired("a script", seconds or 0.0)
        line: bytes = output.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the launcher has ended:\n{self._log.read().decode()}")
        return line


class Child:
    """A process that runs a script, as far as its starter needs it."""

    def __init__(self, pid: int, launcher: Launcher) -> None:
        self.pid = pid
        self._launcher = launcher
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal. TimeoutExpired: it still runs."""
        if self._status is None:
            self._status = int(self._launcher.answer(timeout))
        return self._status

    def poll(self) -> int | None:
        """Its exit status; None: it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._status


def _early(name: str) -> bool:
    return name.startswith(READ_AT_START) and name != "PYTHONPATH"


def serve() -> None:
    """Fork a child for each line of standard input, and wait for it. Ends with the input."""
    answers = os.dup(1)
    # Whatever an import prints is not an answer.
    os.dup2(2, 1)
    # Modules of the tests shall not hide others.
    del sys.path[0]
    sys.path.insert(0, str(EXAMPLES))
    from rounds import ENVIRONMENT

    os.environ.update({**ENVIRONMENT, **os.environ})
    before = dict(os.environ)
    # A quarter of the time of these imports is collections that find nothing.
    gc.disable()
    for name in IMPORTED:
        # Those that vLLM cannot do without are missed by every child.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    replace_kernels()
    leave_uncompiled()
    # Some imports set variables for what comes after.
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    # Children look through their own objects only.
    gc.collect()
    gc.freeze()
    gc.enable()
    keep_frozen()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers)
            told = json.loads(line)
            told["environment"] |= added
            become(told)
        os.write(answers, b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))


def replace_kernels() -> None:
    """Look once, not in each child, through all modules for kernels that need Triton.

    An engine on a CPU without Triton does so when its worker starts, and replaces them.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.register_triton_kernel_overrides()
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


UNCOMPILED = (
    ("vllm.v1.sample.sampler", "batched_count_greater_than"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "get_masked_input_and_mask"),
)
"""What a request for log probabilities, and each of several workers, compiles when it begins."""


def leave_uncompiled() -> None:
    """Run some short functions as they are written: to compile them takes each child seconds."""
    for module, name in UNCOMPILED:
        with contextlib.suppress(ImportError, AttributeError):
            its = importlib.import_module(module)
            setattr(its, name, getattr(its, name)._torchdynamo_orig_callable)


def keep_frozen() -> None:
    """Leave what the launcher has imported frozen in each child; vLLM unfreezes all at its end.

    A collection would then look through a million objects and copy the pages of all of them, which
    takes longer than the start of an engine. What a child makes itself is collected as ever.
    """
    functions: Any = gc
    functions.freeze = functions.unfreeze = lambda: None


def become(told: dict[str, Any]) -> None:
    """Run the script in this process, and end it."""
    os.setsid()
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    for number, (path, flags) in enumerate(
        [
            (os.devnull, os.O_RDONLY),
            (told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
        ]
    ):
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    script = told["arguments"][0]
    sys.argv = told["arguments"]
    sys.path[0] = str(Path(script).parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    if "KVSTORE_FORKED" in os.environ:
        # vLLM's own way, but for a model on a CPU, whose threads it fears: none have been started.
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # The end of a child of `multiprocessing`: everything that an interpreter does at its end, but
    # it does not take its thousands of modules apart.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
