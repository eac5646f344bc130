"""Fleet: engines of a Ray cluster, an actor each, over which Ray Data spreads pieces of work. `--ray` makes one.

An actor that dies is started again and its piece done anew, so nothing is lost; answers carry their numbers, so none is
taken twice. This process never touches an accelerator: on the cluster's head, an actor may need it.
"""

import logging
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from jhybrid.errors import ConfigError, EngineDeadError, JhybridError

ATTEMPTS = 3
"""Times that a piece of work is begun, each but the first after an actor died at it: it may be what kills them."""
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
    """A connection to a cluster. Raises ConfigError if Ray is not installed or the cluster cannot be reached."""

    def __init__(self, options: RayOptions, devices: int = 1):
        """`devices` is how many accelerators one engine takes."""
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ConfigError("ray", f"Ray is needed ({error}); install it: pip install 'jhybrid[ray]'") from error
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

    def map(self, build: Callable[[], Work], pieces: Sequence[Any]) -> Iterator[Any]:
        """Answers to the pieces, in their order, as they come: `build()(piece)`, built once in each actor.

        Both `build` and the pieces are pickled. Raises JhybridError with what an actor's `build` or work raised, and if
        a piece is lost again and again.
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
        register = ray.remote(num_cpus=0)(Register).remote()
        rows = [{"number": i, "piece": pickle.dumps(piece)} for i, piece in enumerate(pieces)]
        demand = dict(self.demand)
        answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Actor,  # pyright: ignore[reportArgumentType] - it wants a function; a class is what makes actors
            fn_constructor_args=(build, register),
            compute=ray.data.ActorPoolStrategy(size=min(self.num_engines, len(rows)), max_tasks_in_flight_per_actor=2),
            num_cpus=demand.pop("CPU", 0),
            num_gpus=demand.pop("GPU", 0),
            resources=demand,
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

    def pieces(self, items: Sequence[Any], most: int) -> list[Sequence[Any]]:
        """Items in runs of at most `most`, and short enough that every engine has several."""
        size = max(1, min(most, -(-len(items) // (PIECES * self.num_engines))))
        return [items[at : at + size] for at in range(0, len(items), size)]

    def close(self) -> None:
        """Leave the cluster; one that was started for this run ends. Harmless when repeated."""
        import ray

        if self._ours:
            self._ours = False
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Register:
    """How often each piece was begun; an actor beside the driver that outlives the engines."""

    def __init__(self) -> None:
        self._begun: Counter[int] = Counter()

    def begin(self, number: int) -> int:
        self._begun[number] += 1
        return self._begun[number]


class Actor:
    """What Ray makes an actor of: one engine's work on one piece after the other."""

    def __init__(self, build: Callable[[], Work], register: Any):
        self._register = register
        self._fault: str | None = None
        try:
            self._work = build()
        except Exception as error:  # noqa: BLE001 - whatever it is, Ray would start the actor again for ever
            self._fault = _described(error)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import ray

        answer, fault = None, self._fault
        begun: Any = ray.get(self._register.begin.remote(row["number"]))
        if fault is None and begun > ATTEMPTS:
            fault = f"an engine's process ended each time that piece {row['number']} of the work was done"
        if fault is None:
            try:
                answer = self._work(pickle.loads(row["piece"]))
            except EngineDeadError as error:
                log.error("the engine is dead, and its actor goes with it", exc_info=error)
                os._exit(70)  # the piece goes to another engine
            except Exception as error:  # noqa: BLE001 - Ray Data would tell of it without its cause
                fault = _described(error)
        return {"number": row["number"], "answer": pickle.dumps((answer, fault))}


def _described(error: Exception) -> str:
    """An error as the run's own process tells it; the actor's log has where it came from, if it was none of ours."""
    if isinstance(error, JhybridError):
        return str(error)
    log.error("an engine's work failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
