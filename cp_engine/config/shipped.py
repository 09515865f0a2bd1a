"""Where the configuration that ships lies, and what became of keys of older ones."""

from pathlib import Path

RENAMED = {"cp.pipeline": "cp.head_groups"}
"""Keys of older versions; the old one is refused with the new one named."""


def conf_dir() -> Path:
    """The shipped configuration: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
