"""Names of rewards in metrics."""

from pathlib import Path

from swiftlite.args.commands import GrpoArgs


def reward_names_of(args: GrpoArgs) -> list[str]:
    """Return the names of the reward functions, then of the reward models, then of the servers."""
    return [*args.reward_funcs, *map(name_of, args.reward_model), *map(name_of_server, args.reward_server)]


def name_of(reward_model: str) -> str:
    """Return the name of a reward model in metrics: the last part of its directory."""
    return Path(reward_model).expanduser().absolute().name


def name_of_server(url: str) -> str:
    """Return the name of the reward model of a server in metrics: HOST:PORT, and a path if there is one."""
    return url.partition("://")[2].rstrip("/")
