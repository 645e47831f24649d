"""`megalith serve` and `tools/run_text_generation_server.py`: HTTP server for a trained model."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.arguments import (
    CommandParser,
    add_checkpoint_flags,
    add_layout_flags,
    below_one,
    layout_settings,
    load_model,
)
from megalith.cli.threads import configure_rank, spins_for
from megalith.config import RunConfig
from megalith.config.environment import first_of_machine
from megalith.config.tokenizer_flags import imported_by, tokenizer_of_flags
from megalith.config.values import local_path
from megalith.errors import CheckpointError, ConfigError, MegalithError, PeerError, install_command
from megalith.kernels.cpu.process import keep_freed_memory, return_freed_memory
from megalith.progress import task
from megalith.serve.http.settings import Defaults, Limits, ServerSettings

if TYPE_CHECKING:
    from megalith.assemble.trained import Trained
    from megalith.compat.megatron.text_generation import ServerFlags
    from megalith.distributed.context import ParallelContext
    from megalith.distributed.watchdog import Watchdog
    from megalith.nn.lora import Adapter
    from megalith.serve.engine import Engine
    from megalith.serve.http.service import Service
    from megalith.serve.model_runner import ModelRunner
    from megalith.serve.worker import Worker
    from megalith.tokenizers import Tokenizer
    from megalith.tokenizers.chat_template import ChatFormat

_say = partial(print, flush=True)
_KEY_VARIABLE = "MEGALITH_API_KEY"
_FORWARDED_WITHIN_SECONDS = 1.0
_SWITCH_INTERVAL_SECONDS = 0.001  # Python's 5 ms delay the event loop while the engine thread computes
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _server_parser() -> argparse.ArgumentParser:
    """Build the parser of the server's own flags, which both command lines share."""
    limits = Limits()
    parser = CommandParser(prog="megalith serve", add_help=False, allow_abbrev=False)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=5000, help="port to listen on; 0: any free port (default: 5000)")
    add("--api-key-file", type=local_path, metavar="FILE", help="file of accepted API keys, one per line")
    add("--api-key", action="append", default=[], metavar="KEY", help="accepted key; visible to other users in `ps`")
    add("--allowed-host", action="append", default=[], metavar="NAME", help="additional host name of this server")
    add("--allowed-origin", action="append", default=[], metavar="URL", help="origin of a page that may use the API")
    add("--i-know-it-is-open", action="store_true", help="allow --host to expose the server without a key")
    add("--served-model-name", metavar="NAME", help="model name in the API (default: name of the folder)")
    add(
        "--chat-template",
        type=local_path,
        metavar="FILE",
        help="Jinja chat template, or chatml, llama3, mistral, plain or qwen3 (default: the tokenizer's)",
    )
    add(
        "--lora",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FOLDER",
        help="serve LoRA adapters beside the model, as model:NAME in the API: a save folder, or one of PEFT",
    )
    add(
        "--lora-dir",
        type=local_path,
        metavar="DIR",
        help="let clients load and unload adapters in DIR, by /v1/load_lora_adapter (default: they cannot)",
    )
    add("--max-batch", type=int, metavar="N", help="maximum number of sequences in one step (default: 64)")
    add("--max-queue", type=int, default=limits.waiting, metavar="N", help="waiting sequences (default: %(default)s)")
    add("--cache-mib", type=int, metavar="N", help="KV cache per rank in MiB (default: at most 2048)")
    add("--max-body-bytes", type=int, default=limits.body_bytes, metavar="N", help="of a request (default: 4 MiB)")
    add(
        "--max-connections",
        type=int,
        default=limits.connections,
        metavar="N",
        help="maximum number of open connections (default: %(default)s)",
    )
    add(
        "--request-timeout",
        type=float,
        default=limits.request_seconds,
        metavar="S",
        help="maximum seconds of a request (default: %(default)g)",
    )
    add(
        "--drain-timeout",
        type=float,
        default=limits.drain_seconds,
        metavar="S",
        help="seconds to finish running requests at shutdown (default: %(default)g)",
    )
    add("--no-request-log", action="store_true", help="do not print the prompts of PUT /api")
    return parser


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="megalith serve",
        description="Serve a trained model: a page at /, OpenAI's API under /v1, Megatron's at PUT /api. Architecture "
        "and tokenizer come from the checkpoint. Under torchrun the model is sharded (--tp, --pp).",
        epilog="See docs/serving.md.",
        parents=[_server_parser()],
        allow_abbrev=False,
    )
    add_checkpoint_flags(parser)
    add_layout_flags(parser)
    return parser


@dataclass
class _ServerOptions:
    """Parsed flags of a server and its settings, and what reads adapters beside its model."""

    flags: ServerFlags
    server: ServerSettings
    read_adapters: Callable[[Path], Mapping[str, Adapter]] | None = None

    @property
    def max_batch(self) -> int:
        """Maximum number of sequences in one step."""
        return self.flags.server.max_batch or self.flags.max_batch or 64


def run(argv: Sequence[str]) -> int:
    """Serve until a signal stops the server; return the exit code."""
    from megalith.compat.megatron.text_generation import PROGRAM, ServerFlags, help_text, read_flags

    if argv and argv[0] == PROGRAM:
        if {"-h", "--help"} & set(argv):
            print(help_text() + _server_parser().format_help().partition("\n\n")[2], end="")
            return 0
        flags = read_flags(argv[1:], _server_parser())
    else:
        options = make_parser().parse_args(list(argv))
        flags = ServerFlags(
            checkpoint=options.checkpoint,
            server=options,
            defaults=Defaults(),
            iteration=options.iteration,
            dtype=options.dtype,
            tokenizer=tokenizer_of_flags(options),
            registry=imported_by(options),
            settings=layout_settings(options),
        )
    return _serve(_ServerOptions(flags, _server_settings(flags.server, flags.checkpoint)))


def check_flags(argv: Sequence[str]) -> None:
    """Check a command line of tools/run_text_generation_server.py without opening its files."""
    from megalith.compat.megatron.text_generation import read_flags

    flags = read_flags(argv, _server_parser())
    if flags.server.api_key_file is not None:
        flags.server.api_key_file, flags.server.api_key = None, ["key"]
    _server_settings(flags.server, flags.checkpoint)


def _server_settings(options: argparse.Namespace, checkpoint: Path) -> ServerSettings:
    """Return the settings of the HTTP server; ConfigError lists all invalid ones."""
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        model_name=options.served_model_name or checkpoint.resolve().name or "megalith",
        api_keys=_keys(options),
        allowed_hosts=tuple(options.allowed_host),
        allowed_origins=tuple(origin.rstrip("/") for origin in options.allowed_origin),
        open_to_all=options.i_know_it_is_open,
        adapters=tuple(options.lora),
        adapter_folder=options.lora_dir,
        log_prompts=not options.no_request_log,
        limits=Limits(
            body_bytes=options.max_body_bytes,
            connections=options.max_connections,
            waiting=options.max_queue,
            request_seconds=options.request_timeout,
            drain_seconds=options.drain_timeout,
        ),
    )
    if wrong := settings.violations() + below_one(options, "--max-batch", "--cache-mib"):
        raise ConfigError(wrong)
    return settings


def _keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = [*options.api_key, *([os.environ[_KEY_VARIABLE]] if os.environ.get(_KEY_VARIABLE) else [])]
    if options.api_key_file is not None:
        try:
            found = options.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {options.api_key_file} cannot be read: {error}") from error
        if not found:
            raise ConfigError(f"--api-key-file {options.api_key_file} is empty; write one key per line to it")
        keys += found
    return tuple(dict.fromkeys(keys))


def _serve(launch: _ServerOptions) -> int:
    first = first_of_machine(os.environ)
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} are not installed: {install_command('serve')}")
    place, threads = configure_rank(os.environ, spins_for(launch.flags.checkpoint))
    listener = None
    try:
        config = _configure(launch)
        if place.rank == 0:
            from megalith.serve.http.server import bind

            listener = bind(launch.server)
    except MegalithError as error:
        error.said = not first
        raise
    from megalith.assemble.ranks import build_watchdog, join_ranks
    from megalith.device import is_host

    watchdog = build_watchdog(config)
    watchdog.memory_flags = partial(_memory_flags, launch)
    with join_ranks(config, watchdog) as context:
        if context.rank == 0:
            for note in [*([threads] if threads else []), *launch.flags.notes]:
                _say(f"note: {note}")
        watchdog.at("load", 0)
        if is_host(context.device):
            keep_freed_memory(place.local_world_size or 1)
        tunes = bool(threads) or "OMP_NUM_THREADS" not in os.environ  # it is not the user's
        code = _serve_rank(launch, context, listener, watchdog, tunes=tunes)
        # Objects that still hold a process group would make the interpreter wait for other ranks at exit.
        gc.collect()
    return code


def _memory_flags(launch: _ServerOptions, in_step: bool) -> list[str]:
    """Return flags with which the server needs less memory on each GPU, those that cost least first."""
    cache = launch.flags.server.cache_mib
    flags = [f"--cache-mib {max(1, (cache or 2048) // 2)} (now {cache or 'at most 2048'})"]
    if in_step and launch.max_batch > 1:
        flags.append(f"--max-batch {launch.max_batch // 2} (now {launch.max_batch})")
    if launch.flags.dtype == "float32":
        flags.append("--dtype bfloat16 or float16 (now float32)")
    return [*flags, "more GPUs and a larger --tp or --pp"]


def _serve_rank(
    launch: _ServerOptions,
    context: ParallelContext,
    listener: socket.socket | None,
    watchdog: Watchdog,
    *,
    tunes: bool,
) -> int:
    """Serve on the first rank and run the model on all; return the exit code. `tunes`: the number of threads."""
    from megalith.device import is_host

    with task("starting the server"):
        trained, engine, runner = _load_engine(launch, context)
        if is_host(context.device):
            return_freed_memory()
        memory = _memory_line(runner, context)
        watchdog.at("serve", 0)
        if context.rank == 0:
            _say(memory)
        if engine is not None:
            if tunes and context.world.size == 1 and is_host(context.device):
                _tune_threads(runner, engine)
            _warm_up(trained, engine)
    if engine is not None and listener is not None:
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        return _run_engine(launch, trained, engine, listener, watchdog, has_peers=context.world.size > 1)
    in_main_thread = threading.current_thread() is threading.main_thread()
    for number in _STOP_SIGNALS if in_main_thread else ():  # the first rank receives them too and stops this one
        signal.signal(number, signal.SIG_IGN)
    runner.follow()
    return 0


def _memory_line(runner: ModelRunner, context: ParallelContext) -> str:
    """Return the line about weights and KV cache on each rank, in MiB; all ranks call it."""
    from megalith.distributed import comm

    own = (runner.weight_bytes, runner.cache.bytes)
    every = comm.all_gather_objects(own, context.world)
    weights, cache = (_range_mib(sizes) for sizes in zip(*every, strict=True))
    where = "on each rank" if len(every) > 1 else "in memory"
    return f"{where}: weights {weights} MiB, KV cache {cache} MiB (bounded by --cache-mib)"


def _range_mib(sizes: Sequence[int]) -> str:
    """Format minimum and maximum of sizes in bytes as MiB."""
    least, most = (f"{round(size / 2**20, 1):g}" for size in (min(sizes), max(sizes)))
    return least if least == most else f"{least} to {most}"


def _tune_threads(runner: ModelRunner, engine: Engine) -> None:
    """Use fewer threads than cores where and while that makes a decoding step faster, and print the first choice."""
    import torch

    from megalith.kernels.cpu.process import ThreadsUnderLoad, tune_num_threads
    from megalith.serve.runner import decoding_step

    most = torch.get_num_threads()
    step = partial(runner.run, decoding_step(runner, encodes=engine.decoder_prompt is not None))
    chosen = tune_num_threads(step, most, torch.set_num_threads)
    if chosen < most:
        _say(
            f"note: {chosen} of {most} threads, the fastest for decoding with this model; OMP_NUM_THREADS overrides it"
        )
    if most > 1:
        engine.around_step = ThreadsUnderLoad(chosen, most, torch.set_num_threads).step


def _warm_up(trained: Trained, engine: Engine) -> None:
    """Generate one token, so that lazy initialization delays no client and a broken model is found at start-up."""
    from megalith.serve.request import Finished, Request, Sampling
    from megalith.tokenizers.protocol import end_ids

    for event in engine.run(Request(end_ids(trained.tokenizer) or (0,), 1, Sampling(temperature=1.0))):
        if isinstance(event, Finished) and event.reason == "error":
            raise CheckpointError(event.message)


def _configure(launch: _ServerOptions) -> RunConfig:
    """Return the configuration of the ranks; ConfigError if the flags do not fit the model."""
    from megalith.assemble.reading import model_in, ranks_of, require_text_model, saved_args
    from megalith.compat.megatron.tasks import contradictions

    args = saved_args(launch.flags.checkpoint, launch.flags.iteration)
    model = model_in(args, launch.flags.checkpoint, launch.flags.registry)
    require_text_model(model, launch.flags.checkpoint, "a server", or_answers=True)
    if wrong := contradictions(launch.flags.stated, args, launch.flags.registry) + _missing_files(launch):
        raise ConfigError(wrong)
    return ranks_of(model, launch.flags.settings, os.environ)


def _missing_files(launch: _ServerOptions) -> list[str]:
    """Return which files beside the model are missing, before the model is loaded."""
    from megalith.tokenizers.chat_template import BUILT_IN, has_template

    template, folders = launch.flags.server.chat_template, launch.server.adapter_paths.items()
    missing = [f"--lora {name}={folder}: no such folder" for name, folder in folders if not folder.is_dir()]
    if template is not None and not has_template(str(template)):
        missing.append(f"--chat-template {template}: no such file; give a Jinja file or {', '.join(BUILT_IN)}")
    return missing


def _load_engine(launch: _ServerOptions, context: ParallelContext) -> tuple[Trained, Engine | None, Any]:
    """Load the model; return it with the engine (None but on the first rank) and the runner."""
    from megalith.serve.engine import Engine
    from megalith.serve.engine import Limits as EngineLimits
    from megalith.serve.model_runner import RankRunner, decoder_prompt_of, runner_of

    flags = launch.flags
    trained = load_model(
        flags.checkpoint, context.device, flags.iteration, flags.tokenizer, context, flags.dtype, flags.registry
    )
    blocks = _num_blocks(launch, trained, context)
    model, adapters = trained.writer, _read_adapters(launch, trained, context)
    adapts = bool(adapters) or launch.server.adapter_folder is not None
    if context.world.size == 1:
        runner = runner_of(model, blocks, packs_weights=True, adapts=adapts)
    else:
        runner = RankRunner(model, context, blocks, adapts=adapts)
    limits = EngineLimits(max_num_seqs=launch.max_batch, max_waiting=launch.server.limits.waiting)
    decoder_prompt = decoder_prompt_of(model, trained.tokenizer)
    engine = None
    if context.rank == 0:
        engine = Engine(runner, trained.tokenizer, limits, decoder_prompt=decoder_prompt)
    for number, each in enumerate(adapters, 1):
        if engine is not None:
            engine.add_adapters(number, each)
        elif isinstance(runner, RankRunner):
            runner.add_adapters(number, each)
    return trained, engine, runner


def _read_adapters(launch: _ServerOptions, trained: Trained, context: ParallelContext) -> list[Mapping[str, Adapter]]:
    """Return the adapters of --lora, in its order; the first rank prints what they take."""
    settings = launch.server
    if settings.adapter_folder is not None and context.world.size > 1:
        raise ConfigError("--lora-dir with several processes: they load adapters at the start alone; give --lora")
    if not settings.adapters and settings.adapter_folder is None:
        return []
    from megalith.assemble.adapters import adapter_reader, bytes_of

    launch.read_adapters = read = adapter_reader(trained, launch.flags.checkpoint, context)
    found = []
    for name, folder in settings.adapter_paths.items():
        found.append(read(folder))
        if context.rank == 0:
            _say(f"adapter {name}: {folder}, {bytes_of(found[-1]) / 2**20:.1f} MiB")
    return found


def _num_blocks(launch: _ServerOptions, trained: Trained, context: ParallelContext) -> int:
    """Return the number of KV-cache blocks, equal on all ranks: for all sequences if they fit, at least for one."""
    from megalith.serve.cache import block_bytes
    from megalith.serve.model_runner import BLOCK_SIZE, blocks_for

    model, encoder_decoder = trained.model.config, trained.model.config.family.encoder_decoder
    layers = -(-model.stacks["decoder"] // context.pp.size)
    groups = -(-model.query_groups // context.tp.size)
    size = block_bytes(model, layers, groups, BLOCK_SIZE, trained.model.dtype)
    one = blocks_for(model.max_position_embeddings)
    if encoder_decoder:  # encoder input and decoder output
        one += blocks_for(model.max_position_embeddings + 1)
    wanted = launch.flags.server.cache_mib
    if wanted is None:
        return max(one, min(launch.max_batch * one, (2048 << 20) // size))
    held = (wanted << 20) // size
    if held < (2 if encoder_decoder else 1):
        raise ConfigError(
            f"--cache-mib {wanted} is too small for one block; {-(-one * size >> 20)} holds a full context"
        )
    return held


def _run_engine(
    launch: _ServerOptions,
    trained: Trained,
    engine: Engine,
    listener: socket.socket,
    watchdog: Watchdog,
    *,
    has_peers: bool,
) -> int:
    """Run engine and HTTP server, each in a thread; return the exit code.

    With other ranks the engine has the other thread, because a step may wait for a rank that is gone.
    """
    from megalith.serve.http.server import stop_signals
    from megalith.serve.worker import Worker, serve_beside

    with stop_signals() as pipe:
        if not has_peers:
            serve_alone = partial(_run_server, launch, trained, engine, listener, pipe=pipe)
            return serve_beside(engine, serve_alone, watchdog.name_device_errors)

        async def serving() -> int:
            worker = Worker(engine, watchdog.find_lost_peer, watchdog.name_device_errors).start()
            try:
                return await _run_server(launch, trained, engine, listener, worker, pipe=pipe, watchdog=watchdog)
            finally:
                worker.close()

        return asyncio.run(serving())


def _make_service(launch: _ServerOptions, trained: Trained, engine: Engine, worker: Worker) -> Service:
    from megalith.serve.http.adapters import AdapterNames
    from megalith.serve.http.metrics import RequestLog
    from megalith.serve.http.service import EncoderInput, Service
    from megalith.serve.model_runner import text_ids
    from megalith.tokenizers.chat_template import ChatFormat, find_template, template_beside

    tokenizer, given = trained.tokenizer, launch.flags.server.chat_template
    template = template_beside(tokenizer) if given is None else find_template(str(given), tokenizer)
    chat = ChatFormat.of(tokenizer, template)
    format_of = partial(_chat_format_of, tokenizer=tokenizer) if given is None else lambda folder: None
    paths = dict(enumerate(launch.server.adapter_paths.values(), 1))
    formats = {number: form for number, path in paths.items() if (form := format_of(path)) is not None}
    return Service(
        worker,
        tokenizer,
        engine.context_length,
        launch.server,
        RequestLog(_say, prompts=launch.server.log_prompts),
        chat=chat,
        first_seed=launch.flags.seed,
        encoder_input=None
        if engine.decoder_prompt is None
        else EncoderInput(partial(text_ids, tokenizer), engine.max_output_tokens),
        adapters=AdapterNames(
            {name: number for number, name in enumerate(launch.server.adapter_paths, 1)},
            launch.server.adapter_folder,
            launch.read_adapters,
            format_of,
            formats,
        ),
    )


def _chat_format_of(adapters: Path, tokenizer: Tokenizer) -> ChatFormat | None:
    """Return the chat format of adapters that were fine-tuned with a template, or None."""
    from megalith.assemble.adapters import adapter_template
    from megalith.tokenizers.chat_template import ChatFormat

    template = adapter_template(adapters, tokenizer)
    return None if template is None else ChatFormat.of(tokenizer, template)


async def _run_server(
    launch: _ServerOptions,
    trained: Trained,
    engine: Engine,
    listener: socket.socket,
    worker: Worker,
    *,
    pipe: int | None,
    watchdog: Watchdog | None = None,
) -> int:
    """Run the HTTP server on a loaded model; return the exit code."""
    from megalith.serve.http.app import build_app
    from megalith.serve.http.server import serve, url_of
    from megalith.serve.worker import look_after

    service = _make_service(launch, trained, engine, worker)
    app = build_app(service, launch.flags.defaults)
    peers = asyncio.ensure_future(look_after(watchdog, worker)) if watchdog is not None else None
    try:
        debounce = _FORWARDED_WITHIN_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        fine = await serve(
            app,
            service,
            listener,
            failed=worker.failed,
            say=_say,
            greeting=_startup_lines(launch, trained, url_of(listener)),
            debounce_seconds=debounce,
            signals_from=pipe,
        )
    finally:
        if peers is not None:
            peers.cancel()
    if not fine:
        raise PeerError(f"the server ended: {service.failure}", said=True)
    return 0


def _startup_lines(launch: _ServerOptions, trained: Trained, url: str) -> list[str]:
    model = trained.model.config
    layers = " + ".join(map(str, model.stacks.values()))
    lines = [
        f"{launch.server.model_name}: {layers} layers of {model.hidden_size}, context "
        f"{model.max_position_embeddings}, iteration {trained.iteration} of {launch.flags.checkpoint}",
        f" * Running on {url}",
        f"   page {url}/   OpenAI {url}/v1   Megatron PUT {url}/api",
    ]
    if launch.server.open_to_all and not launch.server.api_keys:
        lines.append("WARNING: no API key: anyone who reaches this port can use the server")
    elif not launch.server.api_keys:
        lines.append("   this machine only; use --host and --api-key-file to serve others")
    return lines
