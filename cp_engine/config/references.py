"""References of a configuration, `${...}`: how large it becomes when they are resolved, found without resolving any."""

import re
from collections.abc import Iterator, Mapping

from cp_engine.config.bounded import MOST_DEPTH
from cp_engine.errors import ConfigError, Problem

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
"""An innermost one; `*` then stands for its value in the one around it."""
MOST_LETTERS = 2**20
"""Of all values together, when references are resolved."""
MOST_STEPS = 100_000
"""That the search takes; a configuration of some hundred values takes some hundred."""


def require_bounded(tree: object) -> None:
    """Refuses references that double and double again.

    Args:
        tree: a configuration as plain containers, unresolved.

    Raises:
        ConfigError: the key whose value would be too large.
    """
    sizes = _Sizes(tree)
    for key in sizes.written:
        if (size := sizes.of(key, 1)) > MOST_LETTERS or sizes.steps > MOST_STEPS:
            what = f"becomes more than {MOST_LETTERS:,} letters when its references are resolved"
            raise ConfigError(
                [Problem(key=key, what=what if size > MOST_LETTERS else "refers to too much to be resolved")]
            )


class _Sizes:
    """Letters of each value, with those of what it refers to."""

    def __init__(self, tree: object) -> None:
        self.nodes = dict(_walk(tree, ""))
        self.written = [key for key, node in self.nodes.items() if isinstance(node, str) and "${" in node]
        self.steps = 0
        self._known: dict[str, int] = {}
        self._open: set[str] = set()

    def of(self, key: str, depth: int) -> int:
        """Of one key; of one that is being looked at, nothing: OmegaConf refuses a circle."""
        self.steps += 1
        if key in self._known or key in self._open or depth > 4 * MOST_DEPTH or self.steps > MOST_STEPS:
            return self._known.get(key, 0)
        self._open.add(key)
        node = self.nodes[key]
        if isinstance(node, str):
            size = len(node) + sum(self._of_reference(name, key, depth) for name in _names(node))
        else:
            children = node if isinstance(node, Mapping) else range(len(node)) if isinstance(node, list) else ()
            size = 1 + sum(self.of(_joined(key, child), depth + 1) for child in children)
        self._open.discard(key)
        self._known[key] = min(size, MOST_LETTERS + 1)
        return self._known[key]

    def _of_reference(self, name: str, at: str, depth: int) -> int:
        """The largest of what a reference may mean."""
        levels = len(name) - len(name.lstrip("."))
        parts = at.split(".")[:-levels] if levels else []
        path = ".".join([*parts, name.lstrip(".")] if name.strip(".") else parts)
        if "*" not in path:
            return self.of(path, depth + 1) if path in self.nodes else 1
        pattern = re.compile(".*".join(map(re.escape, path.split("*"))))
        return max([1, *(self.of(key, depth + 1) for key in self.nodes if pattern.fullmatch(key))])


def _names(text: str) -> Iterator[str]:
    """Everything in a text that may be the name of a key: of references, and of the arguments of resolvers."""
    while match := REFERENCE.search(text):
        resolver, colon, arguments = match.group(1).partition(":")
        for name in arguments.split(",") if colon else (resolver,):
            plain = name.strip(" '\"").replace("[", ".").replace("]", "")
            yield plain
            if resolver.strip() == "hydra":
                yield f"hydra.{plain}"
        text = f"{text[: match.start()]}*{text[match.end() :]}"


def _walk(node: object, key: str) -> Iterator[tuple[str, object]]:
    yield key, node
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from _walk(child, _joined(key, name))


def _joined(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
