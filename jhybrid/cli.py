"""The command line: a dataclass for each command, whose fields are its flags. All of them take `--json`."""

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
import tyro.extras
from rich.console import Console
from rich.logging import RichHandler
from tyro.conf import OmitArgPrefixes, Positional, arg

from jhybrid.config import EngineConfig, api_keys, environment
from jhybrid.errors import JhybridError
from jhybrid.evaluate.commands import BatchCommand, EvalCommand, PerplexityCommand, ScoreCommand
from jhybrid.logs import LogFormat, log_to_stderr
from jhybrid.profiler.config import ProfileConfig
from jhybrid.progress import progress
from jhybrid.request import Request, SamplingParams
from jhybrid.train.recipe import TrainConfig

Config = OmitArgPrefixes[EngineConfig]


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling, in the names that LLM servers share."""

    max_tokens: int = 128
    """Most tokens of the answer."""
    min_tokens: int = 0
    """No end token or stop string before this many tokens."""
    temperature: float = 0.7
    """0 is greedy."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 for off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens of this total probability."""
    min_p: float = 0.0
    """Leave out tokens below this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Same seed, same answer."""
    n: int = 1
    """Answers per prompt."""
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens per position."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """Go on after end tokens."""

    def params(self) -> SamplingParams:
        """The same as SamplingParams."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return SamplingParams(**fields | {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)})


@dataclass(frozen=True)
class Generate:
    """Answer prompts; the text is streamed when there is one prompt."""

    prompt: Annotated[tuple[str, ...], arg(aliases=["-p"])]
    """Prompts; `-` reads one from standard input."""
    engine: Config = field(default_factory=EngineConfig)
    sampling: OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    json: bool = False
    """One JSON object per prompt."""

    def run(self) -> None:
        from jhybrid.engine import Engine
        from jhybrid.weights.load import read_model

        prompts = [sys.stdin.read() if text == "-" else text for text in self.prompt]
        params = self.sampling.params()
        params.validate(read_model(self.engine)[0].vocab_size)  # before it is loaded and compiled
        with Engine(self.engine) as engine:
            if len(prompts) == 1 and params.n == 1 and not self.json:
                for delta in engine.stream(Request(prompt=prompts[0], sampling=params)):
                    print(delta.text, end="", flush=True)
                    if delta.error is not None:
                        raise JhybridError(delta.error)
                print()
                return
            outputs = engine.generate([Request(prompt=p, sampling=params) for p in prompts])
            for prompt, output in zip(prompts, outputs, strict=True):
                if self.json:
                    print(json.dumps({"prompt": prompt} | dataclasses.asdict(output), ensure_ascii=False))
                    continue
                for completion in output.completions:
                    print(f"--- {prompt!r} [{completion.index}] {completion.error or completion.finish_reason}")
                    print(completion.text)
            if errors := [c.error for output in outputs for c in output.completions if c.error]:
                raise JhybridError(f"not every prompt was answered: {errors[0]}")


@dataclass(frozen=True)
class Inspect:
    """Show a model's layers, cache parts, memory plan and buckets, without reading its weights."""

    engine: Config = field(default_factory=EngineConfig)
    gpu: Literal["h100", "h200"] | None = None
    """Compile the largest steps for this GPU, or as many as tensor_parallel_size, which need not be there, and plan
    their memory. Takes minutes."""
    json: bool = False
    """One JSON object."""

    def run(self) -> None:
        from jhybrid.fit import Fit, Site
        from jhybrid.inspection import inspect_model, print_inspection
        from kernels_pallas.gpus import GPUS

        facts = inspect_model(self.engine, None if self.gpu is None else "gpu")
        if self.gpu is not None:
            facts["fit"] = Fit(self.engine, Site.gpu(GPUS[self.gpu], self.engine.tensor_parallel_size)).report()
        if self.json:
            print(json.dumps(facts))
        else:
            print_inspection(facts, Console())


@dataclass(frozen=True)
class Compile:
    """Compile every step for a TPU slice, which need not be there, or for this machine; show what fits into memory.

    The model needs no weights: a directory with a config.json will do. What does not fit is refused with numbers.
    """

    engine: Config = field(default_factory=EngineConfig)
    config: Path | None = None
    """TOML file with settings and a table [slice], such as tpu_configs/v5e-8.toml; flags win over it. Without a [slice]
    the devices of this machine are compiled for."""
    output: Path | None = None
    """New folder for a bundle, which `--bundle` loads instead of compiling. None: nothing is kept."""
    json: bool = False
    """One JSON object."""

    @classmethod
    def of(cls, arguments: list[str]) -> "Compile":
        """What flags and file say together."""
        return _settled(cls, "compile", arguments, flags_only=("config", "output", "json"))

    def run(self) -> None:
        from jhybrid.fit import Fit, Site
        from jhybrid.inspection import print_fit
        from jhybrid.slices import read_slice

        slice_ = None if self.config is None else read_slice(self.config)
        fit = Fit(self.engine, Site.here(self.engine) if slice_ is None else Site.slice(slice_, self.engine))
        report = fit.report(fit.buckets) if self.output is None else fit.write(self.output)
        if self.json:
            print(json.dumps(report))
            return
        print_fit(report, Console())
        if self.output is not None:
            print(f"{self.output}: give the same settings and --bundle {self.output}")


@dataclass(frozen=True)
class Convert:
    """Write a Hugging Face directory as a native (Orbax) checkpoint, or a native one as a Hugging Face directory."""

    source: Positional[str]
    """Directory of the model, or demo."""
    destination: Positional[Path]
    """New or empty directory."""
    dtype: str = "auto"
    """auto as the checkpoint's config.json says | float32 | bfloat16."""
    quantization: str = "auto"
    """Weights in 8 bits: auto keeps them | none expands them | int8 | fp8 rounds plain ones."""
    json: bool = False
    """One JSON object."""

    def run(self) -> None:
        from jhybrid.weights.convert import convert

        facts = convert(self.source, self.destination, dtype=self.dtype, quantization=self.quantization)
        if self.json:
            print(json.dumps(facts))
            return
        print(
            f"{self.destination}: {facts['form']}, {facts['num_parameters']:,} parameters in {facts['bytes']:,} bytes, "
            f"{facts['dtype']}" + (f", {facts['quantization']}" if facts["quantization"] else "")
        )


@dataclass(frozen=True)
class Bench:
    """Measure the engine: prefill and decode tokens per second, host time per step, start-up."""

    engine: Config = field(default_factory=lambda: EngineConfig(max_num_seqs=32, max_model_len=1024))
    batch_sizes: tuple[int, ...] = (1, 8, 16, 32)
    """Sequences decoded at once."""
    prefill_tokens: int = 512
    """Length of the prompt whose prefill is timed."""
    prompt_tokens: int = 32
    """Prompt length of the decode runs."""
    output_tokens: int = 32
    """Tokens decoded per sequence."""
    repeats: int = 3
    """Runs of each; the median is reported."""
    json: bool = False
    """One JSON object."""

    def run(self) -> None:
        from jhybrid.bench import measure, print_figures

        figures = measure(
            self.engine,
            batch_sizes=self.batch_sizes,
            prefill_tokens=self.prefill_tokens,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            repeats=self.repeats,
        )
        if self.json:
            print(json.dumps(figures))
        else:
            print_figures(figures, Console())


@dataclass(frozen=True)
class Profile:
    """Measure steps on really prefilled caches over a grid of batch, context and prompt; fit a latency model."""

    engine: Config = field(default_factory=EngineConfig)
    profile: OmitArgPrefixes[ProfileConfig] = field(default_factory=ProfileConfig)
    config: Path | None = None
    """TOML file with settings, in the names of the flags; flags win over it."""
    output: Path = Path("jhybrid-profile")
    """Folder for rows.jsonl, latency_model.json and the plot; a killed run goes on from what is there."""
    plot: Path | None = None
    """File for the plot (.png, .svg or .pdf). None: steps.svg in the folder, where matplotlib is installed."""
    compare: tuple[Path, Path] | None = None
    """Measure nothing; compare two such folders point by point."""
    json: bool = False
    """One JSON object for each point, and one for all, instead of tables."""

    @classmethod
    def of(cls, arguments: list[str]) -> "Profile":
        """What flags and file say together."""
        return _settled(cls, "profile", arguments, flags_only=("config", "compare", "json"))

    def run(self) -> None:
        from jhybrid.engine import Engine
        from jhybrid.profiler.compare import compare, print_comparison
        from jhybrid.profiler.plot import check_plot, has_matplotlib, plot_profile
        from jhybrid.profiler.run import make_folder, read_profile, run_profile
        from jhybrid.profiler.table import print_profile

        if self.compare is not None:
            a, b = self.compare
            comparison = compare(read_profile(a), read_profile(b))
            if self.json:
                print(*map(json.dumps, comparison.describe()), sep="\n")
            else:
                print_comparison(comparison, Console())
            return
        plot = self.plot or (self.output / "steps.svg" if has_matplotlib() else None)
        if plot is not None:
            check_plot(plot)
        if self.engine.max_model_len is not None:
            self.profile.axes(self.engine, self.engine.max_model_len)  # refused before the model is loaded
        make_folder(self.output)
        try:
            with contextlib.ExitStack() as stack:
                engine = stack.enter_context(Engine(self.engine, max_parked=self.profile.chains))
                bar = lambda total: stack.enter_context(progress("points", total))  # noqa: E731
                found = run_profile(engine, self.profile, self.output, bar)
        except KeyboardInterrupt:
            print(f"interrupted; the same command again goes on from {self.output}", file=sys.stderr)
            raise
        if plot is not None and found.measured:
            plot_profile(found, plot)
        if self.json:
            print(*map(json.dumps, [*found.rows, {"summary": found.summary}]), sep="\n")
        else:
            print_profile(found, Console())
            made = ", latency_model.json" + (f"; {plot}" if plot else "") if found.measured else ""
            print(f"{self.output}: rows.jsonl{made}")


@dataclass(frozen=True)
class Serve:
    """Serve a model over HTTP (OpenAI's API) and gRPC until SIGTERM; prints what and where when ready.

    Each flag can also be a key of the TOML file `--config`, or an environment variable (JHYBRID_MAX_NUM_SEQS).
    Flags win over the environment, the environment over the file.
    """

    engine: Config = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """Of HTTP; 0 picks a free port."""
    grpc_port: int = 50051
    """0 picks a free port."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys that let clients in (in $JHYBRID_API_KEY comma-separated); none lets everybody in."""
    tls_cert: str | None = None
    """Certificate chain (PEM) of both servers; with tls_key, connections are encrypted."""
    tls_key: str | None = None
    """Private key (PEM) of tls_cert."""
    tls_ca: str | None = None
    """Authority (PEM) whose clients alone may connect."""
    served_model_name: str | None = None
    """Name that clients use; the model argument unless given."""
    tool_call_parser: str = "auto"
    """How the model writes calls of tools: hermes, qwen3_coder, nemotron_json, lfm2, kimi_k2, jamba, none, or auto,
    which is what the chat template shows."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: think, none, or auto, which is what the chat template shows."""
    stream_interval: int = 1
    """Tokens of one event of a stream, of which the first has one: more cost less and come later."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    watchdog_seconds: float = 120.0
    """Health turns NOT_SERVING when no step ends for so long though there is work; 0 for never."""
    log_format: LogFormat = "text"
    """Log lines for people or, as JSON, for programs."""
    log_prompts: bool = False
    """Have the prompts in the log lines of calls."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) for a span per call; needs the extra `otel`."""
    config: Path | None = None
    """TOML file with settings; also from $JHYBRID_CONFIG."""
    print_config: bool = False
    """Print the settings as such a file, API keys left out, and leave."""
    json: bool = False
    """What is printed when ready as a JSON object."""

    @classmethod
    def of(cls, arguments: list[str]) -> "Serve":
        """What flags, environment and file say together."""
        from jhybrid.settings import Settings

        settings = Settings(cls, flags_only=("config", "print_config", "json"), secret=("api_key",))
        variables = environment()
        from_environment = variables.pop("JHYBRID_CONFIG", None)
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config", default=from_environment)
        path = first.parse_known_args(arguments)[0].config
        if path:
            settings.read_file(Path(path))
        settings.read_environment(variables)
        with settings.blamed(arguments):
            command = tyro.cli(cls, prog="jhybrid serve", args=arguments, default=settings.defaults())
        command = settings.with_secrets(command)
        if command.print_config:
            print(settings.as_toml(command), end="")
            sys.exit(0)
        return command

    def run(self) -> None:
        from jhybrid_server.dialect import Parsers
        from jhybrid_server.main import Listening, serve
        from jhybrid_server.tls import ServerTls

        log_to_stderr(self.log_format)
        tls = ServerTls.of(self.tls_cert, self.tls_key, self.tls_ca)

        sys.exit(
            serve(
                self.engine,
                Listening(self.host, self.port, self.grpc_port, self.api_key, tls),
                served_model_name=self.served_model_name,
                drain_timeout=self.drain_timeout,
                watchdog_seconds=self.watchdog_seconds,
                log_prompts=self.log_prompts,
                otlp_traces_endpoint=self.otlp_traces_endpoint,
                json_output=self.json,
                parsers=Parsers(self.tool_call_parser, self.reasoning_parser),
                stream_interval=self.stream_interval,
            )
        )


@dataclass(frozen=True)
class ClientCommand:
    """Ask a running server; the text is streamed."""

    prompt: Annotated[tuple[str, ...], arg(aliases=["-p"])]
    """Prompts; `-` reads one from standard input."""
    target: str = "127.0.0.1:50051"
    """host:port of the server."""
    sampling: OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    timeout: float | None = None
    """Seconds after which the call is given up, on the server too."""
    wait_seconds: float = 0.0
    """Wait that long for a server that is still starting."""
    api_key: str | None = None
    """Also from $JHYBRID_API_KEY."""
    tls: bool = False
    """Encrypt, and trust the system's authorities."""
    tls_ca: str | None = None
    """Encrypt, and trust this authority (PEM)."""
    tls_cert: str | None = None
    """The client's own certificate (PEM), for a server that asks for one."""
    tls_key: str | None = None
    """Private key (PEM) of tls_cert."""
    json: bool = False
    """One JSON object per prompt."""

    def run(self) -> None:
        from jhybrid_server.main import client
        from jhybrid_server.tls import ClientTls

        prompts = [sys.stdin.read() if text == "-" else text for text in self.prompt]
        key = self.api_key or next(iter(api_keys()), None)
        encrypt = self.tls or self.tls_ca is not None
        tls = ClientTls(self.tls_ca, self.tls_cert, self.tls_key) if encrypt else None
        client(self.target, prompts, self.sampling.params(), self.timeout, self.json, self.wait_seconds, key, tls)


@dataclass(frozen=True)
class Train:
    """Train a small native model; the embedded demo model came from `--preset demo`."""

    run_: OmitArgPrefixes[TrainConfig]

    def run(self) -> None:
        from jhybrid.train.trainer import train

        train(self.run_)


Settled = TypeVar("Settled")


def _settled(kind: type[Settled], name: str, arguments: list[str], flags_only: tuple[str, ...]) -> Settled:
    """A command from its flags and the file that `--config` names."""
    from jhybrid.settings import Settings

    settings = Settings(kind, flags_only=flags_only)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    path = first.parse_known_args(arguments)[0].config
    if path is not None:
        settings.read_file(path)
    with settings.blamed(arguments):
        return tyro.cli(kind, prog=f"jhybrid {name}", args=arguments, default=settings.defaults())


COMMANDS = {
    "serve": Serve,
    "client": ClientCommand,
    "generate": Generate,
    "score": ScoreCommand,
    "perplexity": PerplexityCommand,
    "eval": EvalCommand,
    "batch": BatchCommand,
    "inspect": Inspect,
    "compile": Compile,
    "convert": Convert,
    "bench": Bench,
    "profile": Profile,
    "train": Train,
}


def main() -> None:
    """Entry point of `jhybrid`."""
    asks_json = "--json" in sys.argv
    try:
        _log_to_stderr()
        settled = {"serve": Serve, "profile": Profile, "compile": Compile}.get(sys.argv[1] if sys.argv[1:] else "")
        command = (
            settled.of(sys.argv[2:])
            if settled is not None
            else tyro.extras.subcommand_cli_from_dict(
                COMMANDS, prog="jhybrid", description="Inference engine for hybrid language models on JAX."
            )
        )
        command.run()
    except JhybridError as error:
        if asks_json:
            print(json.dumps({"error": str(error), "field": getattr(error, "field", None)}))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _log_to_stderr() -> None:
    """What anybody should know of; `serve` has logs of its own."""
    handler = RichHandler(console=Console(stderr=True), show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])


if __name__ == "__main__":
    main()
