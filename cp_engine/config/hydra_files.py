"""Configuration files as Hydra reads them here: small and regular ones, and a user's in front of none that ships."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import hydra.conf
import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from cp_engine.config.bounded import reason_of, require_bounded_yaml, text_of
from cp_engine.config.shipped import conf_dir
from cp_engine.errors import ConfigError, Problem, Reason


class _Bounded(FileConfigSource):
    """Hydra's reader of files, which reads small and regular ones only."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            if Path(self.path) != conf_dir():
                require_bounded_yaml(text_of(path))
            result = super().load_config(config_path)
            if OmegaConf.select(result.config, "hydra.searchpath") is not None:  # a package is imported to be searched
                raise Reason("sets hydra.searchpath, which is typed: hydra.searchpath=[...]")
            return result
        except (OSError, ValueError, yaml.YAMLError, Reason) as error:
            raise ConfigError([Problem(key=str(path), what=reason_of(error))]) from error


@contextmanager
def reading() -> Iterator[None]:
    """Bounds what Hydra reads, for the time of one command or composition."""
    Plugins.instance()  # which registers Hydra's own
    readers = SourcesRegistry.instance().types
    before, readers["file"] = readers["file"], _Bounded
    try:
        yield
    finally:
        readers["file"] = before


def shadows(folder: Path) -> Iterator[Problem]:
    """Files that have the name of one that ships: Hydra takes one of them without a word, by the order of its search path.

    Args:
        folder: of the user's.
    """
    rule = ("rule", "a file of yours has a name of its own; it may start from the shipped one in its defaults")
    for name, where in _shipped():
        mine, theirs = folder / name, where / name
        if not os.path.exists(mine) or (theirs.exists() and mine.samefile(theirs)):
            continue
        group, own = Path(name).parent, mine.with_name(f"my_{Path(name).name}")
        place = str(theirs) if theirs.exists() else f"{name} of Hydra's own"
        tries = (f"mv {mine} {own}", *((f"{group}={own.stem}",) if str(group) != "." else ()))
        what = f"has the name of {place}, and only one of them would be read"
        yield Problem(key=str(mine), what=what, details=(rule,), tries=tries)


def _shipped() -> Iterator[tuple[str, Path]]:
    """(name, folder) of every file of this package's configuration and of Hydra's own."""
    Plugins.instance()  # which registers the launchers and sweepers
    for folder in (conf_dir(), Path(hydra.conf.__path__[0])):
        yield from ((str(path.relative_to(folder)), folder) for path in sorted(folder.rglob("*.yaml")))
    left: list[tuple[str, object]] = [("", ConfigStore.instance().repo)]
    while left:
        name, node = left.pop()
        if isinstance(node, Mapping):
            left += [(f"{name}/{child}".lstrip("/"), inner) for child, inner in node.items()]
        elif name.startswith("hydra/"):
            yield name, Path(hydra.conf.__path__[0])


@contextmanager
def composing(folder: str | Path | None = None) -> Iterator[None]:
    """Around Hydra's `compose`, with the shipped configuration; a program may be a Hydra application itself.

    Args:
        folder: of the user's, searched after it.
    """
    host, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with reading(), initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            if folder is not None:  # as Hydra's --config-dir, which has a way of its own into the search path
                search, anchor = create_config_search_path(str(conf_dir())), SearchPathQuery(provider="schema")
                search.prepend(provider="command-line", path=f"file://{Path(folder).absolute()}", anchor=anchor)
                GlobalHydra.instance().clear()
                Hydra.create_main_hydra2(task_name="app", config_search_path=search)
            yield
    finally:
        GlobalHydra.instance().hydra = host
