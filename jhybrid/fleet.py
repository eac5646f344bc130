"""Fleet: engines of a Ray cluster, an actor each, over which Ray Data spreads pieces of work. `--ray` makes one.

Ray Data ends its own actors with each data set, so engines are actors beside it that stay: each has a messenger, which
is Ray Data's, and hands it one piece after the other. An engine that dies is started again and its piece done anew, so
nothing is lost; answers carry their numbers, so none is taken twice. This process never touches an accelerator: on the
cluster's head, an actor may need it.
"""

import logging
import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from jhybrid.errors import ConfigError, EngineDeadError, JhybridError

ATTEMPTS = 3
"""Times that a piece of work is begun, each but the first after an engine died at it: it may be what kills them."""
PIECES = 4
"""Pieces for each engine, at least, where there is work enough: so that none waits long for the last one."""

Work = Callable[[Any], Any]
log = logging.getLogger("jhybrid")


@dataclass(frozen=True)
class RayOptions:
    """Where the work is done."""

    ray: bool = False
    """Spread the work over a Ray cluster, an engine in each actor."""
    ray_address: str | None = None
    """The cluster, or `auto`. None: $RAY_ADDRESS, or a cluster of this machine for this run."""
    num_actors: int | None = None
    """Engines. None: as many as the accelerators suffice for; without accelerators, one for each machine."""
    actor_cpus: float = 1.0
    """CPUs that each engine is counted as."""
    actor_gpus: float | None = None
    """GPUs of each engine. None: tensor_parallel_size where the cluster has any."""
    actor_resources: tuple[str, ...] = ()
    """Other resources of each engine, as NAME=AMOUNT. TPU is tensor_parallel_size where the cluster has any."""

    def __post_init__(self) -> None:
        if isinstance(self.actor_resources, str):  # as the harness's model_args have it, which know no lists
            object.__setattr__(self, "actor_resources", tuple(self.actor_resources.split("+")))
        if not self.ray:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise ConfigError(field.name, f"{getattr(self, field.name)!r} has no effect without ray")
        if self.num_actors is not None and (not isinstance(self.num_actors, int) or self.num_actors < 1):
            raise ConfigError("num_actors", f"must be a positive integer, got {self.num_actors!r}")
        for name in ("actor_cpus", "actor_gpus"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(name, f"must not be negative, got {getattr(self, name)!r}")
        self.resources()

    def resources(self) -> dict[str, float]:
        """`actor_resources` by name. Raises ConfigError for what is no NAME=AMOUNT."""
        found: dict[str, float] = {}
        for text in self.actor_resources:
            name, _, amount = text.partition("=")
            try:
                found[name] = float(amount)
            except ValueError as error:
                raise ConfigError("actor_resources", f"{text!r} is no NAME=AMOUNT, as TPU=4 is") from error
        return found

    def demand(self, cluster: dict[str, float], devices: int) -> dict[str, float]:
        """What one engine of some devices takes of a cluster that has these resources in all."""
        own = self.resources()
        gpus = self.actor_gpus
        if gpus is None:
            gpus = float(devices) if cluster.get("GPU") else 0.0
        if not gpus and cluster.get("TPU"):
            own.setdefault("TPU", float(devices))
        return {name: amount for name, amount in ({"CPU": self.actor_cpus, "GPU": gpus} | own).items() if amount}

    def engines(self, machines: Sequence[dict[str, float]], demand: dict[str, float]) -> int:
        """How many engines to start on machines that have these resources each."""
        if self.num_actors is not None:
            return self.num_actors
        accelerators = {name: amount for name, amount in demand.items() if name in ("GPU", "TPU")}
        return max(1, int(room_for(accelerators, machines)) if accelerators else len(machines))


def room_for(demand: dict[str, float], machines: Sequence[dict[str, float]]) -> float:
    """How many engines the machines have room for, none of which can be on two of them."""
    if not demand:
        return math.inf
    spare = 1e-6  # 1.0 holds ten of 0.1
    return sum(min(int(own.get(name, 0) / amount + spare) for name, amount in demand.items()) for own in machines)


class Fleet:
    """A connection to a cluster, and engines there. Raises ConfigError without Ray, and if the cluster will not do."""

    def __init__(self, options: RayOptions, build: Callable[[], Work], devices: int = 1):
        """`build` makes, in its actor, what does the work there; it is pickled. `devices` is how many accelerators one
        engine takes.
        """
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ConfigError("ray", f"Ray is needed ({error}); install it: pip install 'jhybrid[ray]'") from error
        self._build, self._engines = build, list[Any]()
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=options.ray_address, include_dashboard=False, logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError("ray_address", f"{options.ray_address!r} cannot be reached: {error}") from error
        cluster: dict[str, float] = {**ray.cluster_resources()}
        self.demand = options.demand(cluster, devices)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.num_engines = options.engines(machines, self.demand)
        if self.num_engines > (room := room_for(self.demand, machines)):
            self.close()
            each = " and ".join(f"{amount:g} {name}" for name, amount in self.demand.items())
            there = ", ".join(f"{cluster.get(name, 0):g} {name}" for name in self.demand)
            raise ConfigError(
                "num_actors",
                f"{self.num_engines} of {each} each, and the cluster's machines have room for {room} ({there} in all); "
                "lower it or what each takes, or add machines",
            )

    def map(self, pieces: Sequence[Any]) -> Iterator[Any]:
        """Answers to the pieces, in their order, as they come. Pieces are pickled; engines stay for the next ones.

        Raises JhybridError with what an engine's start or its work raised, and if a piece is lost again and again.
        """
        import ray
        import ray.data
        from ray.exceptions import RayError

        if not pieces:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        self._start(min(self.num_engines, len(pieces)))
        turns = ray.remote(num_cpus=0)(Turns).remote()
        rows = [{"number": i, "piece": pickle.dumps(piece)} for i, piece in enumerate(pieces)]
        answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Messenger,  # pyright: ignore[reportArgumentType] - it wants a function; a class is what makes actors
            fn_constructor_args=(self._engines, turns),
            compute=ray.data.ActorPoolStrategy(size=len(self._engines), max_tasks_in_flight_per_actor=2),
            num_cpus=0,
        )
        taken = 0
        try:
            for row in answers.iter_rows():
                if row["number"] != taken:
                    raise JhybridError(f"the cluster gave answer {row['number']} where {taken} was due")
                taken += 1
                answer, fault = pickle.loads(row["answer"])
                if fault is not None:
                    raise JhybridError(fault)
                yield answer
        except RayError as error:
            raise JhybridError(f"the cluster failed at piece {taken} of {len(rows)}: {error}") from error
        if taken != len(rows):
            raise JhybridError(f"the cluster gave {taken} answers to {len(rows)} pieces of work")

    def _start(self, count: int) -> None:
        """Have at least so many engines."""
        import ray

        demand = dict(self.demand)
        actor = ray.remote(
            num_cpus=demand.pop("CPU", 0),
            num_gpus=demand.pop("GPU", 0),
            resources=demand,
            max_restarts=-1,
            max_task_retries=ATTEMPTS - 1,
        )(EngineActor)
        while len(self._engines) < count:
            self._engines.append(actor.remote(self._build))

    def pieces(self, items: Sequence[Any], most: int) -> list[Sequence[Any]]:
        """Items in runs of at most `most`, and short enough that every engine has several."""
        size = max(1, min(most, -(-len(items) // (PIECES * self.num_engines))))
        return [items[at : at + size] for at in range(0, len(items), size)]

    def close(self) -> None:
        """End the engines and leave the cluster; one that was started for this run ends. Harmless when repeated."""
        import ray

        while self._engines:
            ray.kill(self._engines.pop())
        if self._ours:
            self._ours = False
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Turns:
    """Tells messengers apart; an actor beside them."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        self._next += 1
        return self._next - 1


class EngineActor:
    """An engine in a process of its own, that does one piece of work after the other."""

    def __init__(self, build: Callable[[], Work]):
        self._build, self._work = build, None

    def answer(self, piece: bytes) -> bytes:
        """The answer, or None and what went wrong, pickled. The engine is built with the first piece, so that it counts
        as an attempt if it takes the process with it.
        """
        answer, fault = None, None
        try:
            self._work = self._work or self._build()
            answer = self._work(pickle.loads(piece))
        except EngineDeadError as error:
            log.error("the engine is dead, and its actor goes with it", exc_info=error)
            os._exit(70)  # Ray starts another in its place, with the same piece
        except Exception as error:  # noqa: BLE001 - Ray would tell of it in a form of its own
            fault = _described(error)
        return pickle.dumps((answer, fault))


class Messenger:
    """What Ray Data makes an actor of: hands pieces to one of the engines."""

    def __init__(self, engines: Sequence[Any], turns: Any):
        import ray

        turn: Any = ray.get(turns.take.remote())
        self._engine = engines[turn % len(engines)]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayActorError

        number = row["number"]
        try:
            answer = ray.get(self._engine.answer.remote(row["piece"]))
        except RayActorError:
            fault = f"an engine's process ended each time that piece {number} of the work was begun"
            answer = pickle.dumps((None, fault))
        return {"number": number, "answer": answer}


def _described(error: Exception) -> str:
    """An error as the run's own process tells it; the actor's log has where it came from, if it was none of ours."""
    if isinstance(error, JhybridError):
        return str(error)
    log.error("an engine's work failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
