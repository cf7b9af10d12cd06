"""`offload-rt serve`: an OpenAI-compatible server for the programs on this machine."""

from __future__ import annotations

import argparse
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.commands import options, prompts
from offload_rt.commands import sessions as saved
from offload_rt.commands.console import Console
from offload_rt.commands.running import machine_errors_in_a_line, open_llm
from offload_rt.errors import UsageError
from offload_rt.system.installation import install_extra

if TYPE_CHECKING:
    from offload_rt.api.llm import LLM

API_KEY = "OFFLOAD_RT_API_KEY"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
KEPT_SHARE = 0.5
"""Share of the memory that is free at first which the KV of kept contexts may take."""
PREFILL_SHARE = 0.5
GPU_PARALLEL, CPU_PARALLEL = 1, 4
"""Requests that run at a time: on a GPU they share its memory, and each of them is slower for it."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI does",
        description="Serves a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /tokenize,"
        " /health, /metrics, and a page to try it at /.",
        epilog="Clients that ask about one document share its KV; docs/desktop.md has the settings of some.",
        allow_abbrev=False,
    )
    serve.set_defaults(run=run)
    options.add_model(serve)
    options.add_configuration(serve)
    saved.add_cache(serve.add_argument_group("sessions").add_argument)
    add = serve.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    add(
        "--port",
        type=_port,
        default=8000,
        metavar="N",
        help="port to listen at (default: 8000; 0: a free one)",
    )
    add("--name", help="name of the model for clients (default: that of its folder)")
    alias = "further name by which clients may name the model; may be repeated (default: none)"
    add("--alias", action="append", default=[], metavar="NAME", help=alias)
    key = f"key that clients must send (default: that in {API_KEY}, else none)"
    add("--api-key", type=_key, metavar="KEY", help=key)
    context = "refuse to start where so many tokens do not fit (default: start anyway)"
    add("--context", type=prompts.token_count, metavar="N", help=context)
    limit = "generate at most N tokens where a request names no limit (default: 4096)"
    add("-n", "--max-new-tokens", type=prompts.token_count, default=4096, metavar="N", help=limit)
    parallel = f"requests that run at a time (default: {CPU_PARALLEL}, on a GPU {GPU_PARALLEL})"
    add("--parallel", type=prompts.positive, metavar="N", help=parallel)
    add(
        "--queue", type=prompts.positive, default=64, metavar="N", help="requests that may wait (default: 64)"
    )
    share = (
        f"share of the time that reading prompts takes while other requests run (default: {PREFILL_SHARE})"
    )
    add("--prefill-share", type=_share, default=PREFILL_SHARE, metavar="SHARE", help=share)
    meaning = "KV of contexts kept in memory, in GiB (default: half of the memory that is free)"
    add("--keep", type=_gib, metavar="GiB", help=meaning)
    body = "largest request in MiB (default: 64)"
    add("--max-body", type=prompts.positive, default=64, metavar="MiB", help=body)
    most = "connections that may be open (default: 256)"
    add("--max-connections", type=prompts.positive, default=256, metavar="N", help=most)
    cors = "site whose pages may use the server, as http://localhost:3000; may be repeated (default: none)"
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help=cors)
    wait = "seconds that running requests have to finish after SIGTERM (default: 30)"
    add("--shutdown-timeout", type=prompts.positive, default=30, metavar="S", help=wait)


def _port(text: str) -> int:
    """An argument type: a port."""
    if not text.isdecimal() or not 0 <= int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a port: use 0 to 65535")
    return int(text)


def _key(text: str) -> str:
    """An argument type: a key, which an unset variable of a shell is not."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the key is empty: give one, or leave the flag out")
    return text.strip()


def _gib(text: str) -> float:
    """An argument type: a number of GiB."""
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a number of GiB")
    return size


def _share(text: str) -> float:
    """An argument type: a share above 0, at most 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a share: use more than 0, at most 1")
    return share


def run(arguments: argparse.Namespace) -> int:
    try:
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"serve needs {error.name}: {install_extra('server')}") from None
    options.check_early(arguments)
    console = Console(quiet=False)
    with closing(_listening(arguments.host, arguments.port)) as listening:  # before the model is loaded
        size = None if arguments.context is None else (arguments.context - 1, 1)
        with machine_errors_in_a_line(), open_llm(arguments, console, size) as llm:
            _serve(llm, listening, arguments, console)
    return 0


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address. Raises UsageError where that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(
            f"{host}:{port}: cannot listen there ({error.strerror}); name another --port"
        ) from None
    return listener


def _serve(llm: LLM, listening: socket.socket, arguments: argparse.Namespace, console: Console) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    import uvicorn

    from offload_rt.server.app import Service, create_app
    from offload_rt.server.connections import connection_class
    from offload_rt.server.jobs.metrics import Metrics
    from offload_rt.server.jobs.prefixes import PrefixPool
    from offload_rt.server.jobs.worker import Worker
    from offload_rt.system.hardware import GIB
    from offload_rt.system.memory import available_memory

    name = arguments.name or Path(llm.engine.target.name).name
    on_gpu = llm.engine.target.device.type == "cuda"
    kept_bytes = available_memory() * KEPT_SHARE if arguments.keep is None else arguments.keep * GIB
    metrics = Metrics()
    worker = Worker(
        llm,
        PrefixPool(llm, int(kept_bytes), saved.cache(arguments), console.notice),
        metrics,
        parallel=arguments.parallel or (GPU_PARALLEL if on_gpu else CPU_PARALLEL),
        waiting=arguments.queue,
        prefill_share=arguments.prefill_share,
        log=console.say,
    )
    key = arguments.api_key or os.environ.get(API_KEY)
    if key is None and arguments.host not in LOOPBACK:
        console.notice(f"whoever can reach {arguments.host} may use the server: --api-key KEY asks for one")
    with closing(worker):
        service = Service(llm, worker, metrics, name, arguments.max_new_tokens, arguments.alias)
        app = create_app(
            service,
            metrics,
            api_key=key,
            body_bytes=arguments.max_body * 2**20,
            hosts=LOOPBACK if arguments.host in LOOPBACK else None,
            cors_origins=arguments.cors_origin,
        )
        host, port = listening.getsockname()[:2]
        console.say(
            f"serving    {name} at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)"
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=connection_class(arguments.max_connections),
            timeout_graceful_shutdown=arguments.shutdown_timeout,
        )
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn raises the signal again when it has shut down
            console.say(
                "ended      requests are no longer accepted; contexts are saved if a cache is configured"
            )
